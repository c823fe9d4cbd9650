"""The four families of every architecture against brute force, and their laws."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import transformers
from transformers import LlamaModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from beatrice.benchmarks.bench import oracle
from beatrice.benchmarks.bench.oracle import TOLERANCE
from beatrice.benchmarks.bench.tiny_models import (
    FAMILIES,
    architectures,
    make_batch,
    make_sequence,
    tiny_model,
)
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.forks import ForkLock
from beatrice.extract.signals import precision
from beatrice.extract.signals.attention import NAME, SpanReading, run_decoder
from beatrice.extract.signals.batch import HostCopies, ReadingBudget, TokenRows
from beatrice.extract.signals.parity import narrow_twin
from beatrice.extract.signals.probability import Head
from beatrice.extract.signals.reader import SignalReader
from beatrice.extract.signals.residual import StreamReading
from beatrice.extract.signals.sequence import first_read_token
from tests.extract.signals.readers import assert_same_signals, representatives
from tests.process import interrupt_where

FIELDS = oracle.SIGNALS
ARCHITECTURES = dict(architectures())
# Its own forward pass needs outputs that this version's text model does not give.
BROKEN = {"5.24.0": "llama4 (wrapper)"}.get(transformers.__version__)


def reader_of(family, *options, **changes):
    return SignalReader(Backbone.from_model(tiny_model(family)), *options, **changes)


def forward(backbone):
    """Run the reading path on a sequence; return its ids and final states."""
    layout, sequence = backbone.layout, make_batch()[0]
    ids, spans = (torch.from_numpy(x)[None] for x in (sequence.ids, sequence.spans))
    with torch.no_grad():
        reading = SpanReading(spans, ids, layout.attention_layers, 2**20)
        return ids, run_decoder(layout, ids, reading=reading)


def assert_oracle_agrees(model):
    result = oracle.reader_signals(model, together=True)
    expected = oracle.oracle_batch(model, "eager")
    for left, right in zip(result, expected, strict=True):
        for field in FIELDS:
            assert left[field].dtype == np.float32
            assert left[field].shape == right[field].shape, field
            # Asserted separately, since max() can pass over a NaN.
            assert np.isfinite(left[field]).all(), field
    for field, error in oracle.largest_errors(result, expected).items():
        assert error < TOLERANCE, field


def assert_same_as_oracle(model, sequences, readings):
    """Check the rows that were read of a model against its own eager attention."""
    eager = oracle.copy_with_attention(model, "eager")
    for sequence, item in zip(sequences, readings, strict=True):
        first = first_read_token(sequence.spans[0, 0])
        assert item.first_token == first
        for family, expected in oracle.oracle_signals(eager, sequence).items():
            rows = getattr(item, family)
            np.testing.assert_allclose(rows, expected[first:], atol=TOLERANCE)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_agrees_with_the_brute_force_oracle(name):
    if name == BROKEN:
        with pytest.raises(ValueError, match="its own forward pass fails"):
            SignalReader(Backbone.from_model(ARCHITECTURES[name]()))
    else:
        assert_oracle_agrees(ARCHITECTURES[name]())


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4", "gpt2"])
def test_bfloat16_reads_within_the_gap_between_the_models_own_kernels(name):
    row = oracle.measure(name, lambda: tiny_model(name))
    oracle.require([row])
    for field in FIELDS:
        error, gap = row[f"bf16 {field}"]
        # Readings are float32 and match the model's own numbers to float32.
        assert 0 < row[f"fp32 {field}"] < TOLERANCE and error < TOLERANCE < gap


# A softcap, sinks, and attention of their own: no fused kernel can replace these.
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "falcon", "gptj", "bloom"])
def test_bfloat16_states_of_a_model_without_fused_attention_are_its_own_bits(name):
    backbone = Backbone.from_model(tiny_model(name).to(torch.bfloat16))
    ids, final = forward(backbone)
    with torch.no_grad():
        output = backbone.layout.decoder(input_ids=ids, use_cache=False)
    assert torch.equal(final, output.last_hidden_state)
    result = oracle.reader_signals(backbone.model, together=False)
    expected = oracle.oracle_batch(backbone.model, oracle.FUSED)
    assert max(oracle.largest_errors(result, expected).values()) < TOLERANCE


@pytest.mark.parametrize("family", representatives(FAMILIES))
def test_reading_leaves_the_model_as_it_was(family):
    reader = reader_of(family)
    model = reader.backbone.model
    ids = torch.from_numpy(make_batch()[0].ids)[None]
    name = model.config._attn_implementation
    with torch.no_grad():
        before = model(input_ids=ids).logits
        reader.read(make_batch())
        after = model(input_ids=ids).logits
    assert torch.equal(before, after)
    assert model.config._attn_implementation == name
    assert not any(module._forward_hooks for module in model.modules())


class Interrupted(LlamaModel):
    """A decoder that is interrupted when its attention is first set to `due`."""

    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        is_due = attn_implementation == self.due
        if attn_implementation == NAME or not is_due:
            super().set_attn_implementation(attn_implementation, *args, **kwargs)
        if is_due:
            self.due = None
            raise KeyboardInterrupt


@pytest.mark.parametrize("due", [NAME, "sdpa"])
def test_an_interrupt_while_a_reading_begins_or_ends_restores_the_attention(due):
    reader = reader_of("llama")
    decoder, batch = reader.backbone.layout.decoder, make_batch()
    expected, name = reader.read(batch), decoder.config._attn_implementation
    decoder.__class__, decoder.due = Interrupted, due
    with pytest.raises(KeyboardInterrupt):
        reader.read(batch)
    assert decoder.config._attn_implementation == name
    decoder.__class__ = LlamaModel
    assert_same_signals(reader.read(batch), expected)


def test_interrupts_wait_until_a_reading_has_undone_its_changes():
    reader, batch = reader_of("llama"), make_batch()
    model, expected = reader.backbone.model, reader.read(batch)
    name = model.config._attn_implementation
    for n_ends in range(30):  # of locks, hooks, default types and more
        due = itertools.chain([False] * n_ends, [True], itertools.repeat(False))
        interrupt_where(
            lambda code, due=due: code.co_name == "__exit__" and next(due),
            lambda: reader.read(batch),
        )
        assert model.config._attn_implementation == name
        assert not any(module._forward_hooks for module in model.modules())
        assert not ForkLock._n_held and not precision._EXACT
    assert_same_signals(reader.read(batch), expected)


def test_chosen_hidden_layers_come_in_the_given_order():
    every, some = reader_of("gpt2"), reader_of("gpt2", (3, 0))
    everything, chosen = (x.read(make_batch()[:1])[0].hidden for x in (every, some))
    assert everything.shape[1] == every.backbone.n_layers + 1
    assert (chosen == everything[:, [3, 0]]).all()


@pytest.mark.parametrize("family", ["falcon", "falcon_40b"])
def test_signals_of_returned_weights_are_those_of_the_attention_call(family):
    calls, returns = (Backbone.from_model(tiny_model(family)) for _ in range(2))
    assert calls.model.config._attn_implementation == "sdpa"
    returns.model.config._attn_implementation = "eager"
    batch = make_batch()
    result, expected = (SignalReader(item).read(batch) for item in (returns, calls))
    assert_same_signals(result, expected, TOLERANCE)


def test_attention_maps_that_a_decoder_returns_are_not_kept():
    backbone, seen = Backbone.from_model(tiny_model("mpt")), []
    decoder = backbone.layout.decoder
    decoder.register_forward_hook(lambda *args: seen.append(args[-1]))
    forward(backbone)
    assert seen[0].attentions == (None, None, None)


@pytest.mark.parametrize("entries", [(9,), (-1,), (1, 1)])
def test_impossible_hidden_layers_are_refused(entries):
    with pytest.raises(ValueError, match="hidden layers"):
        reader_of("gpt2", entries)


def test_an_empty_batch_reads_nothing():
    assert reader_of("llama").read([]) == []


def test_a_layer_that_never_ran_is_refused_and_not_read_from_old_memory():
    rows = TokenRows([(0, 3)], 3, torch.device("cpu"))
    stream = StreamReading((0, 2), rows, None, HostCopies())
    with pytest.raises(ValueError, match=r"entries \[0, 2\] .* were not seen"):
        stream.states()


# Eight heads in the indexer: with fewer, its ReLU leaves ties among the scores.
KEYS = {"index_topk": 6, "index_n_heads": 8, "num_attention_heads": 4}
BLOCKS = {
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    # The check left-pads 11 tokens, which would shift MiniMax's own blocks.
    "index_block_size": 12,
    "index_topk_blocks": 2,
    "index_n_heads": 2,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
}
SPARSE = dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2"), KEYS)
SPARSE["minimax_m3_vl_text"] = BLOCKS


@pytest.mark.parametrize("name", list(SPARSE))
def test_a_sparse_model_is_read_exactly_even_if_it_leaves_keys_out(name):
    model = narrow_twin(CONFIG_MAPPING[name](), **SPARSE[name])
    # Control: with 26 tokens some rows do leave keys out.
    twin = oracle.copy_with_attention(model, "eager")
    seen = oracle.run_model(twin, make_batch()[0].ids).maps[-1]
    assert (seen[0, -1] == 0).sum() > 5
    assert_oracle_agrees(model)


def with_keyword(model, **keywords):
    """Let the first layer pass another keyword to its attention function."""
    first = model.get_decoder().layers[0].self_attn

    def add(module, args, kwargs):
        return args, {**kwargs, **keywords}

    first.register_forward_pre_hook(add, with_kwargs=True)
    return model


@pytest.mark.parametrize(
    "indices", [torch.ones(1), torch.zeros((1, 26, 3), dtype=torch.long)]
)
def test_chosen_keys_of_another_shape_are_refused_and_do_not_crash(llama, indices):
    model = with_keyword(llama, indices=indices)
    with pytest.raises(ValueError, match="LlamaAttention.*expected the keys"):
        SignalReader(Backbone.from_model(model))


def test_a_ragged_batch_with_ties_among_its_keys_is_read_like_single_rows():
    # With one head in the indexer, its ReLU gives most keys of a row exactly zero, and
    # which of them are selected depends on the number of columns.
    config = CONFIG_MAPPING["deepseek_v32"]()
    sizes = {"index_topk": 14, "index_n_heads": 1, "num_attention_heads": 4}
    reader = SignalReader(Backbone.from_model(narrow_twin(config, **sizes)))
    batch = make_batch()
    alone = [reader.read([sequence])[0] for sequence in batch]
    assert_same_signals(alone, reader.read(batch), TOLERANCE)


@pytest.fixture
def llama():
    return narrow_twin(CONFIG_MAPPING["llama"](), num_attention_heads=4)


def test_an_unknown_keyword_is_refused_when_a_model_is_opened_or_read(llama):
    # Without a value the keyword has no effect.
    reader = SignalReader(Backbone.from_model(with_keyword(llama, chosen_keys=None)))
    reader.read(make_batch())
    with_keyword(llama, chosen_keys=torch.ones(1))
    with pytest.raises(ValueError, match="LlamaAttention.*found chosen_keys"):
        reader.read(make_batch())
    with pytest.raises(ValueError, match="LlamaAttention.*found chosen_keys"):
        SignalReader(Backbone.from_model(llama))


SMALL = ReadingBudget(
    n_attention_weights=1000, n_tokens_per_chunk=7, n_words_per_block=13
)


def mixed_batch():
    """Worked examples of two lengths before the spans, none, and only an answer."""
    return [
        make_sequence(1, 90, [60, 60], [60, 80], [80, 90]),
        make_sequence(2, 70, [50, 58], [58, 66], [66, 69]),
        make_sequence(3, 26, [2, 15], [15, 22], [22, 26]),
        make_sequence(4, 52, [51, 51], [51, 51], [51, 52]),
    ]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "gpt2", "bloom"])
@pytest.mark.parametrize("n_spared", [2, 4])
def test_rows_after_worked_examples_are_those_of_the_oracle(name, n_spared):
    reader, batch = reader_of(name, budget=SMALL), mixed_batch()[:n_spared]
    assert_same_as_oracle(reader.backbone.model, batch, reader.read(batch))


def batch_with_examples(n_examples, n_common, seed=9):
    """Sequences that begin alike; of `n_common` tokens 50 are before the spans."""
    common = make_sequence(seed, n_common, [0, 0], [0, 0], [0, 0]).ids
    batch = mixed_batch()[1:2] * n_examples
    for i, sequence in enumerate(batch):
        ids = make_sequence(20 + i, 70 - i, [0, 0], [0, 0], [0, 0]).ids.copy()
        ids[:n_common] = common
        targets = np.append(ids[1:], 5)
        spans = sequence.spans - np.array([[0, 0], [0, i], [i, i]])
        batch[i] = dataclasses.replace(sequence, ids=ids, targets=targets, spans=spans)
    return batch


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [("llama", True), ("gpt2", True), ("minicpm3", True), ("olmo2", True)]
    # A shorter window; recurrent states; no call of an attention function.
    + [("gemma3", False), ("qwen3_5", False), ("bloom", False)],
)
def test_a_shared_beginning_before_all_spans_is_computed_once(name, is_shared):
    reader = reader_of(name, budget=SMALL)
    model, widths = reader.backbone.model, []
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, ids, out: widths.append(ids[0].shape))
    # The passage is shared too (55 tokens) but in a span, so it is read in each.
    batch = batch_with_examples(3, 55)
    widths.clear()
    readings = reader.read(batch)
    tried = [] if name in ("qwen3_5", "bloom") else [(1, 50)]
    behind = [(3, 20)] if is_shared else [(3, 70)]
    assert [tuple(shape) for shape in widths] == tried + behind
    assert {signals.first_token for signals in readings} == {50}
    assert_same_as_oracle(model, batch, readings)
    widths.clear()
    again = reader.read(batch[:1])  # same beginning: not run again
    assert [tuple(shape) for shape in widths] == [(1, 20 if is_shared else 70)]
    assert_same_signals(again[0], readings[0], 1e-5)
    widths.clear()
    reader.read(batch_with_examples(2, 55, seed=10))  # another beginning
    assert widths[-1] == (2, 20 if is_shared else 70)
    assert len(widths) == 1 + bool(tried)


def test_a_beginning_that_holds_a_token_of_a_span_is_refused():
    (sequence,) = batch_with_examples(1, 55)
    assert sequence.behind(50).spans[0, 0] == 0
    with pytest.raises(ValueError, match="spans must be half-open"):
        sequence.behind(51)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_summed_in_float32_and_for_float32_the_plain_product(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((3000, 192), generator=generator).to(dtype)
    states = torch.randn((200, 192), generator=generator).to(dtype)
    head = Head(weight=weight, bias=None, softcap=None)
    result, exact = head.logits(states, 100, 3000), states.double() @ weight.double().T
    assert result.dtype == torch.float32
    assert float((result - exact[:, 100:]).abs().max() / exact.abs().max()) < 1e-6
    if dtype == torch.float32:
        plain = torch.mm(states, weight[100:].T)
        assert torch.equal(result, plain)
