"""The two Flax modules: the combination encoder and the late-fusion head."""
