"""When to retrieve, and what to keep: PGIR and its rivals."""
