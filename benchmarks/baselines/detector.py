"""Definition of a baseline detector: its inputs, output, requirements and cost."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from beatrice.benchmarks.results import names
from beatrice.extract.plugs import load_plug
from beatrice.extract.records import SETTINGS, Answer, Example, Sample, Setting, Split
from beatrice.extract.run.rows import ResultRow

if TYPE_CHECKING:  # the report only reads costs, and does not load JAX
    from beatrice.extract.generate.templates import PromptTemplate
    from beatrice.extract.store.store import FeatureStore
    from beatrice.jaxprobe.rows import StoreRows

# Beyond the pass that gave the answer and its four families:
#   samples        sampled answers to the same prompt (`beatrice sample`)
#   entailment     an NLI model, which says whether one text entails another
#   second_prompt  a prompt that asks the backbone about its answer
#   swapped        a reading of the answer after another question's passages
#   encoder        a text encoder to fine-tune
Requirement = Literal["samples", "entailment", "second_prompt", "swapped", "encoder"]
# Samples every split, since probes of semantic entropy train on training answers.
SAMPLE = "beatrice sample {} " + " ".join(f"--split {x}" for x in get_args(Split))
# P(entailment), P(neutral), P(contradiction) of pairs of texts, `[n_pairs, 3]`.
Relations = Callable[[Sequence[tuple[str, str]]], np.ndarray]
# Built from the same encoders as the selected set, so not its rivals.
OURS = (
    "champion",
    "encoder",
    "without_closed_book",
    "hidden_only",
    "early_fusion",
    "late_fusion_singles",
    "late_fusion_all",
    "majority",
    "permuted_labels",
)
# Detectors that `evaluate` measures.
_MEASURED = (*names.DETECTORS, *names.CONTROLS, *names.LAYER_PROBES)
_TAKEN = {*OURS, "labels", *(subject.detector for subject in _MEASURED)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DetectorInput:
    """Everything that a detector may read in one setting."""

    store: "FeatureStore"  # the four families
    rows: "StoreRows"  # question, label and split of every row
    layer: int  # whose hidden states to read, as chosen by the sweep
    questions: Sequence[Example] = ()  # all known questions, in any order
    answers: Sequence[Answer] = ()  # the greedy answer of every row
    # The sampled answers of every row; an empty tuple for rows without any.
    samples: Sequence[tuple[Sample, ...]] = ()
    # How passages were shown; None if no text is read.
    template: "PromptTemplate | None" = None
    # Reading by name, `[n_rows, ...]` float32; NaN for rows that were not read.
    readings: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    relations: Relations | None = None  # an NLI model, if any
    encoder: Path | None = None  # directory of a text encoder, if any

    @classmethod
    def of(
        cls,
        store: "FeatureStore",
        rows: "StoreRows",
        *,
        layer: int = 0,
        questions: Sequence[Example] = (),
        answers: Iterable[Answer] = (),
        samples: Iterable[Sample] = (),
        **fields: Any,
    ) -> "DetectorInput":
        """Return inputs for a store's rows; answers and samples come in any order."""
        pairs = zip(rows.ids.tolist(), rows.variants.tolist(), strict=True)
        keys = [(i, rows.setting, variant) for i, variant in pairs]
        by_key = {answer.key: answer for answer in answers}
        if by_key and (missing := [key for key in keys if key not in by_key]):
            raise ValueError(
                f"no answer for {missing[0]} among the {len(by_key)} given; give one "
                "for every row of the store"
            )
        drawn: dict[tuple[str, str, str], list[Sample]] = {key: [] for key in keys}
        for sample in sorted(samples, key=lambda sample: sample.sample):
            if sample.key in drawn:
                drawn[sample.key].append(sample)
        return cls(
            store=store,
            rows=rows,
            layer=layer,
            questions=questions,
            answers=[by_key[key] for key in keys] if by_key else (),
            samples=[tuple(drawn[key]) for key in keys],
            **fields,
        )

    @cached_property
    def examples(self) -> list[Example]:
        """The question of every row; raises ValueError if any is unknown."""
        by_id = {example.id: example for example in self.questions}
        if missing := [i for i in self.rows.ids.tolist() if i not in by_id]:
            raise ValueError(
                f"expected the question of every row, found none for {missing[0]!r} "
                f"among the {len(by_id)} given; pass `questions`"
            )
        return [by_id[example_id] for example_id in self.rows.ids]

    @property
    def known_answers(self) -> Sequence[Answer]:
        """The greedy answer of every row; raises ValueError if there are none."""
        if not self.answers:
            raise ValueError("expected an answer for every row; pass `answers`")
        return self.answers

    @property
    def known_template(self) -> "PromptTemplate":
        """How passages were shown; raises ValueError if unknown."""
        if self.template is None:
            raise ValueError(
                "expected the prompt template by which passages were shown; pass "
                "`template`, such as `PromptConfig().prompt_template()`"
            )
        return self.template

    @cached_property
    def texts(self) -> list[str]:
        """The text of every row for text-only detectors, see `joined_text`."""
        from beatrice.extract.generate.prompts import variants_of

        template, texts = self.known_template, []
        for example, answer in zip(self.examples, self.known_answers, strict=True):
            passages = dict(variants_of(self.rows.setting, example))[answer.variant]
            shown = [
                template.passage_text(passage)
                for i, passage in enumerate(passages)
                if i not in answer.dropped
            ]
            texts.append(joined_text(example.question, answer.text, shown))
        return texts


