"""One judge's reply becomes one verdict, or is said to be none.

A reply counts only if it is the word alone. Looking for a word inside a sentence
reads "The answer is not correct" as correct, so nothing is ever looked for.
"""

import re
from typing import Literal

Verdict = Literal["correct", "incorrect", "unparsable"]

# Markup that a model may put around its one word, opening and closing. Brackets and
# strike-through are not among them: they can mean "not this".
_PAIRS = (
    ("**", "**"),
    ("*", "*"),
    ("__", "__"),
    ("_", "_"),
    ("`", "`"),
    ('"', '"'),
    ("'", "'"),
    ("\u201c", "\u201d"),
    ("\u2018", "\u2019"),
)
# ASCII, or the Turkish dotless i would be folded into an i.
_WORD = re.compile(r"(in)?correct", re.IGNORECASE | re.ASCII)


def normalise_reply(text: str) -> str:
    """Return the reply without what may surround its one word.

    Taken away: white space, matching pairs of quotes or emphasis, and at most one full
    stop or exclamation mark at the end. Everything else stays, a leading hyphen or a
    question mark included: they change what is said.
    """
    text, n_stops = text.strip(), 0
    while True:
        if n_stops == 0 and text.endswith((".", "!")):
            text, n_stops = text[:-1].rstrip(), 1
            continue
        for opening, closing in _PAIRS:
            inner = text[len(opening) : -len(closing)]
            if inner and text.startswith(opening) and text.endswith(closing):
                text = inner.strip()
                break
        else:
            return text


def parse_verdict(text: str) -> Verdict:
    """Return the verdict of a judge's reply.

    Args:
      text: what the judge wrote.

    Returns:
      "correct" or "incorrect" if the normalised reply is that one word in any case,
      "unparsable" for everything else.
    """
    word = normalise_reply(text)
    if _WORD.fullmatch(word) is None:
        return "unparsable"
    return "incorrect" if len(word) == len("incorrect") else "correct"
