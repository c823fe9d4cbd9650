"""Files of records: what a file is, by content, and its records, streamed."""
