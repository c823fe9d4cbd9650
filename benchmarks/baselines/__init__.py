"""Rival detectors, one a file: what they score the same answers with."""
