"""One reader for each layout in which question sets are published."""
