"""Extract the signals of answers into a feature store: plan, loop and run stage.

Which answers are read together and where they are stored depends only on the answers.
Rank, world size and earlier work only decide which units this process does, so they
do not change the bytes of a store. A unit is read in batches of similar lengths and
written range by range, each with a commit record. After an interruption, only the
batches that the missing ranges need are read again. Nothing here loads Torch.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from beatrice.extract.backbone.names import (
    AttentionLayers,
    BackboneConfig,
    fingerprint_of,
)
from beatrice.extract.label.labels import check_both_classes
from beatrice.extract.records import Answer, Setting
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.contents import (
    check_answered,
    question_files,
    read_answers,
    read_examples,
    read_labels,
    settings_of,
    store_files,
)
from beatrice.extract.run.directory import Preset, RunDir
from beatrice.extract.run.files import read_json
from beatrice.extract.run.process import Share
from beatrice.extract.run.stages import Forecast, Stage, bytes_in_words
from beatrice.extract.signals.sequence import (
    Reader,
    TokenSequence,
    batches_of,
    first_read_token,
    sequence_of,
)
from beatrice.extract.signals.written import WrittenReader, WrittenSignals, sequence_key
from beatrice.extract.store.spec import (
    Encoded,
    StoreConfig,
    StoreSpec,
    encode,
    family_bytes,
    model_shapes,
    scale_name,
    stored_bytes,
    stored_families,
)
from beatrice.extract.store.store import (
    FeatureStore,
    create_store,
    done_ranges,
    open_store,
    write_range,
)

if TYPE_CHECKING:
    from beatrice.extract.backbone.loading import Outline


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractConfig(StoreConfig):
    """How answers are read, and which of their signals are kept."""

    # Most tokens per batch, with padding; a longer sequence forms a batch by itself.
    tokens_per_batch: int = 16384
    # Tokens per file, a power of two; None lets `n_rows_of` choose.
    rows_per_shard: int | None = None

    def __post_init__(self) -> None:
        """Check the fields; the store checks `rows_per_shard`."""
        super().__post_init__()
        if self.tokens_per_batch < 1:
            raise ValueError(
                f"tokens_per_batch must be at least 1, found {self.tokens_per_batch}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """The work that one worker does in one go: some ranges and their batches."""

    ranges: range  # consecutive; each is committed separately
    # Example indices; the batches contain every example of the ranges once.
    batches: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExtractionPlan:
    """Which answers are read together, and where their signals are stored."""

    spec: StoreSpec  # the store
    # In the order of their ranges; a worker does `share.mine(units)`.
    units: tuple[Unit, ...]


def n_rows_of(n_tokens: int, bytes_per_token: Sequence[int]) -> int:
    """Choose the rows per shard, a power of two, from the answers alone.

    As many rows as fit in 128 MiB of the widest family, but few enough for 64 ranges,
    so that workers share the load and an interruption costs little; at least 256.
    `n_tokens` are read; `bytes_per_token` has each stored family's average.
    """
    most = max(1, min((128 << 20) // max(1, *bytes_per_token), n_tokens // 64))
    return max(256, 1 << (most.bit_length() - 1))


def tokens_per_unit(
    n_tokens: int, bytes_per_token: Sequence[int], tokens_per_batch: int
) -> int:
    """Choose the tokens per unit from the answers alone.

    Sixteen batches' worth, since sorted by length they waste only a few percent on
    padding, but few enough for 16 units (of at least one batch), so that workers share
    the load and an interruption costs little. At most 8 GiB as stored, since units wait
    in host memory (see `run_plan`). The other arguments are those of `n_rows_of`.
    """
    shared = max(tokens_per_batch, n_tokens // 16)
    in_memory = (8 << 30) // max(1, sum(bytes_per_token))
    return min(16 * tokens_per_batch, shared, in_memory)


def _units(spec: StoreSpec, n_tokens: int, tokens_per_batch: int) -> tuple[Unit, ...]:
    """Join consecutive ranges, at least one per unit, up to `n_tokens` tokens."""
    rows = np.diff(spec.offsets[spec.range_examples]).tolist()
    edges, used = [0], 0
    for range_id, n_rows in enumerate(rows):
        if range_id > edges[-1] and used + n_rows > n_tokens:
            edges.append(range_id)
            used = 0
        used += n_rows
    units = []
    for first, last in itertools.pairwise([*edges, spec.n_ranges]):
        begin, end = spec.range_examples[[first, last]].tolist()
        # Worked examples are mostly computed once per batch: not part of `lengths`.
        n_beside = int(spec.first_rows.max())
        lengths = spec.n_read[begin:end]
        batches = batches_of(lengths, tokens_per_batch, n_beside=n_beside)
        of_unit = tuple(tuple(begin + i for i in batch) for batch in batches)
        units.append(Unit(ranges=range(first, last), batches=of_unit))
    return tuple(units)


def _check_reader(reader: Reader, config: ExtractConfig) -> None:
    wanted = config.hidden_layers
    if wanted is not None and tuple(wanted) != tuple(reader.hidden_layers):
        raise ValueError(
            f"the reader keeps layers {list(reader.hidden_layers)}, but the config "
            f"wants {list(wanted)}; build the reader with the config's hidden_layers"
        )
    if reader.hidden_spans not in ("all", config.hidden_spans):
        raise ValueError(
            f"the reader keeps hidden states of the {reader.hidden_spans} span, the "
            f"config wants {config.hidden_spans}; build a reader with its hidden_spans"
        )


def plan_extraction(
    sequences: Sequence[TokenSequence],
    keys: Sequence[tuple[str, ...]],
    reader: Reader,
    config: ExtractConfig,
    fingerprint: Mapping[str, Any],
) -> ExtractionPlan:
    """Plan the store, its ranges and the batches, without reading anything.

    `sequences` and `keys` have one entry per answer, and keys are unique. The
    fingerprint names what the values depend on besides the answers and `config`.
    """
    _check_reader(reader, config)
    if not sequences:
        raise ValueError("expected answers to read, found none")
    lengths = np.array([len(item.ids) for item in sequences], dtype=np.int64)
    spans = np.stack([item.spans for item in sequences]).astype(np.int64)
    firsts = np.array(
        [first_read_token(start) for start in spans[:, 0, 0]], dtype=np.int64
    )
    n_answer = int((spans[:, 2, 1] - spans[:, 2, 0]).sum())
    families = stored_families(reader.shapes, config)
    n_read = int((lengths - firsts).sum())
    sizes = family_bytes(families, n_tokens=n_read, n_answer=n_answer)
    per_token = [n_bytes // n_read for n_bytes in sizes.values()]
    # In the fingerprint, since batch composition changes values by rounding.
    n_tokens = tokens_per_unit(n_read, per_token, config.tokens_per_batch)
    is_written = getattr(reader, "is_written", lambda sequence: False)
    n_rows = config.rows_per_shard
    spec = StoreSpec(
        families=families,
        keys=tuple(keys),
        lengths=lengths,
        spans=spans,
        first_rows=firsts,
        is_written=np.array([is_written(item) for item in sequences]),
        rows_per_shard=n_rows_of(n_read, per_token) if n_rows is None else n_rows,
        hidden_layers=tuple(reader.hidden_layers),
        fingerprint={
            **fingerprint,
            "answer_span": config.answer_span,
            "tokens_per_batch": config.tokens_per_batch,
            "tokens_per_unit": n_tokens,
            # So that a store never mixes two sets of answers.
            "sequences_sha256": sequence_key(*sequences),
        },
    )
    units = _units(spec, n_tokens, config.tokens_per_batch)
    return ExtractionPlan(spec=spec, units=units)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractionReport:
    """The result of one call of `extract`."""

    n_written: int  # ranges that this call wrote
    n_skipped: int  # ranges of this worker that existed before
    n_missing: int  # ranges of any worker that do not exist yet


class _RangeRows:
    """The families of one range in their stored types, filled answer by answer."""

    def __init__(self, spec: StoreSpec, range_id: int) -> None:
        self._spec, self._range_id = spec, range_id
        self.arrays: dict[str, np.ndarray] = {}
        for name, family in spec.families.items():
            start, stop = spec.range_rows(range_id, name)
            shape = (stop - start, *family.shape)
            self.arrays[name] = np.empty(shape, family.numpy_dtype)
        # By family: keys of answers with values that the stored type cannot hold.
        self._bad = collections.defaultdict[str, list[tuple[Any, Encoded]]](list)

    def put(self, name: str, example: int, rows: np.ndarray) -> None:
        """Store an answer's rows of a family; `rows` may hold more, up to the last."""
        spec = self._spec
        start, _ = spec.range_rows(self._range_id, name)
        first, last = spec.family_offsets(name)[example : example + 2] - start
        # Encoded in place: a copy would be another pass over cold memory.
        out, given = self.arrays[name][first:last], rows.shape
        token, n_tokens = spec.first_tokens(name)[example], spec.lengths[example]
        row = token - (n_tokens - len(rows))
        if len(rows) != len(out) and 0 <= row <= token:
            rows = rows[row : row + len(out)]
        if rows.shape != out.shape:  # NumPy would broadcast a single row or channel
            raise ValueError(
                f"the reader returned {name!r} of answer {spec.keys[example]} with "
                f"shape {list(given)}, expected {list(out.shape)}, or rows for more of "
                f"its {n_tokens} tokens, up to the last"
            )
        encoded = encode(rows, spec.families[name].dtype, out)
        if encoded.scales is not None:
            self.arrays[scale_name(name)][first:last] = encoded.scales
        if encoded.n_invalid or encoded.n_overflowed:
            self._bad[name].append((spec.keys[example], encoded))

    def check(self) -> None:
        """Check that the stored types can represent every value."""
        for name, bad in self._bad.items():
            n_overflowed = sum(encoded.n_overflowed for _, encoded in bad)
            n_invalid = sum(encoded.n_invalid for _, encoded in bad)
            raise ValueError(
                f"family {name!r} of answer {bad[0][0]} (such answers in range "
                f"{self._range_id}: {len(bad)}) has values that are not finite or that "
                f"{self._spec.families[name].dtype} cannot hold: {n_overflowed} "
                f"overflow, {n_invalid} were NaN or infinite when read; nothing of "
                "this range is stored; wider dtypes (bf16, fp32) do not overflow; for "
                "NaN load the model in another dtype, or leave these answers out"
            )


