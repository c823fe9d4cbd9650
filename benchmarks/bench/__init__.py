"""`beatrice bench`: one measurement a file."""
