"""Detectors trained on gold contexts, on answers from retrieved ones."""
