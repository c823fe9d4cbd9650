"""From an answer to a label: exact match, judges, audits, rewritten contexts."""
