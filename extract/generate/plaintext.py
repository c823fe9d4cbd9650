"""Text as text: what a user writes never becomes a model's control tokens.

A passage that holds `</s>` would otherwise end the sequence in the middle of the
context, for the model as for the detector.
"""

import functools
from collections.abc import Sequence
from typing import Any


@functools.lru_cache(maxsize=8)
def _control_tokens(tokenizer: Any, n_words: int) -> dict[int, str]:
    """Return the tokens that steer a model, such as the end of a turn, by id.

    Some tokenizers have thousands, so they are listed once per number of words.
    """
    added = {
        index: str(token.content)
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    found = added | dict(named)
    unknown = tokenizer.unk_token_id
    if unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        found.pop(unknown, None)  # it steers nothing, and is counted elsewhere
    return found


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool) -> Any:
    """Return the ids and offsets of a text that holds no control tokens of its own.

    Args:
      tokenizer: a fast one.
      text: what looks like a control token in it is split like any other word.
      add_special_tokens: put the tokenizer's own around it.

    Raises:
      ValueError: the tokenizer makes control tokens of the text nevertheless.
    """
    encoded = tokenizer(
        text,
        return_offsets_mapping=True,
        add_special_tokens=add_special_tokens,
        split_special_tokens=True,
    )
    refuse_control_tokens(tokenizer, text, encoded, (0, len(text)))
    return encoded


def refuse_control_tokens(
    tokenizer: Any, text: str, encoded: Any, characters: tuple[int, int]
) -> None:
    """Raise if a part of an encoded text became control tokens.

    A chat template writes control tokens around a message as text, so the message's
    cannot be told from them before the ids are made.

    Args:
      tokenizer: that encoded it.
      text: what was encoded.
      encoded: with `input_ids` and `offset_mapping`.
      characters: `[start, stop)` of the part that is plain text.
    """
    control = _control_tokens(tokenizer, len(tokenizer))
    offsets: Sequence[tuple[int, int]] = encoded["offset_mapping"]
    for token, (start, stop) in zip(encoded["input_ids"], offsets, strict=True):
        if token not in control or stop <= characters[0] or start >= characters[1]:
            continue
        # Where one token means both unknown and end, it may stand for other text.
        if text[start:stop].strip() == control[token].strip() != "":
            raise ValueError(
                f"the text holds {control[token]!r}, which {type(tokenizer).__name__} "
                "reads as a control token of the model; take it out of the question, "
                "its passages or the answer"
            )
