"""Result rows, and the tables, figures and report made from them."""
