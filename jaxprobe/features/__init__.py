"""From the store's rows to standardised tokens of families and spans."""
