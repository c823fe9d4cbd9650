"""The three ready-made configurations of a run.

`demo` is the whole system on the embedded microworld, meant for ten minutes on two
cores; `smoke` is the same path at toy size, too small to mean anything. Their widths
and epochs are far below the paper's (README, "Departures and decisions"); `paper` has
the paper's, for published questions and a GPU.
"""

import dataclasses
from typing import Any, Literal, get_args

from extract.backbone.names import EMBEDDED, model_path
from extract.datasets.config import DataConfig
from extract.generate.requests import PromptConfig
from extract.signals.plan import ExtractConfig
from extract.store.config import StoreConfig
from extract.world.facts import WorldConfig
from extract.world.questions import QuestionConfig
from jaxprobe.config import EncoderConfig, FusionConfig, StreamConfig, TrainConfig
from jaxprobe.features.subsets import N_SUBSETS

PresetName = Literal["demo", "smoke", "paper"]
AnswerSpan = Literal["emitting", "literal"]
ModelDtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
# Cores are shared among operations; sharing each one as well costs a third of a
# training step (measured).
WHOLE_OPERATIONS = "--xla_cpu_multi_thread_eigen=false"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything the numbers of a run depend on.

    Attributes:
      model: directory or Hub id of the backbone, or "embedded".
      seed: of training, selection and bootstrap; the world's own seed is fixed,
        since the embedded model knows one world.
      prompt: how the questions are put.
      world: what the questions are about, or None where they are published ones.
      questions: likewise, how many are made.
      data: which published questions are asked, or None in the microworld.
      model_dtype: of the backbone's weights where it is loaded here.
      device: likewise; under torchrun, "cuda" is each process's own GPU.
      n_threads: of Torch; sums are rounded by it, so it is part of the run.
      max_new_tokens: longest answer.
      n_bootstrap: resamples of an interval.
      max_budget: most retrieval rounds traced.
      n_control: questions per set given to the controllers; None for all.
      stream: how encoders read a store that is larger than memory, or None where all
        of it is held; batches are then mixed within groups, which changes results.
      xla_flags: for the compiler; code that runs for seconds need not be optimised
        for longer than that.
    """

    preset: PresetName
    model: str
    seed: int
    prompt: PromptConfig
    world: WorldConfig | None
    questions: QuestionConfig | None
    extract: ExtractConfig
    encoder: EncoderConfig
    train: TrainConfig
    fusion: FusionConfig
    fusion_train: TrainConfig
    margin: float = 5e-4  # delta of algorithm 1
    n_threads: int = 2
    max_new_tokens: int = 10
    tokens_per_batch: int = 8192
    n_sweep: int = 1200
    n_bootstrap: int = 1000
    max_budget: int = 4
    n_control: int | None = None
    xla_flags: str = ""
    data: DataConfig | None = None
    model_dtype: ModelDtype = "float32"
    device: Device = "cpu"
    stream: StreamConfig | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the configuration as it stands in the manifest."""
        return dataclasses.asdict(self)

    @property
    def model_path(self) -> str:
        """Return what Transformers loads."""
        return model_path(self.model)


def make_config(
    preset: PresetName = "demo",
    model: str = EMBEDDED,
    seed: int = 0,
    answer_span: AnswerSpan = "emitting",
    kept: StoreConfig | None = None,
    is_streamed: bool = False,
    is_mixed: bool = False,
) -> RunConfig:
    """Return a preset's configuration.

    Args:
      preset: sizes.
      model: directory or Hub id of the backbone, or "embedded".
      seed: of training, selection and bootstrap.
      answer_span: see `extract.signals.plan.sequence_of`.
      kept: what is kept of the answers' signals; None takes the defaults.
      is_streamed: whether encoders read the store in groups of chunks.
      is_mixed: whether encoders round the operands of their products to bfloat16.

    Raises:
      ValueError: no such preset.
    """
    if preset not in get_args(PresetName):
        raise ValueError(
            f"preset: expected one of {', '.join(get_args(PresetName))}, "
            f"found {preset!r}"
        )
    small = {"tokens_per_batch": 4096, "rows_per_shard": 4096}
    reading = {} if preset == "paper" else small  # else as for a large model
    shared: dict[str, Any] = {
        "preset": preset,
        "model": model,
        "seed": seed,
        "prompt": PromptConfig(),
        "world": WorldConfig(),
        "stream": StreamConfig() if is_streamed else None,
        "extract": ExtractConfig(
            **dataclasses.asdict(kept or StoreConfig()),
            **reading,
            answer_span=answer_span,
        ),
    }
    sizes = {"demo": _demo, "smoke": _smoke, "paper": _paper}[preset](seed)
    config = RunConfig(**(shared | sizes))
    return in_mixed_precision(config) if is_mixed else config


def in_mixed_precision(config: RunConfig) -> RunConfig:
    """Return the same with encoders whose products round their operands."""
    encoder = dataclasses.replace(config.encoder, matmul_dtype="bfloat16")
    return dataclasses.replace(config, encoder=encoder)


def _paper(seed: int) -> dict[str, Any]:
    """The paper's sizes: widths of section 3, training of appendix B."""
    return {
        "questions": QuestionConfig(),
        "encoder": EncoderConfig(),
        "train": TrainConfig(root_seed=seed),
        "fusion": FusionConfig(),
        "fusion_train": TrainConfig(root_seed=seed),
        "max_new_tokens": 32,
        "tokens_per_batch": 16_384,
    }


def _demo(seed: int) -> dict[str, Any]:
    """Sizes that aim at ten minutes on two cores; measured: nine to ten."""
    return {
        "questions": QuestionConfig(),
        "n_control": 250,
        "xla_flags": WHOLE_OPERATIONS,
        "encoder": EncoderConfig(projection=16, hidden=16, n_blocks=2, n_groups=4),
        "train": TrainConfig(
            learning_rate=2e-3,
            batch_size=256,
            max_epochs=6,
            lr_patience=2,
            patience=3,
            root_seed=seed,
        ),
        "fusion": FusionConfig(hidden=16),
        "fusion_train": TrainConfig(
            learning_rate=3e-3,
            batch_size=512,
            max_epochs=8,
            lr_patience=2,
            patience=3,
            n_microbatches=1,
            root_seed=seed,
        ),
    }


def _smoke(seed: int) -> dict[str, Any]:
    """Sizes for a minute once it is compiled; their numbers mean nothing."""
    return {
        "questions": QuestionConfig(n_train=128, n_evaluation=32, n_ood=16),
        "encoder": EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2),
        "train": TrainConfig(
            learning_rate=3e-3, batch_size=64, max_epochs=2, n_seeds=1, root_seed=seed
        ),
        # Room for the whole pool: every head shares one executable per setting.
        "fusion": FusionConfig(hidden=8, n_slots=2 * N_SUBSETS),
        "fusion_train": TrainConfig(
            learning_rate=3e-3, batch_size=64, max_epochs=2, n_seeds=1, root_seed=seed
        ),
        "n_sweep": 96,
        "n_bootstrap": 100,
        "max_budget": 2,
        "n_control": 8,
        # Half of its time would be compilation.
        "xla_flags": (
            "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 "
            + WHOLE_OPERATIONS
        ),
    }