def joined_text(question: str, answer: str, passages: Sequence[str] = ()) -> str:
    """Return the text that text-only detectors read, one line for each part."""
    return "\n".join((question, answer, *passages))


class DetectorOutput(NamedTuple):
    """A detector's scores in one setting."""

    # `[n_seeds, n_rows]` float64, higher = more likely correct; NaN if undefined, which
    # is counted and never filled in.
    scores: np.ndarray
    # Rows on the detector's choices by validation (experiment "chosen").
    chosen: tuple[ResultRow, ...] = ()


Score = Callable[[DetectorInput], DetectorOutput]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """A detector, published or plain."""

    name: str  # in result rows, such as "semantic_entropy"
    title: str  # in tables
    source: str  # paper and section, and the official code that was followed
    score: Score  # returns a score for every row
    needs: frozenset[Requirement] = frozenset()  # beyond the pass that gave the answer
    # Names in `extract.readings.reader.READINGS`, which `beatrice baselines` reads in a
    # separate pass.
    reads: tuple[str, ...] = ()
    is_trained: bool = False  # whether it learns from labels of the training split
    # Splits whose sampled answers it reads; empty: all.
    draws_for: tuple[str, ...] = ()
    # How it differs from the published detector, in a sentence; may be empty.
    variant: str = ""
    settings: tuple[Setting, ...] = SETTINGS  # settings in which it is defined


def output_of(detector: Baseline, inputs: DetectorInput) -> DetectorOutput:
    """Call a detector, which may be user code, and check the type of its output."""
    output = detector.score(inputs)
    if not isinstance(output, DetectorOutput):
        raise TypeError(
            f"`score` returns {type(output).__name__}, expected DetectorOutput(scores)"
        )
    return output


