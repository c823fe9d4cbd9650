"""All detectors side by side, as the paper's tables have them, and what is sure."""
