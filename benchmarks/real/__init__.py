"""A released model on published questions, from one command to the report."""
