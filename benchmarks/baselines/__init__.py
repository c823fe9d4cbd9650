"""Rival detectors; a higher score means that an answer is likelier to be right."""
