"""Rows, and the tables, figures and pages that are made of them."""
