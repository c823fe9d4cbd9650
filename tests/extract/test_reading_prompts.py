"""The second prompt and the swapped passages."""