class DetectorCost(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A detector's description, and its cost per question."""

    name: str
    title: str
    setting: Setting
    source: str
    variant: str
    needs: tuple[str, ...]  # beyond the pass that gave the answer, see `Requirement`
    is_trained: bool
    # Time for scoring, for the detector's share of readings, and for its samples (mean
    # over the answers with samples). One-off costs, which are fitting and samples used
    # only to learn from, are spread over all answers of the setting. None if its
    # samples were drawn before sampling was timed.
    seconds: float | None
    # Peak memory of the process (host, not device) while the detector's readings and
    # scores were computed, including the backbone. None in records older than this.
    peak_bytes: int | None = None
    n_forwards: int  # passes besides the one that gave the answer; none generates
    # Mean number of tokens sampled besides the answer. None if samples are from a
    # server that returns no token ids.
    n_new_tokens: float | None
    n_rows: int  # number of scored answers
    reason: str = ""  # why there are no scores at all; empty if there are some


# In the order of the paper's tables; other files come last.
_ORDER = "entropy selfcheck probes gnosis llm_check context text_models".split()
_registered: dict[str, dict[str, Baseline]] = {}  # by module, then by name


def baseline(
    name: str,
    *,
    title: str,
    source: str,
    needs: Iterable[Requirement] = (),
    reads: Sequence[str] = (),
    is_trained: bool = False,
    draws_for: Sequence[str] = (),
    variant: str = "",
    settings: Sequence[Setting] = SETTINGS,
) -> Callable[[Score], Baseline]:
    """Return a decorator that turns a function into a `Baseline`, see there.

    In a file of `detectors/`, the baseline joins the catalogue; elsewhere, it is named
    by `module:function` or an entry point, or passed to `judge`.
    """
    known: tuple[str, ...] = get_args(Requirement)
    unknown = [needs] if isinstance(needs, str) else sorted({*needs} - {*known})
    if unknown:
        raise ValueError(
            f"{name}: needs: expected some of {', '.join(known)}, found {unknown[0]!r}"
        )

    def register(score: Score) -> Baseline:
        detector = Baseline(
            name=name,
            title=title,
            source=source,
            score=score,
            needs=frozenset(needs),
            reads=tuple(reads),
            is_trained=is_trained,
            draws_for=tuple(draws_for),
            variant=variant,
            settings=tuple(settings),
        )
        others = _registered.setdefault(score.__module__, {})
        if name in others and others[name].score.__qualname__ != score.__qualname__:
            raise ValueError(f"{score.__module__} has two detectors called {name!r}")
        others[name] = detector
        return detector

    return register


@functools.cache
def catalogue() -> dict[str, Baseline]:
    """Return the baselines by name, in the order of tables; does not load Torch."""
    folder = Path(__file__).parent / "detectors"
    files = sorted(info.name for info in pkgutil.iter_modules([str(folder)]))
    order = [*_ORDER, *(name for name in files if name not in _ORDER)]
    modules = [importlib.import_module(f"{__package__}.detectors.{x}") for x in order]
    detectors: dict[str, Baseline] = {}
    for module in modules:
        registered = _registered.get(module.__name__, {})
        if twice := sorted(registered.keys() & detectors.keys()):
            raise ValueError(f"{module.__name__}: another file also has {twice[0]!r}")
        detectors |= registered
    return detectors


def is_plug(spec: str) -> bool:
    """Return whether a detector is user code, rather than in the catalogue."""
    return spec not in catalogue()


def find_detector(spec: str, *, option: str | None = None) -> Baseline:
    """Return a detector by its name in the catalogue, `module:NAME` or entry point.

    Pass the command-line `option` if `spec` is stored in a run, see `load_plug`.
    """
    known = catalogue()
    if spec in known:
        return known[spec]
    try:
        detector = load_plug(spec, "beatrice.baselines", option=option)
    except ValueError as error:
        if ":" in spec:
            raise
        raise ValueError(
            f"no detector {spec!r}; there are {', '.join(known)}; {error}"
        ) from None
    if not isinstance(detector, Baseline):
        raise ValueError(
            f"{spec} is {type(detector).__name__}, expected a Baseline "
            "(benchmarks/baselines/detector.py)"
        )
    is_known = known.get(detector.name) is detector
    if not is_known and (detector.name in known or detector.name in _TAKEN):
        raise ValueError(
            f"{spec}: the name {detector.name!r} is that of another row in the tables; "
            "choose a different name"
        )
    return detector


def format_list(detectors: Iterable[Baseline]) -> str:
    """Return a line for each detector: name, title, requirements and source."""
    cells = []
    for detector in detectors:
        needs = [*sorted(detector.needs), *(["a pass"] if detector.reads else [])]
        needed = ", ".join(needs) or "nothing more"
        cells.append((detector.name, detector.title, needed, detector.source))
    widths = [2 + max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "".join(f"{x:<{w}}" for x, w in zip(row, widths, strict=True)) for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def is_rival(name: str) -> bool:
    """Return whether a detector is a rival, not made of the selected set's encoders."""
    return name not in OURS
