"""Four signal families of every token, read in one forward pass."""
