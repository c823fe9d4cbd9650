"""The stages of a run, in the order of the data."""
