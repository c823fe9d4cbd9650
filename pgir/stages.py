"""The stage `control`, and where a run searches.

Importing this loads neither Torch nor JAX; see `extract.run.stages.deferred`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from beatrice.extract.plugs import (
    NotNamed,
    identity_or_error,
    load_plug,
    sha256_of_code,
)
from beatrice.extract.records import Passage
from beatrice.extract.run.contents import require_both_settings, row_files
from beatrice.extract.run.directory import Preset, RunDir
from beatrice.extract.run.rows import rows_file
from beatrice.extract.run.stages import Stage, deferred
from beatrice.jaxprobe.config import INTERVAL_FORMAT
from beatrice.pgir.arguments import argument_error
from beatrice.pgir.controllers import RIVALS
from beatrice.pgir.index import encoder_identity, read_encoder_config
from beatrice.pgir.retrievers import (
    RETRIEVAL_PRESETS,
    RetrievalConfig,
    retrieval_identity,
)

OWN_JUDGE = "judge:"  # prefix of the `module:NAME` of a user's judge, among the rivals
JUDGES = "beatrice.draft_judges"  # the group of entry points
DraftJudge = Callable[[str, str, Sequence[Passage]], float]
Queries = Literal["paper", "choose", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """The run's section `control`."""

    max_budget: int = 4  # most retrieval rounds traced
    # Most questions of each set; None for all.
    n_questions: int | None = None
    # Cap on the mean per question in choosing settings; the paper's Gemma spends 4.63.
    max_generations: float = 4.0
    # Also choose a policy on probabilities from calibration maps that have not seen the
    # question's own label; the paper's maps have seen it.
    cross_fit: bool = False
    # Controllers to compare PGIR with; "judge:module:NAME" is its loop with that judge.
    rivals: tuple[str, ...] = RIVALS
    # Training questions whose outcomes the trained rivals learn from.
    n_training: int = 2000
    # Folder of a sentence encoder, for rivals that read only questions; None: TF-IDF.
    encoder: str | None = None
    # "paper" searches with the question and the last draft; "choose" also runs the
    # query that is best on validation; "all" also runs every other query.
    queries: Queries = "choose"
    n_draws: int = 20  # answers that SeaKR samples at a time

    def __post_init__(self) -> None:
        """Check that all rivals exist."""
        published = [n for n in self.rivals if not n.startswith(OWN_JUDGE)]
        if unknown := sorted(set(published) - set(RIVALS)):
            raise ValueError(
                f"rivals: expected some of {', '.join(RIVALS)}, found "
                f"{', '.join(unknown)}"
            )


# Version of the values in `calls.jsonl`. In version 1, "words" were of an answer's ids,
# and "attended" of its text.
SERVED = 2
# SeaKR, which samples 20 answers per draft, only runs by name or with `--only all`.
_SMALL = ControlConfig(
    n_questions=250,
    n_training=500,
    rivals=tuple(name for name in RIVALS if name != "seakr"),
)
CONTROL_PRESETS: dict[Preset, ControlConfig] = {
    "demo": _SMALL,
    "few": _SMALL,
    "smoke": ControlConfig(
        max_budget=2, n_questions=8, n_training=16, n_draws=3, queries="paper"
    ),
    "paper": ControlConfig(),
}


# Sections for where `control` searches, and `transfer` if it was given another place.
Searches = Literal["retrieval", "transfer_retrieval"]


def retrieval_config(run: RunDir, section: Searches = "retrieval") -> RetrievalConfig:
    """Return a run's choice of retrieval; BM25 over its own passages by default."""
    common = run.resolve_section("retrieval", RETRIEVAL_PRESETS, is_recorded=False)
    presets = dict.fromkeys(RETRIEVAL_PRESETS, common)
    return run.resolve_section(section, presets, is_recorded=False)


def record_retrieval(run: RunDir, config: RetrievalConfig, section: Searches) -> None:
    """Record where a run searches; `control` is reopened if its search changes."""
    if section == "retrieval" and config != retrieval_config(run):
        run.reopen_stage("control")
    run.resolve_section(
        section, RETRIEVAL_PRESETS, lambda _: config, is_replaceable=True
    )


def as_judge(value: Any, name: str) -> DraftJudge:
    """Check that a value is a judge of drafts, and return it."""
    if not callable(value):
        expected = "a callable of question, answer and passages"
        raise argument_error(name, expected, value)
    return cast(DraftJudge, value)


def load_judge(name: str) -> DraftJudge:
    """Return the user's judge of that name among the rivals."""
    return load_plug(name.removeprefix(OWN_JUDGE), JUDGES, option="--judge")


def _inputs(run: RunDir) -> list[Path]:
    require_both_settings(run, "control")
    return [*row_files(run), run.passages, run.selection, run.detector]


def _identity(config: ControlConfig) -> dict[str, str | NotNamed]:
    def identity_of(name: str) -> str:
        return sha256_of_code(load_judge(name))

    judges = [name for name in config.rivals if name.startswith(OWN_JUDGE)]
    identity = {x: identity_or_error(partial(identity_of, x)) for x in judges}
    identity |= {"served": str(SERVED), "interval format": str(INTERVAL_FORMAT)}
    if config.encoder is not None:
        identity["encoder"] = encoder_identity(
            read_encoder_config(Path(config.encoder))
        )
    return identity


def _search_identity(run: RunDir) -> dict[str, str | NotNamed]:
    """Return the identity of where the run searches."""
    identity = partial(retrieval_identity, retrieval_config(run), run.passages)
    return {"retrieval": identity_or_error(identity)}


CONTROL = Stage(
    name="control",
    inputs=_inputs,
    outputs=lambda run: [run.control, rows_file(run, "control")],
    work=deferred("beatrice.pgir.controllers.stage:control_run"),
    identity=_identity,
    outside=_search_identity,
    presets=CONTROL_PRESETS,
)
