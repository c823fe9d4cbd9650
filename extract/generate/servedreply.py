"""What a server of OpenAI's protocol says, in this program's words."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from extract.generate.generator import Generated


def only_choice(reply: Any) -> Any:
    """Return the one choice of a reply.

    Raises:
      ValueError: there is not exactly one.
    """
    choices = getattr(reply, "choices", None) or []
    if len(choices) != 1:
        raise ValueError(
            f"the server's reply has {len(choices)} choices, expected 1; does it speak "
            "OpenAI's protocol?"
        )
    return choices[0]


def read_choice(
    reply: Any,
    choice: Any,
    text: str,
    log_probs: Sequence[float | None] | None,
    stop_ids: Collection[int],
) -> Generated:
    """Return a generated text.

    Args:
      reply: the whole reply, with its usage.
      choice: its only choice; vLLM adds `token_ids` where it was asked to.
      text: of the choice.
      log_probs: one per token, or None.
      stop_ids: of the model, as far as known. A server gives the stop token among its
        ids or leaves it out; where there is only one it can have been no other.

    Raises:
      ValueError: the text ended in a way that makes it no answer.
    """
    if choice.finish_reason not in ("stop", "length"):
        raise ValueError(
            f"the server ended a text for the reason {choice.finish_reason!r}; "
            "expected 'stop' or 'length'"
        )
    ids = getattr(choice, "token_ids", None)
    ids, stop_id = (None, None) if ids is None else _split(ids, choice, stop_ids)
    usage = getattr(reply, "usage", None)
    return Generated(
        text=text.strip(),
        token_ids=ids,
        stop_id=stop_id,
        log_probs=_finite(log_probs),
        finish=choice.finish_reason,
        n_prompt_tokens=None if usage is None else usage.prompt_tokens,
        n_new_tokens=None if usage is None else usage.completion_tokens,
    )


def _split(
    ids: Sequence[int], choice: Any, stop_ids: Collection[int]
) -> tuple[tuple[int, ...], int | None]:
    """Return the ids without the stop token, and the stop token if it is known."""
    if choice.finish_reason != "stop":
        return tuple(ids), None
    if ids and ids[-1] in stop_ids:
        return tuple(ids[:-1]), ids[-1]
    return tuple(ids), next(iter(stop_ids)) if len(stop_ids) == 1 else None


def _finite(log_probs: Sequence[float | None] | None) -> tuple[float, ...] | None:
    """Return log-probabilities, or None if any is missing or not finite."""
    if log_probs is None or any(p is None or not math.isfinite(p) for p in log_probs):
        return None
    return tuple(float(p) for p in log_probs)
