"""Layouts in which question sets are published, each with its reader."""
