"""`beatrice bench`: one benchmark per file."""
