"""Published detectors: a file that ends in `DETECTORS` is in the catalogue."""
