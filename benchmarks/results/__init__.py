"""From rows of results to tables, figures and the report."""
