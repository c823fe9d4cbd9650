"""Text of unknown origin inside a prompt: fenced, so that it cannot end its fence.

The marker of a fence is 128 bits of SHA-256 over everything that is graded. It is as
unforeseeable to the text inside as a random one (a text that holds it would have to
hold its own hash), and the same prompt is built again after a kill.
"""

import hashlib
import json
import re
from collections.abc import Mapping

N_HEX = 32

# A chat template's control tokens are written in the text itself: <|im_end|>,
# <end_of_turn>, </s>, <<SYS>>, [INST]. A space after the bracket keeps a tokenizer
# from reading them as control tokens, and a person still reads the same words.
_ANGLE = re.compile(r"<(?=\S)")
_SQUARE = re.compile(r"\[(?=/?\w+\])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")


def marker_for(fields: Mapping[str, str], *, salt: str) -> str:
    """Return the marker of one prompt's fences.

    Args:
      fields: what is fenced, by name.
      salt: sets prompts over the same fields apart: rubric, attempt, seed.

    Returns:
      32 hexadecimal digits that no field contains.
    """
    for counter in range(2**16):
        content = json.dumps([salt, counter, sorted(fields.items())])
        marker = hashlib.sha256(content.encode()).hexdigest()[:N_HEX]
        if not any(marker in text for text in fields.values()):
            return marker
    raise AssertionError("no field can hold 65 536 hashes of itself")


def defuse(text: str) -> str:
    r"""Return the text with control tokens and control characters made harmless.

    `<x` becomes `< x` and `[INST]` becomes `[ INST]`; a control character, an exotic
    line separator (anything but tab and `\n`) or a lone surrogate becomes U+FFFD, which
    shows.
    """
    spaced = _SQUARE.sub("[ ", _ANGLE.sub("< ", text))
    return _CONTROL.sub("\ufffd", spaced.replace("\r\n", "\n"))


def fence(name: str, text: str, marker: str) -> str:
    """Return one field between two lines that hold the marker.

    Args:
      name: what the field is called in the prompt.
      text: what is graded.
      marker: of `marker_for`; not in the text.

    Raises:
      ValueError: the text holds the marker.
    """
    if marker in text:
        raise ValueError(f"the field {name!r} contains the marker of its own fence")
    return f"[begin {name} {marker}]\n{defuse(text)}\n[end {name} {marker}]"
