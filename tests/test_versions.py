"""Version numbers, raised by hand, each with a digest of what it stands for.

They tell a file that is continued, a cache and the record of a stage whether this
program would have written the same.
"""

import itertools

import numpy as np
import pytest

from beatrice.benchmarks import stages as measured
from beatrice.benchmarks import transfer
from beatrice.benchmarks.baselines import plain
from beatrice.benchmarks.baselines.detectors import selfcheck
from beatrice.extract.generate.templates import PromptConfig, Words
from beatrice.extract.label import labels, stage
from beatrice.extract.records import Passage
from beatrice.extract.run.files import sha256_json
from beatrice.jaxprobe.config import DETECTOR_FORMAT, INTERVAL_FORMAT, PROTOCOL
from beatrice.jaxprobe.families import width_groups
from beatrice.jaxprobe.grid import fit_blocks
from beatrice.jaxprobe.linear import feature_scale
from beatrice.jaxprobe.metrics import (
    wider_auprc_interval,
    wider_interval,
    wilson_interval,
)
from beatrice.jaxprobe.stages import CALIBRATE
from beatrice.jaxprobe.stages import TRAIN as TRAINED
from beatrice.pgir import bm25, given
from beatrice.pgir import stages as control
from beatrice.pgir.controllers import dragin
from beatrice.selection import ablation, anatomy
from tests.extract.generate.test_local import byte_fallback
from tests.jaxprobe.test_grid import BLOCK, ENCODER, TRAIN, planted_parts
from tests.pgir.test_scorer import REPLY, TURNS, prepending
from tests.records import an_answer, an_example

# Several scripts, with invisible marks, blanks and hyphens.
TEXTS = [
    "The A-B's 1979\u201380, d\u2019Arc; C# (x+y) e\u0301t\u00e9?",
    "Кто? Где. Αθήνα; \u0915\u094d\u092f\u093e\u0964 \u0645\u064e\u0646\u0652\u061f",
    "首都是北京。「東京」は？ ภาษาไทย",
    "hy\u00adphen zero\u200bwidth one\ufefftwo",
]
ANSWERS = ["1979-80", "Darc", "C", "Кто", "北京", "thai", "hyphen", "dwidth"]


def verdicts():
    """Yield whether texts contain answers, and which words equal an answer."""
    for text, answer in itertools.product(TEXTS, ANSWERS):
        yield labels.contains_gold(text, [answer]), labels.token_f1(text, [answer])
        yield [labels.exact_match(answer, [word]) for word in text.split()]
    numbers = ("1964 年", "１９６４年"), ("35", "\u06f3\u0665")
    for answer, gold in (("", "A"), ("a.", "A"), *numbers):
        yield labels.exact_match(answer, [gold])


def grounded():
    """Yield whether answers stand in a context."""
    for text, answer in itertools.product(TEXTS, ANSWERS):
        example = an_example(passages=(Passage(title="", text=text),))
        yield labels.stands_in_context(example, an_answer(text=answer))


def words_and_sentences():
    """Return the parts into which published detectors split a text."""
    pairs = plain.word_pairs().build_analyzer()
    return [
        (pairs(x), selfcheck.sentences_of(x), selfcheck.tokens_of(x)) for x in TEXTS
    ]


def owners():
    """Yield the word of each token, also for tokens that are parts of characters."""
    ends = list(range(1, 12)), [1, 2, 3, 1, 3, 5], [2, 5, 6, 12]
    for text in ("Guzolt Fall", "🦇 a b", *TEXTS):
        for stops in ends:
            words, places = dragin.word_owners(stops, text)
            yield words, places.tolist()


def fits():
    """Yield scales of constant features, groups of lengths, and a short training."""
    rows = np.full((50, 2), 0.1, np.float32)
    yield [x.tolist() for x in feature_scale(rows)]
    lengths = np.random.default_rng(0).integers(1, 9, (300, 2))
    for n in (40, 70, 110, 230, 300):
        yield [group.tolist() for group in width_groups(lengths[:n], 32)]
    groups = ([part] for part in planted_parts())
    (trained,) = fit_blocks([BLOCK], *groups, encoder=ENCODER, config=TRAIN)
    # Two digits, as machines add in different orders.
    yield [round(float(np.mean(x)), 2) for x in trained.info[:2]]


def read_ids():
    """Yield the token ids read for an answer after prompts of various endings."""
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


def intervals():
    """Yield the intervals of an AUROC, an AUPRC and a share, from given resamples."""
    draws = np.linspace(0.4, 0.9, 41)
    scores, questions = np.arange(12.0), np.arange(12) // 2
    labels = np.arange(12) % 3 > 0
    yield wider_interval(draws, scores, labels, questions)
    yield wider_auprc_interval(draws, 0.7, labels, questions)
    yield wilson_interval(0.7, 6)


STANDS_FOR = {
    "fits": (PROTOCOL, lambda: list(fits())),
    "intervals": (INTERVAL_FORMAT, lambda: np.round([*intervals()], 9).tolist()),
    "verdicts": (stage._FORMAT, lambda: list(verdicts())),
    "scores of detectors": (measured.SCORE_FORMAT, words_and_sentences),
    "analyses": (anatomy.FORMAT, lambda: list(grounded())),
    "calls of controllers": (control.SERVED, lambda: list(owners())),
    "ids of texts": (given.READING, lambda: list(read_ids())),
    "words of BM25": (bm25.WORDS, lambda: bm25._words(TEXTS)),
}
EXPECTED = {
    "fits": (3, "bef8166cc330"),
    "intervals": (3, "0a23cd8285d6"),
    "verdicts": ("4", "82d60ac1dab2"),
    "scores of detectors": ("5", "e975ecd1e678"),
    "analyses": (7, "d13653d5f4ed"),
    "calls of controllers": (2, "6f9305327dd2"),
    "ids of texts": (2, "ac630f9a73ea"),
    "words of BM25": ("bm25, characters of scripts without blanks", "6547c2df0567"),
}


@pytest.mark.parametrize("name", STANDS_FOR)
def test_a_version_number_changes_with_what_it_stands_for(name):
    number, outputs = STANDS_FOR[name]
    digest = sha256_json(outputs())[:12]
    assert (number, digest) == EXPECTED[name], "raise the number and write both here"


IN_RECORDS = [
    (TRAINED, "protocol", PROTOCOL),
    (stage.LABEL, "format", stage._FORMAT),
    (CALIBRATE, "format", DETECTOR_FORMAT),
    (measured.BASELINES, "format", measured.SCORE_FORMAT),
    *(
        (done, "interval format", INTERVAL_FORMAT)
        for done in (
            measured.EVALUATE,
            ablation.ABLATE,
            measured.BASELINES,
            control.CONTROL,
            transfer.TRANSFER,
        )
    ),
    (anatomy.ANATOMY, "format", anatomy.FORMAT),
    (control.CONTROL, "served", control.SERVED),
]


@pytest.mark.parametrize(("done", "name", "number"), IN_RECORDS)
def test_the_record_of_a_stage_names_the_version_number(done, name, number):
    assert done.identity(done.presets.get("smoke"))[name] == str(number)
