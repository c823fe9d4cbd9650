"""What is shaped by speed alone: projections, products, draws."""
