"""What a baseline detector is: what it reads, what it returns, what it costs."""

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

if TYPE_CHECKING:  # the report reads costs alone, and loads no JAX
    from beatrice.extract.generate.templates import PromptTemplate
    from beatrice.extract.store.store import FeatureStore
    from beatrice.jaxprobe.rows import Rows

# Beyond the pass that gave the answer and its four families:
#   samples        answers drawn to the same prompt (`beatrice sample`)
#   entailment     an NLI model, which tells what follows from what
#   second_prompt  a question about the answer is put to the backbone
#   swapped        the answer is read behind another question's passages
#   encoder        a text encoder, which is fine-tuned
Requirement = Literal["samples", "entailment", "second_prompt", "swapped", "encoder"]
# Draws for every split: training answers teach probes of semantic entropy.
SAMPLE = "beatrice sample {} " + " ".join(f"--split {x}" for x in get_args(Split))
# P(entailment), P(neutral), P(contradiction) of pairs of texts, `[n_pairs, 3]`.
Relations = Callable[[Sequence[tuple[str, str]]], np.ndarray]
# Built from the same encoders as the selected set: no rivals of it.
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
# What `evaluate` measures.
_MEASURED = (*names.DETECTORS, *names.CONTROLS, *names.LAYER_PROBES)
_TAKEN = {*OURS, "labels", *(subject.detector for subject in _MEASURED)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DetectorInput:
    """What a detector may read of one setting."""

    store: "FeatureStore"  # the four families
    rows: "Rows"  # what the rows are, with labels and splits
    layer: int  # from which hidden states are read, as the sweep chose it
    questions: Sequence[Example] = ()  # all that are known, in any order
    answers: Sequence[Answer] = ()  # the greedy answer of every row
    # The drawn answers of every row; empty where none was drawn.
    samples: Sequence[tuple[Sample, ...]] = ()
    # How passages were shown; None where no text is read.
    template: "PromptTemplate | None" = None
    # By name, `[n_rows, ...]` float32; NaN where a row was not read.
    readings: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    relations: Relations | None = None  # an NLI model, or None without one
    encoder: Path | None = None  # directory of a text encoder, or None without one

    @classmethod
    def of(
        cls,
        store: "FeatureStore",
        rows: "Rows",
        *,
        layer: int = 0,
        questions: Sequence[Example] = (),
        answers: Iterable[Answer] = (),
        samples: Iterable[Sample] = (),
        **fields: Any,
    ) -> "DetectorInput":
        """Return the inputs of rows, whose answers and draws come in any order."""
        pairs = zip(rows.ids.tolist(), rows.variants.tolist(), strict=True)
        keys = [(i, rows.setting, variant) for i, variant in pairs]
        by_key = {answer.key: answer for answer in answers}
        if by_key and (missing := [key for key in keys if key not in by_key]):
            raise ValueError(
                f"no answer to {missing[0]} among the {len(by_key)} given; give one to "
                "every row of the store"
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
        """The question of every row; a ValueError where some are not known."""
        by_id = {example.id: example for example in self.questions}
        if missing := [i for i in self.rows.ids.tolist() if i not in by_id]:
            raise ValueError(
                f"expected the question of every row, found none of {missing[0]!r} "
                f"among the {len(by_id)} given; give `questions`"
            )
        return [by_id[example_id] for example_id in self.rows.ids]

    @property
    def known_answers(self) -> Sequence[Answer]:
        """The greedy answer of every row; a ValueError where they are not known."""
        if not self.answers:
            raise ValueError("expected the answer of every row, found none: `answers`")
        return self.answers

    @property
    def known_template(self) -> "PromptTemplate":
        """How passages were shown; a ValueError where that is not known."""
        if self.template is None:
            raise ValueError(
                "expected how passages were shown, found no template; give `template`, "
                "such as `PromptConfig().prompt_template()`"
            )
        return self.template

    @cached_property
    def texts(self) -> list[str]:
        """What a text-only detector reads of every row, see `joined_text`."""
        from beatrice.benchmarks.baselines.plain import joined_text
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


class DetectorOutput(NamedTuple):
    """Scores of one setting."""

    # `[n_seeds, n_rows]` float64, higher = more likely correct; NaN where the detector
    # is undefined, which is counted and never filled.
    scores: np.ndarray
    # Rows of what validation chose for the detector (experiment "chosen").
    chosen: tuple[ResultRow, ...] = ()


Score = Callable[[DetectorInput], DetectorOutput]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """A detector, published or plain."""

    name: str  # as in the rows, such as "semantic_entropy"
    title: str  # as in the tables
    source: str  # paper and section, and the official code that was followed
    score: Score  # gives every row its score
    needs: frozenset[Requirement] = frozenset()  # beyond the pass that gave the answer
    # Names of `extract.readings.reader.READINGS`, which `beatrice baselines` reads in a
    # pass of its own.
    reads: tuple[str, ...] = ()
    is_trained: bool = False  # whether it learns from labels of the training split
    # Splits whose drawn answers it reads; empty where of every row.
    draws_for: tuple[str, ...] = ()
    # What differs from the published one, in a sentence; empty where nothing.
    variant: str = ""
    settings: tuple[Setting, ...] = SETTINGS  # where it is defined


def output_of(detector: Baseline, inputs: DetectorInput) -> DetectorOutput:
    """Return what a detector's function gives, which may be a person's own."""
    output = detector.score(inputs)
    if not isinstance(output, DetectorOutput):
        raise TypeError(
            f"it returns {type(output).__name__}, expected DetectorOutput(scores)"
        )
    return output


class DetectorCost(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """What a detector is, and what it costs a question."""

    name: str
    title: str
    setting: Setting
    source: str
    variant: str
    needs: tuple[str, ...]  # beyond the pass that gave the answer, see `Requirement`
    is_trained: bool
    # Of scoring, its share of the readings, and of drawing its samples, the mean over
    # the answers that have some; fitting included, which is paid once, over all answers
    # of the setting, as draws are that it learns from alone. None where its samples
    # were drawn before drawing was timed.
    seconds: float | None
    # Most memory of the process while the detector was read and scored, the backbone
    # included; of the host, not of a device. None in records from before it was
    # measured.
    peak_bytes: int | None = None
    n_forwards: int  # beside the pass that gave the answer, none of which generates
    # Generated beside the answer, mean. None where draws are of a server that tells no
    # token ids.
    n_new_tokens: float | None
    n_rows: int  # answers that were scored
    reason: str = ""  # why there is no score at all; empty where there is


# The order of the paper's tables; a file that is not named here comes last.
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
    """Make a baseline of a function, see `Baseline` for the arguments.

    In a file of `detectors/` the baseline is in the catalogue; anywhere else it goes by
    `module:function`, an entry point, or as a value to `judge`.
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
    """Return the baselines by name, in the order of the tables; Torch is not loaded."""
    folder = Path(__file__).parent / "detectors"
    files = sorted(info.name for info in pkgutil.iter_modules([str(folder)]))
    order = [*_ORDER, *(name for name in files if name not in _ORDER)]
    modules = [importlib.import_module(f"{__package__}.detectors.{x}") for x in order]
    detectors: dict[str, Baseline] = {}
    for module in modules:
        own = _registered.get(module.__name__, {})
        if twice := sorted(own.keys() & detectors.keys()):
            raise ValueError(f"{module.__name__}: {twice[0]!r} is in another file too")
        detectors |= own
    return detectors


def is_plug(spec: str) -> bool:
    """Whether a detector is a person's own, and not in the catalogue."""
    return spec not in catalogue()


def find_detector(spec: str, *, option: str | None = None) -> Baseline:
    """Return a detector by its name in the catalogue, `module:NAME` or entry point.

    `option` is given where the run names it, see `load_plug`.
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
            f"no detector {spec!r}; there are {', '.join(known)}; and {error}"
        ) from None
    if not isinstance(detector, Baseline):
        raise ValueError(
            f"{spec} is {type(detector).__name__}, expected a Baseline "
            "(benchmarks/baselines/detector.py)"
        )
    is_known = known.get(detector.name) is detector
    if not is_known and (detector.name in known or detector.name in _TAKEN):
        raise ValueError(
            f"{spec}: the name {detector.name!r} is that of another row of the tables; "
            "give yours another"
        )
    return detector


def format_list(detectors: Iterable[Baseline]) -> str:
    """Return a line for each detector: name, title, what it needs, where it is from."""
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
    """Whether a detector is another's and not made of the selected set's encoders."""
    return name not in OURS
