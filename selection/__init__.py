"""Which signals to read, and what the choice says."""
