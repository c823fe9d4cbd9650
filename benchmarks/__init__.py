"""Measuring: evaluation rows, tables, figures, the report."""
