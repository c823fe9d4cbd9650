"""What identifies how a model splits and wraps text: its tokenizer and its template."""

import hashlib
from typing import Any


def _tokenizer_sha(tokenizer: Any) -> str:
    """Return the SHA-256 of a fast tokenizer: vocabulary, rules and added tokens."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def _chat_template_sha(tokenizer: Any) -> str | None:
    """Return the SHA-256 of the chat template, or None if there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    return hashlib.sha256(str(template).encode()).hexdigest()


def words_identity(tokenizer: Any) -> dict[str, str | None]:
    """Return the SHA-256 of a fast tokenizer and of its chat template, if it has one.

    With None instead of a tokenizer both are unknown, which is None too.
    """
    if tokenizer is None:
        return {"tokenizer": None, "chat_template": None}
    return {
        "tokenizer": _tokenizer_sha(tokenizer),
        "chat_template": _chat_template_sha(tokenizer),
    }
