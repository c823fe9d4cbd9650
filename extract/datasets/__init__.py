"""Question sets in the formats in which they are published."""
