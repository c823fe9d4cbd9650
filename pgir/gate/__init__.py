"""The score as a gate: whether to retrieve, and which answer to keep."""

from pgir.gate.gate import Draft, Gate, Kept

__all__ = ["Draft", "Gate", "Kept"]
