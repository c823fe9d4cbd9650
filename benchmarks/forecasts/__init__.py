"""What a run needs, said before it is done."""
