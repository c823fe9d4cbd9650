"""Published detectors: what `@baseline` marks in these files is the catalogue."""
