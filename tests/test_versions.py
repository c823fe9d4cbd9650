"""Numbers raised by hand, each beside what it stands for.

By them a file that is continued, a cache and the record of a stage know whether this
program would have written the same.
"""

import pytest

from beatrice.extract.generate.templates import PromptConfig, Words
from beatrice.extract.run.files import sha256_json
from beatrice.pgir import bm25, given
from tests.extract.generate.test_local import byte_fallback
from tests.pgir.test_scorer import REPLY, TURNS, prepending

# Of each script, with marks, blanks and hyphens that nobody sees.
TEXTS = [
    "The A-B's 1979\u201380, d\u2019Arc; C# (x+y) e\u0301t\u00e9?",
    "Кто? Где. Αθήνα; \u0915\u094d\u092f\u093e\u0964 \u0645\u064e\u0646\u0652\u061f",
    "首都是北京。「東京」は？ ภาษาไทย",
    "hy\u00adphen zero\u200bwidth one\ufefftwo",
]


def read_ids():
    """What is read of an answer under prompts that end in each way."""
    words = [
        Words(closed_book="{question}" + x) for x in (":", "\n", " 「", "答", " (")
    ]
    asked = [PromptConfig(template=x) for x in words]
    chat = [PromptConfig(template="short", chat=True)] * 2
    for make in (byte_fallback, prepending):
        templates = [None] * len(asked) + [TURNS, REPLY]
        for config, chat_template in zip(asked + chat, templates, strict=True):
            tokenizer = make()
            tokenizer.chat_template = chat_template
            answer = given.AnswerToScore(question="who?", answer="Paris")
            read = given.prepare(tokenizer, config.prompt_template(), answer)
            yield read.prompt.ids, read.answer.token_ids


STANDS_FOR = {
    "ids of texts": (given.READING, lambda: list(read_ids())),
    "words of BM25": (bm25.WORDS, lambda: bm25._words(TEXTS)),
}
EXPECTED = {
    "ids of texts": (2, "ac630f9a73ea"),
    "words of BM25": ("bm25, characters of scripts without blanks", "6547c2df0567"),
}


@pytest.mark.parametrize("name", STANDS_FOR)
def test_a_number_changes_with_what_it_stands_for(name):
    number, outputs = STANDS_FOR[name]
    digest = sha256_json(outputs())[:12]
    assert (number, digest) == EXPECTED[name], "raise the number and write both here"
