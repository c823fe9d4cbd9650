"""From signals to a calibrated probability: encoders, grid, fusion, detector."""
