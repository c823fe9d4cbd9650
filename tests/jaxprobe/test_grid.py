"""Encoders trained block by block, with and without some of their spans."""

import dataclasses
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beatrice.extract.run.process import n_cores
from beatrice.jaxprobe.config import (
    EncoderConfig,
    GridConfig,
    PlannedConfig,
    StreamConfig,
    TrainConfig,
)
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import (
    FLOATS,
    SUBSETS,
    Features,
    fit_standardizer,
    paper_dims,
    subset_index,
    width_groups,
    widths_of,
)
from beatrice.jaxprobe.grid import (
    Block,
    Member,
    block_logits,
    fit_blocks,
    join,
    labelled,
    member_outputs,
    rows_in_turn,
    start_block,
    train_block,
)
from beatrice.jaxprobe.loop import end_epoch
from beatrice.jaxprobe.memory import Sizes
from beatrice.jaxprobe.rows import rows_at_once
from beatrice.jaxprobe.tokens import empty_span, split_families
from tests.jaxprobe.samples import assert_same_leaves
from tests.process import interrupted_once, run_line

DIMS = paper_dims(hidden=6, prob=5, resid=4, attn=3)
CONFIG = EncoderConfig(projection=8, hidden=8, n_blocks=1, n_groups=2)
ENCODER = Encoder(CONFIG, DIMS)
TRAIN = TrainConfig(learning_rate=1e-2, batch_size=64, max_epochs=3, n_seeds=2)


