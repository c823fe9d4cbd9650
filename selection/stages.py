"""The stages `sweep` and `select`, and the course of a run's searches.

Importing this loads no JAX; see `extract.run.stages.deferred`.
"""

import dataclasses
from typing import Any, get_args

from beatrice.extract.run.contents import row_files
from beatrice.extract.run.directory import Preset, RunDir
from beatrice.extract.run.stages import Stage, deferred
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.config import SELECT_PRESETS, TrainConfig
from beatrice.jaxprobe.detector import HeadName, pool_names
from beatrice.jaxprobe.families import N_SUBSETS
from beatrice.jaxprobe.stages import SearchSummary, encoder_folders

# Training protocol of the probes; AdamW's weight decay is the penalty.
PROBE = TrainConfig(
    learning_rate=1e-2, weight_decay=0.1, batch_size=128, max_epochs=30, patience=6
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSection:
    """The run's section `sweep`."""

    # Most original rows per split for the probes; if there are more, a sample is drawn,
    # in proportion from every dataset and both labels.
    n_rows: int = 1200
    probe: TrainConfig = PROBE  # training protocol; the run's seed replaces its seed

    def seeded(self, seed: int) -> "SweepSection":
        """Return a copy whose protocol has the run's seed."""
        return dataclasses.replace(
            self, probe=dataclasses.replace(self.probe, root_seed=seed)
        )


SWEEP_PRESETS: dict[Preset, SweepSection] = {
    **dict.fromkeys(get_args(Preset), SweepSection()),
    "smoke": SweepSection(n_rows=96, probe=dataclasses.replace(PROBE, n_seeds=1)),
}


def selection_summary(run: RunDir, branch: HeadName) -> dict[str, Any]:
    """Return the rounds and result of the search, with the encoders' printed names."""
    summary = checkpoint.read_config(run.selection / branch, SearchSummary)
    names = pool_names(branch, range(2 * N_SUBSETS))
    return {
        "rounds": [
            {
                "added": names[step.added],
                "auroc": step.auroc,
                "candidates": {names[int(i)]: a for i, a in step.candidates.items()},
            }
            for step in summary.rounds
        ],
        "selected": [names[i] for i in summary.members],
        "stop": summary.stop,
    }


SWEEP = Stage(
    name="sweep",
    inputs=row_files,
    outputs=lambda run: [run.sweep],
    work=deferred("beatrice.selection.sweep:sweep_run"),
    presets=SWEEP_PRESETS,
)
SELECT = Stage(
    name="select",
    inputs=lambda run: [*row_files(run), *encoder_folders(run)],
    outputs=lambda run: [run.selection],
    work=deferred("beatrice.selection.greedy:select_run"),
    presets=SELECT_PRESETS,
    is_open=True,
)
