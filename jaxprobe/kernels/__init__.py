"""What is shaped by speed alone: masked layers, projections, products, draws."""
