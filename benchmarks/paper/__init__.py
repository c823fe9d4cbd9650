"""The paper's numbers, and a run's own beside them."""
