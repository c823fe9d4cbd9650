"""Published detectors; functions marked `@baseline` here form the catalogue."""
