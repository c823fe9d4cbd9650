"""Records of a question: the example, the model's answer, and its label.

Records are frozen structs, stored as one JSON object per line. An unknown or missing
field is an error that names the file and the line, so that a renamed column cannot turn
into an empty one. To change a field, use `msgspec.structs.replace`.
"""

import functools
import hashlib
import json
import re
import string
import sys
import typing
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from beatrice.extract.run.files import from_json, sha256_json

Setting = Literal["closed_book", "with_context"]
Variant = Literal["original", "rewritten"]
Split = Literal["train", "validation", "test", "ood"]
Finish = Literal["stop", "length", "withheld"]
AnswerSpan = Literal["emitting", "literal"]  # see `signals.sequence.sequence_of`

SETTINGS: tuple[Setting, ...] = ("closed_book", "with_context")
Key = tuple[str, str, str]  # identifies an answer: example, setting, variant
# Stands in place of a set's name in results over the questions of all in-domain sets
# together (the paper's column "Test"); a set's own name cannot contain a space.
IN_DOMAIN = "all in-domain"
ACROSS_SETS = (IN_DOMAIN, "macro", "all_sets")  # names of the rows over several sets
MAX_NAME, MAX_ID = 64, 200  # characters
NAME_IN_WORDS = (
    f"name (letters, digits, '.', '_' and '-', at most {MAX_NAME} characters, the "
    f"first a letter, a digit or '_'; none of {', '.join(ACROSS_SETS)})"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# A path component that is empty or all dots, or that ends in ".." before a separator.
_UNSAFE_PATH = re.compile(r"(^|[/\\])\.*([/\\]|$)|\.\.[/\\]")


def is_safe_name(name: str) -> bool:
    """Return whether a question set may have this name, which becomes part of paths."""
    is_short = len(name) <= MAX_NAME and name not in ACROSS_SETS
    return is_short and _NAME.fullmatch(name) is not None


def check_id(name: str) -> None:
    """Check that an id can be shown and looked up; published ids may hold slashes."""
    is_shown = name.isprintable() and name == name.strip()
    if not is_shown or len(name) > MAX_ID or _UNSAFE_PATH.search(name):
        raise ValueError(
            f"field 'id': {name[:80]!r} is empty, longer than {MAX_ID} characters, a "
            "path to another folder, or not printable; give another"
        )


Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
# No vocabulary is larger; the tokenizer tells whether an id is one of the model's.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Check that the value of a field or an argument is one of the choices."""
    if value not in choices:
        raise ValueError(
            f"{name}: expected one of {', '.join(choices)}, found {value!r}"
        )


def check_choices(settings: Any) -> None:
    """Check that every field annotated as `Literal` has one of its values."""
    for name, hint in typing.get_type_hints(type(settings)).items():
        if typing.get_origin(hint) is Literal:
            check_choice(name, getattr(settings, name), typing.get_args(hint))


def as_golds(golds: Any) -> list[str]:
    """Return accepted answers as a list; a single string or a mapping is an error."""
    is_several = isinstance(golds, Iterable) and not isinstance(golds, str | Mapping)
    texts: list[Any] = list(golds) if is_several else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"golds: expected a list of texts, such as ['yes'], found {golds!r:.80}"
        )
    return texts


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records: immutable, and unknown fields are an error."""


class Passage(Record, frozen=True, kw_only=True):
    """One retrieved or supplied passage, `Passage(title="Bern", text="On the Aare.")`.

    Attributes:
      title: may be empty.
      text: what the model is shown, after the title if the template shows one.
      is_supporting: whether the question set marks it as containing the answer.
    """

    title: str
    text: str
    is_supporting: bool = False


class Example(Record, frozen=True, kw_only=True):
    """One question with its gold answers and, if supplied, its passages.

    Attributes:
      id: unique over the whole run.
      dataset: name of the question set; in-domain sets share the splits train,
        validation and test, held-out sets have the split `ood`.
      golds: accepted answers (aliases); at least one.
      passages: the context of the with-context setting, in the original wording.
      rewritten: the same context in other words; empty if there is none.
      meta: further facts from the generator or the source (JSON values only).
    """

    id: str
    dataset: str
    split: Split
    question: str
    golds: tuple[str, ...]
    passages: tuple[Passage, ...] = ()
    rewritten: tuple[Passage, ...] = ()
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a name that could become another path, and a question without gold."""
        if not is_safe_name(self.dataset):
            raise ValueError(
                f"field 'dataset': {self.dataset[:80]!r} is not a {NAME_IN_WORDS}"
            )
        check_id(self.id)
        if not isinstance(self.question, str):
            raise ValueError(f"question: expected a text, found {self.question!r:.80}")
        golds = as_golds(self.golds)  # may be a generator, which yields them only once
        msgspec.structs.force_setattr(self, "golds", tuple(golds))
        if not any(gold.strip() for gold in golds):
            raise ValueError(
                f"field 'golds': the question {self.id!r} has no gold answer; give at "
                "least one"
            )

    def context(self, variant: Variant) -> tuple[Passage, ...]:
        """Return the passages of one variant."""
        return self.passages if variant == "original" else self.rewritten