def read_batches(
    reader: Reader, sequences: Sequence[TokenSequence], batches: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Any]]:
    """Read batch after batch, and yield each example with its signals.

    The next batch is started before the results of the previous one are copied from
    the device, so that copies and computation overlap.
    """
    pending: tuple[Sequence[int], Any] | None = None
    for batch in batches:
        started = reader.start([sequences[example] for example in batch])
        if pending is not None:
            yield from zip(pending[0], pending[1].result(), strict=True)
        pending = (batch, started)
    if pending is not None:
        yield from zip(pending[0], pending[1].result(), strict=True)


def _read_unit(
    reader: Reader,
    sequences: Sequence[TokenSequence],
    plan: ExtractionPlan,
    unit: Unit,
    missing: Sequence[int],
    tick: Callable[[], None],
) -> dict[int, dict[str, np.ndarray]]:
    """Return a unit's missing ranges as stored: `[n_rows, …]` by family."""
    edges, examples = plan.spec.range_examples, np.arange(len(plan.spec.keys))
    range_of = (np.searchsorted(edges, examples, "right") - 1).tolist()
    names = [*reader.shapes]
    rows = {r: _RangeRows(plan.spec, r) for r in missing}
    needed = [b for b in unit.batches if any(range_of[i] in rows for i in b)]
    for example, reading in read_batches(reader, sequences, needed):
        if (of_range := rows.get(range_of[example])) is not None:
            for name in names:
                of_range.put(name, example, np.asarray(getattr(reading, name)))
            tick()
    for of_range in rows.values():
        of_range.check()
    return {range_id: of_range.arrays for range_id, of_range in rows.items()}


