"""Rival detectors, one a file; scores are higher where the answer is likelier right."""
