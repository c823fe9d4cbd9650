"""What evaluation and the controllers will take, from a few resamples and questions."""

import time

from benchmarks.forecasts.modelmemory import generation_bytes
from benchmarks.forecasts.rehearsal import spread
from benchmarks.stages.control import (
    controller_config,
    open_probed,
    question_sets,
    trace_sets,
)
from benchmarks.stages.evaluation import detection_rows
from benchmarks.stages.forecast import N_PROBED, Forecast
from benchmarks.stages.presets import RunConfig
from benchmarks.stages.result_stages import CONTROL, EVALUATE, detectors_of
from benchmarks.stages.rows import load_rows
from extract.pipeline import read_examples
from extract.records import SETTINGS, Passage, read_records
from extract.run.directory import RunDir
from jaxprobe.metrics import BootstrapConfig
from pgir.retrieval.bm25 import Bm25Retriever

_SHARE = 20  # the probe takes one in so many resamples
_FEWEST = 50  # resamples; of fewer, all may have one class alone on a small set
_BYTES_PER_ROW = 330  # of a number with its interval, in JSON


def forecast_evaluate(run: RunDir, config: RunConfig) -> Forecast:
    """Return what evaluation takes; every detector speaks, few resamples are drawn."""
    run.hash_inputs(*EVALUATE.inputs(run))
    n_probed = min(config.n_bootstrap, max(_FEWEST, config.n_bootstrap // _SHARE))
    few = BootstrapConfig(n_resamples=n_probed, seed=config.seed)
    seconds, n_rows, n_weights = 0.0, 0, 0
    for setting in SETTINGS:
        began = time.monotonic()
        _, rows = load_rows(run, setting)
        detectors = detectors_of(run, config, setting)
        scored = time.monotonic()
        n_rows += len(detection_rows(detectors, rows, few))
        took = time.monotonic() - scored
        seconds += scored - began + took * config.n_bootstrap / n_probed
        most = max(len(rows.where(s, d)) for d, s in rows.columns())
        n_weights = max(n_weights, most)
    return Forecast(
        stage="evaluate",
        memory_bytes=n_weights * config.n_bootstrap * 8,
        disk_bytes=n_rows * _BYTES_PER_ROW,
        seconds=seconds,
        basis=(
            f"{n_rows} numbers; time from all detectors once and {n_probed} of "
            f"{config.n_bootstrap} resamples of each; memory is that of the largest "
            "set's resamples"
        ),
    )


def forecast_control(run: RunDir, config: RunConfig) -> Forecast:
    """Return what the controllers take; ten questions are traced to the full budget."""
    run.hash_inputs(*CONTROL.inputs(run))
    began = time.monotonic()
    probed = open_probed(run, config)
    passages = list(read_records(run.passages, Passage))
    retriever = Bm25Retriever(passages)
    loaded = time.monotonic() - began
    sets = question_sets(read_examples(run), config.n_control)
    asked = [example for _, _, examples in sets for example in examples]
    some = [asked[i] for i in spread([len(e.question) for e in asked], N_PROBED)]
    how = controller_config(config)
    took, drafts = [], 0
    for _ in range(2):  # the first compiles, and allocates what later ones use
        began = time.monotonic()
        traces, _ = trace_sets(probed, retriever, passages, some, how, lambda r: None)
        took.append(time.monotonic() - began)
        drafts = sum(map(len, traces))
    share = len(asked) / max(1, len(some))
    return Forecast(
        stage="control",
        n_requests=round((drafts + len(some)) * share),
        gpu_bytes=generation_bytes(probed.backbone, config.tokens_per_batch),
        seconds=loaded + max(0.0, took[0] - took[1]) + took[1] * share,
        basis=(
            f"{len(asked)} questions to a budget of {how.max_budget} retrievals; time "
            f"from {len(some)} of them in {took[1]:.2f} s (larger batches take less "
            f"for each), {took[0] - took[1]:.1f} s to compile and {loaded:.1f} s of "
            "loading"
        ),
    )
