"""Scoring answers that exist: one, many, or a file of them."""
