"""Training: one member, the grid, heads of a search round, streams, devices."""
