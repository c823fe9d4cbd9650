"""Published detectors that learn from labelled answers, one a file."""
