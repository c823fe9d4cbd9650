"""`beatrice bench`: what the README claims, measured."""