def _write_unit(store: FeatureStore, rows: dict[int, dict[str, np.ndarray]]) -> None:
    """Write ranges in order, freeing each as soon as it is written."""
    for range_id in sorted(rows):
        write_range(store, range_id, rows.pop(range_id))


def _n_missing(store: FeatureStore) -> int:
    """Return how many ranges no worker has written yet."""
    return store.spec.n_ranges - len(done_ranges(store))


def run_plan(
    reader: Reader,
    sequences: Sequence[TokenSequence],
    plan: ExtractionPlan,
    url: str | Path,
    *,
    share: Share = Share(),
    progress: Callable[[int, int], None] | None = None,
) -> ExtractionReport:
    """Do or continue one share of a plan; see `extract`.

    Host memory holds at most the stored rows of two units, one being read and one
    being written (see `tokens_per_unit`: at most 8 GiB each, or one range if that is
    larger), and the readings of two batches.
    """
    units = share.mine(plan.units)
    store = create_store(url, plan.spec)
    done = done_ranges(store)
    todo = [(unit, [r for r in unit.ranges if r not in done]) for unit in units]
    todo = [(unit, missing) for unit, missing in todo if missing]
    written = [range_id for _, missing in todo for range_id in missing]
    n_answers = int(np.diff(plan.spec.range_examples)[written].sum())
    n_read = itertools.count(1)

    def tick() -> None:
        if progress is not None:
            progress(next(n_read), n_answers)

    pending: concurrent.futures.Future[None] | None = None
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        for unit, missing in todo:
            rows = _read_unit(reader, sequences, plan, unit, missing, tick)
            if pending is not None:
                pending.result()
            pending = pool.submit(_write_unit, store, rows)
            del rows  # so that the writer frees it range by range
        if pending is not None:
            pending.result()
    return ExtractionReport(
        n_written=len(written),
        n_skipped=sum(len(unit.ranges) for unit in units) - len(written),
        n_missing=_n_missing(store),
    )


