"""The feature store: what is kept, how it is laid out, written and read."""
