"""Numbers raised by hand, each beside what it stands for.

By them a file that is continued, a cache and the record of a stage know whether this
program would have written the same.
"""

import pytest

from beatrice.extract.run.files import sha256_json
from beatrice.pgir import bm25

# Of each script, with marks, blanks and hyphens that nobody sees.
TEXTS = [
    "The A-B's 1979\u201380, d\u2019Arc; C# (x+y) e\u0301t\u00e9?",
    "Кто? Где. Αθήνα; \u0915\u094d\u092f\u093e\u0964 \u0645\u064e\u0646\u0652\u061f",
    "首都是北京。「東京」は？ ภาษาไทย",
    "hy\u00adphen zero\u200bwidth one\ufefftwo",
]

STANDS_FOR = {
    "words of BM25": (bm25.WORDS, lambda: bm25._words(TEXTS)),
}
EXPECTED = {
    "words of BM25": ("bm25, characters of scripts without blanks", "6547c2df0567"),
}


@pytest.mark.parametrize("name", STANDS_FOR)
def test_a_number_changes_with_what_it_stands_for(name):
    number, outputs = STANDS_FOR[name]
    digest = sha256_json(outputs())[:12]
    assert (number, digest) == EXPECTED[name], "raise the number and write both here"