def extract(
    reader: Reader,
    answers: Sequence[Answer],
    url: str | Path,
    config: ExtractConfig,
    *,
    about: Mapping[str, Any] | None = None,
    share: Share = Share(),
    progress: Callable[[int, int], None] | None = None,
) -> ExtractionReport:
    """Read the answers' signals into the store at `url`, or continue doing so.

    Every worker creates the same store, so none waits for another. Committed ranges
    are skipped. `about` holds JSON values that describe the answers further, such as
    how questions were asked; they become part of the store's fingerprint. `progress` is
    called with how many answers this call has read so far, and has to read in all.
    """
    sequences = [sequence_of(a, answer_span=config.answer_span) for a in answers]
    keys = [answer.key for answer in answers]
    fingerprint = {**reader.fingerprint, **(about or {})}
    plan = plan_extraction(sequences, keys, reader, config, fingerprint)
    return run_plan(reader, sequences, plan, url, share=share, progress=progress)


_SMALL = ExtractConfig(tokens_per_batch=4096, rows_per_shard=4096)
EXTRACT_PRESETS: dict[Preset, ExtractConfig] = {
    **dict.fromkeys(("demo", "few", "smoke"), _SMALL),
    "paper": ExtractConfig(),
}


def extract_config(run: RunDir) -> ExtractConfig:
    """Return how a run's answers are read, and which signals are kept."""
    return run.resolve_section("extract", EXTRACT_PRESETS)