class AnswerRecord(Record, frozen=True, kw_only=True):
    """Base of the records of one answer, which `key` identifies."""

    example_id: str
    setting: Setting
    variant: Variant

    @property
    def key(self) -> Key:
        """Return the key of the answer: example, setting, variant."""
        return (self.example_id, self.setting, self.variant)


class Answer(AnswerRecord, frozen=True, kw_only=True):
    """What the model said, with the exact ids it read and wrote.

    Attributes:
      example_id: id of the question.
      setting: "closed_book", or "with_context" if passages were shown.
      variant: wording of the passages, "original" or "rewritten".
      text: the answer, without the stop token.
      prompt_ids: the ids the model read, special tokens included.
      token_ids: the ids it wrote, without the stop token; may be empty.
      stop_id: the stop token it emitted, or None if the answer was cut at the
        length limit.
      context_span: `[start, stop)` of the passages inside `prompt_ids`; both are
        equal if there is no context.
      dropped: indices (from 0) of the passages left out of the context because the
        prompt would not have fitted the model's window.
    """

    text: str
    prompt_ids: tuple[TokenId, ...]
    token_ids: tuple[TokenId, ...]
    stop_id: TokenId | None
    context_span: tuple[int, int]
    dropped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check that the context is inside the prompt."""
        start, stop = self.context_span
        if not 0 <= start <= stop <= len(self.prompt_ids):
            raise ValueError(
                f"context_span is [{start}, {stop}], expected [start, stop) inside the "
                f"{len(self.prompt_ids)} ids of the prompt"
            )


class Sample(AnswerRecord, frozen=True, kw_only=True):
    """One sampled answer, with the fields of `Generated`.

    Log-probabilities are the model's own, before temperature, top-p and top-k; the
    published code of semantic entropy takes them after these.
    """

    sample: int  # 0 to n_samples - 1
    text: str
    token_ids: tuple[int, ...] | None
    stop_id: int | None
    log_probs: tuple[float, ...] | None
    finish: Finish


class Label(AnswerRecord, frozen=True, kw_only=True):
    """Whether an answer is right.

    Attributes:
      example_id: id of the question; `setting` and `variant` are the `Answer`'s.
      verdicts: one entry per judge, in the judges' order.
      label: True, False, or None if the judges disagree or cannot decide.
      reason: how the label was decided, in words.
      answer_sha: `answer_sha` of the answer's text; None in older files.
      question_key: a digest of the question's text; None in older files.
    """

    verdicts: tuple[str, ...]
    label: bool | None
    reason: str
    answer_sha: str | None = None
    question_key: str | None = None


def answer_sha(text: str) -> str:
    """Return the first 12 digits of the SHA-256 of an answer, stripped."""
    return sha256_json(text.strip())[:12]


class Rewrite(Record, frozen=True, kw_only=True):
    """The rewritten context of one question."""

    example_id: str
    source_sha: str  # SHA-256 of the question and passages that were rewritten
    text: str | None  # None if it failed
    reason: str | None = None  # why it failed
    added_numbers: tuple[str, ...] = ()  # this and the next two: see `label.rewrite`
    added_entities: tuple[str, ...] = ()
    from_question: tuple[str, ...] = ()

    @property
    def is_flagged(self) -> bool:
        """Return whether the rewrite says something that its source does not."""
        return bool(self.added_numbers or self.added_entities)


def needs_rewrite(example: Example) -> bool:
    """Return whether an example needs a rewrite: in-domain sets only (paper)."""
    return bool(example.passages) and not example.rewritten and example.split != "ood"


def source_sha(example: Example) -> str:
    """Return the SHA-256 of the question and passages a rewrite is made from."""
    passages = [[p.title, p.text] for p in example.passages]
    return sha256_json([example.question, passages])


def with_rewrites(
    examples: Sequence[Example], rewrites: Mapping[str, Rewrite]
) -> list[Example]:
    """Return the examples with their rewritten contexts."""
    joined = list(examples)
    for i, example in enumerate(examples):
        rewrite = rewrites.get(example.id)
        if rewrite is None or not needs_rewrite(example):
            continue
        if rewrite.source_sha != source_sha(example):
            raise ValueError(
                f"the rewritten context of {example.id!r} was made from another "
                "question or other passages; run `beatrice rewrite` again"
            )
        if rewrite.text is not None:
            # No title: the rewriter read the titles that the model would be shown.
            is_supporting = any(p.is_supporting for p in example.passages)
            passage = Passage(title="", text=rewrite.text, is_supporting=is_supporting)
            joined[i] = msgspec.structs.replace(example, rewritten=(passage,))
    return joined


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))
# Full-width letters and digits, half-width kana; deleted are hyphens and apostrophes
# that Unicode counts as signs and letters: minus, acute, Hawaiian's and Ukrainian's.
_PLAIN = {i: unicodedata.normalize("NFKC", chr(i)) for i in range(0xFF01, 0xFFEF)}
_PLAIN |= dict.fromkeys((0x2212, 0xB4, 0x2BB, 0x2BC), "")


def normalise(text: str) -> str:
    """Return the text as SQuAD's script compares it (Rajpurkar et al. 2016).

    Lower-case it, delete punctuation, and turn articles and white space into single
    spaces: "J.K. Rowling" becomes "jk rowling". Unlike SQuAD's script, to which
    "1979-80" and "1979\u201380" are two answers, delete punctuation of every script, as
    MLQA's does (Lewis et al. 2020). Accents stay, in composed form. Format characters,
    which nobody sees, are deleted: soft hyphens, direction marks. Full-width letters
    and the digits of every script become plain ones, half-width kana full ones, and
    minus signs and letters that serve as apostrophes ("Hawai\u02bbi") are deleted.
    """
    text = text.lower()
    if not text.isascii():
        text = text.translate(_PLAIN)
        text = "".join(
            str(unicodedata.decimal(c, c))
            for c in text
            if not unicodedata.category(c).startswith(("P", "Cf"))
        )
        text = unicodedata.normalize("NFC", text)
    text = text.translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


# Matches a character, with its vowel signs, of a script without spaces between words:
# Thai, Lao, Burmese, Khmer, Han and kana. Their digits form numbers as usual.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u2e80-\u2fdf\u3005-\u3007"
    "\u3021-\u3029\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua9e0-\ua9ff"
    "\uaa60-\uaa7f\uf900-\ufaff\uff66-\uff9f\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
UNSPACED = re.compile(rf"(?!\d)[{_UNSPACED}](?:(?!\w)[{_UNSPACED}])*")


def spaced(text: str) -> str:
    """Return a text with spaces around every word, even if its script has none.

    In such a script a word is one character, as MLQA's script splits Chinese. In NFC; a
    ZERO WIDTH SPACE is a space, other format characters are deleted. ASCII stays as is.
    """
    if text.isascii():
        return text
    text = unicodedata.normalize("NFC", text.replace("\u200b", " "))
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")
    return " ".join(UNSPACED.sub(r" \g<0> ", text).split())


@functools.cache
def word_pattern() -> str:
    r"""Return the pattern of a word: `\w` alone excludes marks and splits at them."""
    kinds = (unicodedata.category(chr(i))[0] for i in range(sys.maxunicode + 1))
    runs = re.finditer("M+", "".join(kinds))
    marks = "".join(f"{chr(run.start())}-{chr(run.end() - 1)}" for run in runs)
    return rf"\w[\w{marks}]*"


def split_words(text: str) -> list[str]:
    """Return the words (letters, digits and their marks) of a text in any script."""
    return re.findall(word_pattern(), spaced(text))


# Signs that count between numbers or after letters; hyphens mostly join years, scores.
_SIGNS = {"+": " plus ", "*": " times ", "/": " over ", "#": " sharp "}
_SIGN = re.compile(r"(?:(?<=\d)\s*(?=[+*/]\s*\d)|(?<=[^\W\d_])(?=[+#]))([+*/#])")


def text_key(question: str) -> bytes:
    """Return a key that is equal for questions differing in case, marks or articles.

    Signs count: "3+5" and "3-5" are two questions; "C", "C#" and "C++" are three; but
    "3-5" and "35" are one. A ZERO WIDTH SPACE is a space: copies of a set differ in it.
    """
    folded = unicodedata.normalize("NFKC", question.replace("\u200b", " ")).casefold()
    folded = _SIGN.sub(lambda sign: _SIGNS[sign[1]], folded)
    return hashlib.blake2b((normalise(folded) or folded).encode()).digest()[:16]


RecordT = TypeVar("RecordT", bound=Record)


def to_json(record: Record) -> str:
    """Return the record as one line of JSON, without the line end."""
    # By `json`, not msgspec: manifests hold hashes of these exact bytes.
    return json.dumps(record, default=msgspec.structs.asdict)


def read_records(path: Path, kind: type[RecordT]) -> Iterator[RecordT]:
    """Yield the records of a JSON-lines file; blank lines are an error."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield from_json(kind, line, f"{path}, line {number}")


def write_lines(records: Iterable[Record]) -> str:
    """Return the records as JSON lines."""
    return "".join(to_json(record) + "\n" for record in records)
