"""The anatomy of the correctness signal as the report shows it, from rows alone."""