def record_storage(run: RunDir, changes: Mapping[str, Any]) -> ExtractConfig:
    """Record what a run keeps, which can be changed until signals are extracted.

    This affects no answer or label. Later verbs read it from the manifest. `changes`
    replaces only the fields that it names.
    """
    config = extract_config(run)
    wanted = dataclasses.replace(config, **changes)
    folders = [run.features(setting) for setting in settings_of(run)]
    if wanted != config and any((f / "index.json").exists() for f in folders):
        raise ValueError(
            f"{run.path} already has features: {config.describe()}; you asked for "
            f"{wanted.describe()}; repeat the first choice, or delete "
            f"{folders[0].parent} to extract again"
        )
    return run.resolve_section(
        "extract", EXTRACT_PRESETS, lambda _: wanted, is_replaceable=True
    )


def open_local_reader(run: RunDir, config: ExtractConfig) -> Reader:
    """Return a reader of the run's answers on this machine.

    Signals that were read while their answers were written are taken from the folder
    where they wait; the backbone is loaded only if other answers remain.
    """
    backend, written = run.answers / "backend.json", None
    if run.written.exists() and backend.exists():
        identity = read_json(backend, dict[str, Any], "restore it")
        dtype = f"torch.{identity.get('dtype')}"
        choice = run.section("backbone", BackboneConfig).attention_layers
        fingerprint = fingerprint_of(str(identity.get("revision")), dtype, choice)
        written = WrittenSignals.open(run.written, fingerprint, config)
    if written is None:
        return _load_reader(run, config)
    return WrittenReader(written, written, lambda: _load_reader(run, config))


def _load_reader(run: RunDir, config: ExtractConfig) -> Reader:
    from beatrice.extract.backbone.loading import (
        open_backbone,
        require_answering_model,
        require_known_tokens,
    )
    from beatrice.extract.signals.reader import SignalReader

    backbone = open_backbone(run.section("backbone", BackboneConfig), run.answers)
    require_answering_model(run.answers, backbone)
    require_known_tokens(read_answers(run), backbone)
    return SignalReader.for_config(backbone, config)


def check_room(
    run: RunDir,
    folders: Mapping[Path, StoreConfig],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    n_tokens: int,
    n_answer: int,
    advice: str,
) -> None:
    """Check that the disk has room for the signals before hours of reading them.

    Each folder gets a copy as its config says, and files already in it count towards
    that copy. `shapes` are the reader's; `n_tokens` is at least what will be read.
    """
    missing, copies = 0, []
    for folder, config in folders.items():
        families = stored_families(shapes, config)
        sizes = family_bytes(families, n_tokens=n_tokens, n_answer=n_answer)
        files = (file for file in folder.rglob("*") if file.is_file())
        there = sum(file.stat().st_size for file in files)
        missing += max(0, sum(sizes.values()) - there)
        copies.append(f"{config.describe()} in {folder.name}")
    free = shutil.disk_usage(run.path).free
    if missing > free:
        raise ValueError(
            f"{' and '.join(copies)} take at least {bytes_in_words(missing)}, but only "
            f"{bytes_in_words(free)} are free at {run.path}; keep less: {advice}"
        )


