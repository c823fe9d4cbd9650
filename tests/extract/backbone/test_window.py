"""The window of models whose positions depend on the length of a batch."""

import numpy as np
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from beatrice.benchmarks.bench import oracle
from beatrice.benchmarks.bench.tiny_models import (
    _NO_HEAD_DIM,
    _randomise,
    make_sequence,
)
from beatrice.extract.backbone.loading import Backbone, window_of
from beatrice.extract.signals.reader import SignalReader

SWITCH = 16
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": SWITCH,
}


@pytest.fixture(scope="module")
def model():
    config = {
        **_NO_HEAD_DIM,
        "original_max_position_embeddings": SWITCH,
        "rope_parameters": ROPE,
    }
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Phi3ForCausalLM(Phi3Config(**config))
        _randomise(model)
    return model.eval()


def sequence(seed, n_tokens):
    edges = [1, n_tokens // 3, 2 * n_tokens // 3, n_tokens]
    return make_sequence(seed, n_tokens, edges[:2], edges[1:3], edges[2:])


def test_a_longrope_window_ends_where_its_positions_change(model):
    """The model itself does depend on the batch beyond it."""
    backbone = Backbone.from_model(model)
    assert backbone.max_length == SWITCH
    ids = torch.arange(3, 15)[None]
    padded = torch.nn.functional.pad(ids, (0, SWITCH - 11), value=3)
    assert padded.shape[1] == SWITCH + 1
    with torch.no_grad():
        alone = model(input_ids=ids).logits
        in_long_batch = model(input_ids=padded).logits[:, : ids.shape[1]]
        in_window = model(input_ids=padded[:, :SWITCH]).logits[:, : ids.shape[1]]
    assert (alone - in_long_batch).abs().max() > 1e-2
    torch.testing.assert_close(alone, in_window, atol=1e-4, rtol=0)


def test_within_the_window_a_reading_is_exact_in_any_batch(model):
    reader = SignalReader(Backbone.from_model(model))
    short = sequence(1, 12)
    wanted = oracle.oracle_signals(oracle.copy_with_attention(model, "eager"), short)
    found = reader.read([short, sequence(2, SWITCH)])[0]
    for name in oracle.SIGNALS:
        np.testing.assert_allclose(getattr(found, name), wanted[name], atol=2e-4)
    with pytest.raises(ValueError, match="17 tokens.*reads at most 16"):
        reader.read([short, sequence(2, SWITCH + 1)])


def test_a_switch_per_layer_type_counts_and_other_ropes_do_not(model):
    config = model.config.__class__(**_NO_HEAD_DIM)
    assert window_of(config) == 128
    config.rope_parameters = {"full_attention": ROPE, "sliding_attention": {}}
    assert window_of(config) == SWITCH
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert window_of(config) == 128
