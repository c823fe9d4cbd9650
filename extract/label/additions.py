"""What a rewritten text says that its source does not: numbers and capitalised names.

A flag is a reason to look, not a verdict. It errs on the side of flagging: a derived
form ("Germans" from "Germany") counts as new. Scripts without capitals have no names
here, only numbers.
"""

import dataclasses
import re
import unicodedata

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")
_SENTENCE_END = re.compile(r"(?:^|[.!?:;\n\u2022]|[-*]\s)[\s\"'\u201c\u2018(\[]*$")
_POSSESSIVE = re.compile(r"['\u2019]s?$")

# Words of a name may be fewer in the rewrite, as when a middle name is left out.
_LONGEST_GAP = 2

_NUMBER_WORDS = {
    word: str(number)
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen "
        "fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()
    )
}

_PRONOUN = "one"  # seldom a number: "one of the sons"

# Letters with a stroke and ligatures, which no normal form takes apart.
_PLAIN = str.maketrans(
    {"\u0142": "l", "\u00f8": "o", "\u0111": "d", "\u0131": "i"}
    | {"\u00e6": "ae", "\u0153": "oe", "\u00fe": "th", "\u00f0": "d"}
)

# What may open a sentence without being a name.
_OPENERS = frozenset(
    "a according additionally after all also although among an and another as at "
    "based because before being between both but by during each early evidence "
    "following for formerly from further furthermore given he her here his however "
    "if in including initially it its known later like located many meanwhile more "
    "moreover most no not of on one originally other our overall per prior recently "
    "she similarly since so some specifically subsequently such that the their then "
    "there therefore these they this those though through thus to under until upon "
    "was we were what when where whereas which while who whose with within yes you "
    "born founded".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Additions:
    """What a rewrite adds.

    Attributes:
      numbers: as written in the rewrite, in digits or words up to twenty; not in the
        source in either notation.
      entities: runs of capitalised words that the source does not have, in any case,
        close together and in this order.
      from_question: those of both that the question has; a rewriter that was shown
        the question may have taken them from there.
    """

    numbers: tuple[str, ...] = ()
    entities: tuple[str, ...] = ()
    from_question: tuple[str, ...] = ()

    @property
    def is_flagged(self) -> bool:
        """Return whether anything was added."""
        return bool(self.numbers or self.entities)


def _fold(text: str) -> str:
    """Return the text without case, accents and compatibility forms."""
    split = unicodedata.normalize("NFKD", text)
    bare = "".join(c for c in split if not unicodedata.combining(c))
    return bare.casefold().translate(_PLAIN)


def _words(text: str) -> list[str]:
    """Return the folded words, possessive endings taken off."""
    return [_POSSESSIVE.sub("", _fold(m.group())) for m in _WORD.finditer(text)]


def _number_value(text: str) -> str:
    """Return a number without thousands separators and padding zeros."""
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    whole, point, rest = text.partition(".")
    rest = rest.rstrip("0") if rest.isdecimal() else rest
    return (whole.lstrip("0") or "0") + (f"{point}{rest}" if rest else "")


def _numbers(text: str) -> dict[str, str]:
    """Return the numbers of a text, value to first notation."""
    found: dict[str, str] = {}
    for match in _NUMBER.finditer(unicodedata.normalize("NFKC", text)):
        found.setdefault(_number_value(match.group()), match.group())
    for match in _WORD.finditer(text):
        value = _NUMBER_WORDS.get(match.group().casefold())
        if value is not None:
            found.setdefault(value, match.group())
    return found


def _entities(text: str) -> list[str]:
    """Return the runs of capitalised words; a plain sentence opener is none."""
    runs: list[list[re.Match[str]]] = []
    for match in _WORD.finditer(text):
        word = match.group()
        if not word[0].isupper():
            continue
        opens = _SENTENCE_END.search(text[: match.start()]) is not None
        if _fold(word) in _OPENERS and (opens or len(word) == 1):
            continue
        if _fold(word) in _NUMBER_WORDS:
            continue  # compared as a number
        joined = runs and text[runs[-1][-1].end() : match.start()] in (" ", "-")
        if joined:
            runs[-1].append(match)
        else:
            runs.append([match])
    return list(dict.fromkeys(text[r[0].start() : r[-1].end()] for r in runs))


def _has_in_order(words: list[str], wanted: list[str]) -> bool:
    """Tell whether words stand in this order, few others between them."""
    for start, word in enumerate(words):
        if word != wanted[0]:
            continue
        window = iter(words[start : start + len(wanted) + _LONGEST_GAP])
        if all(name in window for name in wanted):
            return True
    return False


def find_additions(rewrite: str, source: str, question: str = "") -> Additions:
    """Compare a rewrite with its source.

    Args:
      rewrite: the new text.
      source: all that it may use.
      question: what it was aligned to.
    """
    there, asked = _numbers(source), _numbers(question)
    numbers = [
        (value, text)
        for value, text in _numbers(rewrite).items()
        if value not in there and text.casefold() != _PRONOUN
    ]
    source_words, question_words = _words(source), _words(question)
    entities = [
        name
        for name in _entities(rewrite)
        if not _has_in_order(source_words, _words(name))
    ]
    return Additions(
        numbers=tuple(text for _, text in numbers),
        entities=tuple(entities),
        from_question=(
            *(text for value, text in numbers if value in asked),
            *(n for n in entities if _has_in_order(question_words, _words(n))),
        ),
    )