def _extract(
    open_reader: Callable[[RunDir, ExtractConfig], Reader],
    run: RunDir,
    config: ExtractConfig,
    update: Update,
    progress: Progress,
) -> int:
    """Read a share of the run's answers; return how many ranges are still missing."""
    check_answered(run)
    if run.labels.exists():  # before hours of signals that could train no detector
        check_both_classes(read_examples(run), [*read_labels(run).values()])
    answers: dict[Setting, list[Answer]] = {
        setting: read_answers(run, setting) for setting in settings_of(run)
    }
    if empty := [setting for setting, rows in answers.items() if not rows]:
        raise ValueError(
            f"{run.answers} has no {empty[0]} answer: no passage of any question fits "
            "the model's window; give shorter passages, or make the run with "
            "--settings closed-book"
        )
    reader = open_reader(run, config)
    settings, n_all = settings_of(run), sum(map(len, answers.values()))

    def sequences() -> Iterator[TokenSequence]:  # a list of all would fill the memory
        for answer in itertools.chain.from_iterable(answers.values()):
            yield sequence_of(answer, answer_span=config.answer_span)

    features = run.features(settings[0]).parent
    advice = "extract with --hidden-layers or --set hidden_spans=answer"
    counts = _n_read(sequences())
    check_room(run, {features: config}, reader.shapes, **counts, advice=advice)
    if hasattr(reader, "is_written") or run.written.exists():
        is_written = getattr(reader, "is_written", lambda sequence: False)
        n_waiting = sum(map(is_written, sequences()))
        progress.note(
            f"extract: {n_waiting} of {n_all} answers were read while they were "
            f"written, {config.describe()}; {n_all - n_waiting} are read again"
        )
    n_before = 0
    for setting in settings:
        rows = answers.pop(setting)
        show = partial(_show, update, n_before, len(rows), n_all)
        url, share = run.features(setting), run.share
        extract(reader, rows, url, config, share=share, progress=show)
        n_before += len(rows)
    # Counted after the last setting: two workers may each be ahead in a different one,
    # and counts taken per setting would leave neither to finish the stage.
    return sum(_n_missing(open_store(run.features(setting))) for setting in settings)


def _n_read(sequences: Iterable[TokenSequence]) -> dict[str, int]:
    """Count the tokens that are read, and those among them in answer spans."""
    n_tokens = n_answer = 0
    for s in sequences:
        n_tokens += len(s.ids) - first_read_token(s.spans[0, 0])
        n_answer += s.spans[2, 1] - s.spans[2, 0]
    return {"n_tokens": int(n_tokens), "n_answer": int(n_answer)}


def _show(
    update: Update, n_before: int, n_rows: int, n_all: int, done: int, total: int
) -> None:
    """Show progress over all settings, given that of one setting's answers."""
    update(n_before + round(done / total * n_rows), n_all)


def outline_shapes(
    outline: "Outline", choice: AttentionLayers = "all"
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's readings, with every hidden layer kept."""
    from beatrice.extract.backbone.layout import find_layout, n_heads_of
    from beatrice.extract.backbone.loading import layers_read

    layout = find_layout(outline.model)
    return model_shapes(
        d_model=layout.head.in_features,
        n_layers=len(layout.layers),
        n_attention_layers=len(layers_read(layout, outline.config, choice)),
        n_heads=n_heads_of(outline.config),
    )


def _forecast(run: RunDir, config: ExtractConfig) -> Forecast:
    """Estimate the cost of extraction; the store size is exact before compression."""
    from beatrice.extract.backbone.loading import load_outline

    backbone = run.section("backbone", BackboneConfig)
    shapes = outline_shapes(load_outline(backbone.path), backbone.attention_layers)
    span = config.answer_span
    sequences = [sequence_of(a, answer_span=span) for a in read_answers(run)]
    counts = _n_read(sequences)
    stored = stored_bytes(shapes, config, **counts)
    return Forecast(
        stage="extract",
        n_rows=counts["n_tokens"],
        n_prompt_tokens=sum(len(sequence.ids) for sequence in sequences),
        disk_bytes=sum(stored.values()),
        basis=f"rows are the tokens read; answers: {len(sequences)}",
    )


def extract_stage(open_reader: Callable[[RunDir, ExtractConfig], Reader]) -> Stage:
    """Return the stage that reads answers with the reader from `open_reader`."""
    return Stage(
        name="extract",
        inputs=lambda run: [*question_files(run), run.answers],
        outputs=store_files,
        leftovers=lambda run: [run.written],
        work=partial(_extract, open_reader),
        parts="ranges",
        presets=EXTRACT_PRESETS,
        forecast=_forecast,
    )


EXTRACT = extract_stage(open_local_reader)
