"""Layers that attend to chosen keys alone, at lengths where the choice bites."""

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from beatrice.benchmarks.bench import oracle
from beatrice.benchmarks.bench.tiny_models import make_batch
from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.backbone.twin import narrow_twin
from beatrice.extract.signals.reader import SignalReader

# Eight heads of the indexer: fewer, and the ReLU leaves ties among its scores.
KEYS = {"index_topk": 6, "index_n_heads": 8, "num_attention_heads": 4}
BLOCKS = {
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    # Opening it left-pads 11 tokens, where MiniMax itself shifts its blocks.
    "index_block_size": 12,
    "index_topk_blocks": 2,
    "index_n_heads": 2,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
}
SPARSE = {
    "deepseek_v32": KEYS,
    "glm_moe_dsa": KEYS,
    "axk2": KEYS,
    "minimax_m3_vl_text": BLOCKS,
}


def sparse_model(name):
    return narrow_twin(CONFIG_MAPPING[name](), **SPARSE[name])


@pytest.mark.parametrize("name", list(SPARSE))
def test_a_sparse_model_is_read_exactly_where_it_leaves_keys_out(name):
    model = sparse_model(name)
    expected = oracle.oracle_batch(model, "eager")
    # Of 26 tokens some rows leave keys out; else this would show nothing.
    seen = oracle.run_model(oracle.copy_with_attention(model, "eager"),
                            make_batch()[0].ids).maps[-1]  # fmt: skip
    assert (seen[0, -1] == 0).sum() > 5
    found = oracle.reader_signals(model, together=True)
    for field, error in oracle.largest_errors(found, expected).items():
        assert error < oracle.TOLERANCE, field


def with_keyword(model, **keywords):
    """Let the first layer hand one more keyword to its attention function."""
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


def test_a_ragged_batch_with_ties_among_its_keys_is_read_as_each_row_alone():
    # One head of the indexer: its ReLU leaves most keys of a row at exactly zero, and
    # which of them are chosen depends on the number of columns.
    config = CONFIG_MAPPING["deepseek_v32"]()
    sizes = {"index_topk": 14, "index_n_heads": 1, "num_attention_heads": 4}
    reader = SignalReader(Backbone.from_model(narrow_twin(config, **sizes)))
    batch = make_batch()
    together = reader.read(batch)
    for sequence, signals in zip(batch, together, strict=True):
        (alone,) = reader.read([sequence])
        for name in ("hidden", "prob", "resid", "attn"):
            gap = abs(getattr(alone, name) - getattr(signals, name)).max()
            assert gap < oracle.TOLERANCE, name


@pytest.fixture
def llama():
    return narrow_twin(CONFIG_MAPPING["llama"](), num_attention_heads=4)


def test_a_keyword_that_is_not_known_is_refused_by_name_when_a_model_is_opened(llama):
    with pytest.raises(ValueError, match="LlamaAttention.*found chosen_keys"):
        SignalReader(
            Backbone.from_model(with_keyword(llama, chosen_keys=torch.ones(1)))
        )


def test_a_keyword_that_comes_later_is_refused_in_any_forward(llama):
    reader = SignalReader(Backbone.from_model(llama))
    reader.read(make_batch())
    with_keyword(llama, chosen_keys=torch.ones(1))
    with pytest.raises(ValueError, match="LlamaAttention.*found chosen_keys"):
        reader.read(make_batch())


def test_a_keyword_without_a_value_asks_for_nothing(llama):
    SignalReader(Backbone.from_model(with_keyword(llama, chosen_keys=None)))
