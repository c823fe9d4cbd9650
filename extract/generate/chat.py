"""A message as a model's chat template writes it, and where its text lies in that.

Thinking is switched off by name, since templates differ in what they do when nothing
is said: Qwen3.5's larger models open a thinking block, its smallest does not.
"""

import dataclasses
from typing import Any

_MARK = "BEATRICE-MESSAGE"  # no white space: many templates trim what they are given
_BLOCKS = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"))
# Llama's templates write today's date unless they are told one; a run that is continued
# tomorrow would ask its questions differently. This is their own default.
_DATE = "26 Jul 2024"


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A rendered message.

    Attributes:
      text: special tokens included, as text.
      start: first character of the message in it.
      n_trimmed: characters the template cut off the message's beginning.
      n_cut: characters it cut off both ends.
    """

    text: str
    start: int
    n_trimmed: int
    n_cut: int


def template_fields(enable_thinking: bool) -> dict[str, Any]:
    """Return what templates are told beside the message, here and by a server."""
    return {
        "enable_thinking": enable_thinking,  # Qwen, Gemma
        "thinking": enable_thinking,  # Granite, DeepSeek
        "date_string": _DATE,
    }


def _apply(tokenizer: Any, message: str, enable_thinking: bool) -> str:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": message}],
        tokenize=False,
        add_generation_prompt=True,
        **template_fields(enable_thinking),
    )


def render_message(
    tokenizer: Any, message: str, *, enable_thinking: bool = False
) -> Rendered:
    """Return a user's message in the model's chat template, ready for its reply.

    Args:
      tokenizer: has a chat template.
      message: any text.
      enable_thinking: passed on under the names that templates know it by.

    Raises:
      ValueError: there is no chat template, it changes the message, or it opens a
        thinking block although thinking is off.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the tokenizer has no chat template; ask with plain prompts (without "
            "--chat), or use an instruction-tuned model"
        )
    parts = _apply(tokenizer, _MARK, enable_thinking).split(_MARK)
    text = _apply(tokenizer, message, enable_thinking)
    for kept in (message, message.strip(), message.rstrip(), message.lstrip()):
        if len(parts) == 2 and text == parts[0] + kept + parts[1]:
            break
    else:
        raise ValueError(
            "the chat template changes the text of a message, so that the context "
            "cannot be told from the question in it; ask with plain prompts"
        )
    if not enable_thinking:
        _check_closed(parts[1])
    n_trimmed = len(message) - len(message.lstrip())
    is_cut = n_trimmed > 0 and kept in (message.strip(), message.lstrip())
    n_cut = len(message) - len(kept)
    return Rendered(text, len(parts[0]), n_trimmed if is_cut else 0, n_cut)


def _check_closed(cue: str) -> None:
    """Refuse a reply that would begin inside a thinking block."""
    for begin, end in _BLOCKS:
        if cue.count(begin) > cue.count(end):
            raise ValueError(
                f"the chat template opens a thinking block ({begin}) although thinking "
                "is switched off, so the model's first words would be no answer; use "
                "a model whose template can switch it off, or plain prompts"
            )
