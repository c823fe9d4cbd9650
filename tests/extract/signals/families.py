"""Architectures that stand for the others in laws that each of them follows."""

import pytest

REPRESENTATIVES = (
    "llama gemma2 gemma4 gpt2 falcon bloom qwen3_5 granitemoehybrid".split()
)


def representatives(families):
    """Return parameters for `pytest`: all families, most of them in the slow run."""
    others = set(families) - set(REPRESENTATIVES)
    return [
        pytest.param(family, marks=[pytest.mark.slow] * (family in others))
        for family in families
    ]
