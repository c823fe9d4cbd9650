"""Which signals to read, and how the choice can be explained."""
