"""What rival detectors read in a pass of their own, reduced to small arrays."""