def planted(n_examples, seed, family=2, strength=2.0):
    """Features in which labels shift one family's answer channels, and the labels."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n_examples) < 0.4
    tokens, masks = [], []
    for length in (4, 3):
        x = rng.standard_normal((n_examples, length, DIMS.total)).astype(np.float32)
        tokens.append(x)
        real = rng.integers(1, length + 1, n_examples)
        masks.append(np.arange(length)[None] < real[:, None])
    tokens[-1][..., DIMS.slices[family]] += strength * labels[:, None, None]
    return Features(tuple(tokens), tuple(masks)), labels


def planted_parts(left_out=None, change=lambda features: features):
    """Training and validation rows with a planted residual-stream signal.

    The span `left_out` is masked; `change` is applied to the features before that.
    """
    rows, valid = planted(230, seed=0), planted(110, seed=1)
    standardizer, parts = fit_standardizer([rows[0]], DIMS), []
    for features, labels in (rows, valid):
        families = split_families(change(features), DIMS, standardizer)
        if left_out is not None:
            families = empty_span(families, left_out)
        parts.append(labelled(families, labels))
    return tuple(parts)


@pytest.fixture(scope="module")
def parts():
    return planted_parts()


def train(blocks, parts, config=TRAIN):
    """Train blocks; the results are in the order of the blocks."""
    groups = ([part] for part in parts)
    trained = fit_blocks(blocks, *groups, encoder=ENCODER, config=config)
    order = [block.members for block in blocks]
    return sorted(trained, key=lambda block: order.index(block.members))


def test_only_a_member_that_reads_the_planted_signal_learns_it(parts):
    blocks = [Block((subset_index(name),), (0,)) for name in ("R", "P")]
    result, chance = (grid.info.best_auroc[0] for grid in train(blocks, parts))
    assert result > 0.9
    assert abs(chance - 0.5) < 0.2  # best of three epochs, 110 rows: s.e. 0.06


def test_one_trace_serves_all_fifteen_subsets(parts):
    blocks = [Block((k,), (0,)) for k in range(len(SUBSETS))]
    train(blocks[:1], parts)
    n_traces = train_block._cache_size()
    assert len(train(blocks[1:], parts)) == 14
    assert train_block._cache_size() == n_traces


class SlowBlock(Block):
    """A block whose training does not end before `may_end` is set."""

    may_end = threading.Event()

    @property
    def members(self):
        assert self.may_end.wait(timeout=60)
        return super().members


two_cores = pytest.mark.skipif(n_cores() < 2, reason="one block trains at a time")


@two_cores
def test_a_finished_block_does_not_wait_for_an_earlier_one(parts):
    blocks, groups = [SlowBlock((2,), (0,)), Block((0,), (0,))], ([x] for x in parts)
    protocol = {"encoder": ENCODER, "config": TRAIN, "n_threads": 2}
    trained = fit_blocks(blocks, *groups, **protocol)
    first = next(trained)
    assert first.members == (Member(0, 0),)
    SlowBlock.may_end.set()
    second = next(trained)
    assert second.members == (Member(2, 0),)
    joined = join([first, second], [Member(2, 0), Member(0, 0)])
    for row, block in enumerate((second, first)):
        member = jax.tree.map(lambda x, row=row: x[row : row + 1], joined.params)
        assert_same_leaves(member, block.params)


class WatchedBlock(Block):
    """A block that notes the thread in which it trains."""

    threads = set[int]()

    @property
    def members(self):
        self.threads.add(threading.get_ident())
        time.sleep(0.1)  # so long that an idle thread takes the next block
        return super().members


@two_cores
def test_with_a_plan_that_fills_memory_one_block_trains_at_a_time(parts):
    groups = ([x] for x in parts)
    config = PlannedConfig(**dataclasses.asdict(TRAIN), n_rows=64)
    blocks = [WatchedBlock((k,), (0,)) for k in range(4)]
    assert len([*fit_blocks(blocks, *groups, encoder=ENCODER, config=config)]) == 4
    first_and_others = 2
    assert len(WatchedBlock.threads) == first_and_others


@two_cores
def test_an_interrupt_ends_blocks_after_their_epoch(parts):
    groups, blocks = ([x] for x in parts), [Block((k,), (0,)) for k in range(4)]
    protocol = {"encoder": ENCODER, "config": TRAIN, "n_threads": 2}
    with interrupted_once() as interrupt:
        list(fit_blocks(blocks, *groups, **protocol, on_epoch=interrupt))


def test_labels_and_tokens_of_rows_with_weight_zero_have_no_influence(parts):
    rows, valid = parts
    silent = rows._replace(weights=rows.weights.at[:90].set(0.0))
    tokens = tuple(jnp.asarray(x).at[:, :90].add(7.0) for x in rows.features.tokens)
    features = rows.features._replace(tokens=tokens)
    labels = rows.labels.at[:90].set(1 - rows.labels[:90])
    changed = silent._replace(features=features, labels=labels)
    a, b = (train([Block((3,), (0,))], (rows, valid))[0] for rows in (changed, silent))
    np.testing.assert_array_equal(a.info.valid_auroc, b.info.valid_auroc)


@pytest.mark.parametrize(
    ("projection", "spans"), [(64, "all"), (64, "answer"), (4, "answer")]
)
def test_long_rows_pass_in_parts_and_take_the_steps_of_whole_batches(projection, spans):
    sizes = {"hidden": 300, "prob": 5, "resid": 4, "attn": 3}  # one projected together
    dims, drawn = paper_dims(spans, **sizes), {"dropout": 0.2, "input_noise": 0.3}
    shape = {"projection": projection, "hidden": 8, "n_blocks": 1, "n_groups": 2}
    encoder = Encoder(EncoderConfig(**shape, **drawn), dims)
    train = dataclasses.replace(TRAIN, batch_size=128)
    assert rows_in_turn(encoder, 90, train) == (64 if projection == 64 else 128)
    rng, parts = np.random.default_rng(0), []
    for n in (200, 40):
        lengths = rng.integers(1, (71, 21), (n, 2)).T
        masks = [
            np.arange(m) < x[:, None] for m, x in zip((70, 20), lengths, strict=True)
        ]
        labels = rng.random(n) < 0.5
        tokens = [
            rng.standard_normal((*mask.shape, dims.total)) + labels[:, None, None]
            for mask in masks
        ]
        features = Features(tuple(x.astype(np.float32) for x in tokens), tuple(masks))
        standardizer = fit_standardizer([features], dims)
        families = split_families(features, dims, standardizer)
        parts.append([labelled(families, labels)])
    planned = PlannedConfig(**dataclasses.asdict(train), n_rows=128)
    block = Block((subset_index("HP"), subset_index("RA"), subset_index("HA")), (0,))
    fixed = {"encoder": encoder, "n_threads": 1}
    in_parts, whole = (
        next(iter(fit_blocks([block], *parts, config=x, **fixed)))
        for x in (train, planned)
    )
    assert_same_leaves(in_parts.info, whole.info, rtol=1e-4)
    assert_same_leaves(in_parts.params, whole.params, rtol=1e-2, atol=1e-4)


BLOCK = Block((0, 3, 7, 11, 14), (0, 1))  # five subsets: no even split


def test_eight_devices_train_the_same_members_as_one(parts, tmp_path):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    words = ("-m", "tests.jaxprobe.test_grid", tmp_path / "out.npz")
    run_line(sys.executable, *words, XLA_FLAGS=flags)
    (alone,) = train([BLOCK], parts)
    with np.load(tmp_path / "out.npz") as arrays:
        assert arrays["n_devices"].tolist() == [8, 1]  # in memory, and streamed
        np.testing.assert_array_equal(arrays["members"], np.asarray(alone.members))
        np.testing.assert_array_equal(arrays["n_epochs"], alone.info.n_epochs)
        aurocs = alone.info.valid_auroc
        np.testing.assert_allclose(arrays["valid_auroc"], aurocs, atol=2e-3)
        for i, leaf in enumerate(jax.tree.leaves(alone.params)):
            np.testing.assert_allclose(arrays[f"w{i}"], leaf, atol=2e-3)  # sums


def planned_devices(stream):
    where, lengths = (np.arange(4), np.arange(4, 6)), np.ones((6, 1), int)
    config = GridConfig(stream=stream)
    return Sizes.of(config, DIMS, lengths, where, FLOATS).n_devices


def train_on_mesh(out):
    """Train over the devices of this process, and save the results."""
    groups = ([part] for part in planted_parts())
    (trained,) = fit_blocks([BLOCK], *groups, encoder=ENCODER, config=TRAIN)
    leaves = {f"w{i}": x for i, x in enumerate(jax.tree.leaves(trained.params))}
    np.savez(
        out,
        n_devices=[planned_devices(stream) for stream in (None, StreamConfig())],
        members=np.asarray(trained.members),
        valid_auroc=trained.info.valid_auroc,
        n_epochs=trained.info.n_epochs,
        **leaves,
    )


QUESTION, ANSWER = 0, 1
PR = Block((subset_index("PR"),), (0,))


def test_a_masked_span_trains_like_a_span_that_was_never_there():
    """In the features without the span, its tokens are zeros and its mask is empty."""

    def emptied(features):
        return Features(*((np.zeros_like(x[QUESTION]), x[ANSWER]) for x in features))

    masked, absent = (
        train([PR], data)[0].info.valid_auroc
        for data in (planted_parts(QUESTION), planted_parts(change=emptied))
    )
    np.testing.assert_allclose(masked, absent, atol=1e-6)


def test_every_choice_of_spans_and_another_root_seed_share_one_executable(parts):
    def n_traces():
        steps = start_block, train_block, block_logits, end_epoch
        return [step._cache_size() for step in steps]

    (trained,) = train([PR], parts)
    before = n_traces()
    for span in (QUESTION, ANSWER):
        train([PR], planted_parts(span))
    (other,) = train([PR], parts, dataclasses.replace(TRAIN, root_seed=1))
    assert n_traces() == before
    assert not np.array_equal(trained.info.train_loss, other.info.train_loss)


def test_fewer_rows_are_read_at_once_for_long_texts_and_wide_models():
    wide = paper_dims(hidden=4096, prob=5, resid=128, attn=2048)
    for widths in ((300, 40, 16), (4000, 100, 50), (40_000, 100, 50)):
        n = rows_at_once(widths, wide)
        assert n == 1 or 4 * n * sum(widths) * wide.total <= 2**29
        assert n & (n - 1) == 0  # a power of two: few executables serve all
    assert rows_at_once((60, 15, 8), DIMS) == 1024


def test_rows_of_similar_length_or_fewer_than_a_batch_are_one_group():
    lengths = np.random.default_rng(0).integers(8, 13, (500, 2))
    for some in (lengths, np.array([[5, 1], [900, 1]])):
        (group,) = width_groups(some, 32)
        np.testing.assert_array_equal(group, np.arange(len(some)))
    assert widths_of(np.array([[0, 3], [0, 2]])) == (1, 3)  # an empty span


def test_a_few_long_rows_share_one_group_of_a_batch_and_no_row_is_lost():
    lengths = np.full((500, 2), (20, 5))
    lengths[[3, 77, 400], 0] = (900, 700, 300)
    groups = width_groups(lengths, 32)
    np.testing.assert_array_equal(np.sort(np.concatenate(groups)), np.arange(500))
    assert all((np.diff(group) > 0).all() for group in groups)
    assert {3, 77, 400} <= set(groups[-1].tolist())
    assert [len(group) for group in groups] == [500 - 7 * 32, 4 * 32, 2 * 32, 32]
    assert [widths_of(lengths[group])[0] for group in groups] == [20, 20, 20, 900]


@pytest.mark.parametrize("n_rows", [1, 31, 32, 33, 63, 64, 96, 97, 225, 255, 256, 500])
def test_no_group_of_similar_length_is_smaller_than_a_batch(n_rows):
    lengths = np.arange(1, n_rows + 1)[:, None] ** 2
    groups = width_groups(lengths, 32)
    assert min(map(len, groups)) >= min(n_rows, 32)
    assert len(groups) == 1 + sum(n_rows >= n for n in (64, 128, 256))


def split_at(data, n_first):
    """Two groups of rows: the first `n_first`, and the rest."""
    labels, rows = np.asarray(data.labels) > 0, np.arange(len(data.labels))
    groups = np.split(rows, [n_first])
    return [labelled(data.features.take(rows), labels[rows]) for rows in groups]


def test_encoders_find_the_planted_signal_in_rows_of_several_groups(parts):
    rows, valid = parts
    block, groups = Block((subset_index("R"),), (0,)), (split_at(rows, 115),)
    groups += (split_at(valid, 36),)
    (result,) = fit_blocks([block], *groups, encoder=ENCODER, config=TRAIN)
    assert result.info.best_auroc[0] > 0.85
    outputs = jax.device_get(member_outputs(result, valid.features, encoder=ENCODER))
    labels = np.asarray(valid.labels) > 0
    right, wrong = outputs.logits[0][labels], outputs.logits[0][~labels]
    by_hand = (right[:, None] > wrong[None]).mean()
    np.testing.assert_allclose(result.info.best_auroc[0], by_hand, atol=1e-5)


if __name__ == "__main__":
    train_on_mesh(*sys.argv[1:])
