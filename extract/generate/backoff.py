"""A request that failed: whether and when to send it again, and what it may cost."""

import random

import openai

_FIRST, _LONGEST = 0.5, 8.0  # seconds, as the `openai` client waits
_LONGEST_ASKED = 60.0  # that a server may ask for
# By name: which library connects is the `openai` client's own affair.
_NEVER_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout")


def is_passing(error: openai.OpenAIError) -> bool:
    """Tell whether the same request may succeed later.

    No connection, a time-out, and the states 408, 409, 429 and 5xx pass.
    """
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


def may_have_cost(error: openai.OpenAIError) -> bool:
    """Tell whether a server may charge for a request although it gave no answer.

    Only a refusal, or a connection that never stood, is surely free: a server goes on
    writing when its client stops listening.
    """
    if isinstance(error, openai.APIStatusError):
        return False
    return type(error.__cause__).__name__ not in _NEVER_SENT


def seconds_before_retry(error: openai.OpenAIError, attempt: int) -> float:
    """Return how long to wait: what the server asks for, else longer each time.

    Args:
      error: of the last attempt.
      attempt: of it, from 0.
    """
    if isinstance(error, openai.APIStatusError):
        try:
            asked = float(error.response.headers.get("retry-after", ""))
        except ValueError:
            asked = 0.0  # absent, or a date
        if 0 < asked <= _LONGEST_ASKED:
            return asked
    # Requests that failed together are spread, or they would fail together again.
    return min(_FIRST * 2**attempt, _LONGEST) * random.uniform(0.75, 1.0)
