"""Published detectors that orient or choose from what one pass more has read."""
