"""A detector scores alike in JAX and in Torch, whatever its encoders and heads are."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from beatrice.extract.records import Passage
from beatrice.extract.signals.sequence import TokenSequence
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.detector import leaves
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import SPANS, SUBSET_NAMES, Features, paper_dims
from beatrice.jaxprobe.fusion import FusionHead, PoolOutputs, apply_head, slots_of
from beatrice.jaxprobe.grid import apply_member
from beatrice.jaxprobe.tokens import split_families
from beatrice.pgir.bridge import ProbedBackbone
from beatrice.pgir.forward import TorchForward
from tests.extract.signals.test_precision import precision_beside
from tests.jaxprobe.samples import ragged_features, random_detector, score_as_trained
from tests.pgir.small import LAYER, PASSAGE, QUESTION, input_shapes
from tests.pretended_gpu import DEVICE, PretendedGpu

SIZES = {"hidden": 12, "prob": 5, "resid": 8, "attn": 6}
CONFIG = EncoderConfig(projection=4, hidden=8, n_blocks=2, n_groups=2)


def make_detector(config, reads, hidden_spans="all", **options):
    """A detector of all fifteen subsets in both passes, with heads for `reads`."""
    dims = paper_dims(hidden_spans=hidden_spans, **SIZES)
    return random_detector(dict.fromkeys(SPANS, dims), config, reads, 9, **options)


def passes_of(detector):
    """Return random signals for each pass of a detector."""
    return {
        s: ragged_features(s, bank.dims, seed=3) for s, bank in detector.banks.items()
    }


def assert_alike(detector, branch, atol=1e-5):
    passes = passes_of(detector)
    expected = score_as_trained(detector, branch, passes)
    scores = TorchForward(detector).score(branch, passes)
    assert scores.encoder_names == expected.encoder_names
    np.testing.assert_allclose(scores.encoders, expected.encoders, atol=atol)
    np.testing.assert_allclose(scores.raw, expected.raw, atol=atol)
    np.testing.assert_allclose(scores.p_correct, expected.p_correct, atol=atol)
    assert np.ptp(expected.raw) > 0.01  # the inputs matter


@pytest.mark.parametrize("is_linear_first", [False, True])
@pytest.mark.parametrize("setting", list(SPANS))
def test_every_subset_of_both_passes_scores_alike(setting, is_linear_first):
    config = dataclasses.replace(CONFIG, is_linear_first=is_linear_first)
    for names in (SUBSET_NAMES[:9], SUBSET_NAMES[6:]):
        reads = {setting: tuple((setting, name) for name in names)}
        assert_alike(make_detector(config, reads), setting)


@pytest.mark.parametrize("n_read", range(1, 10))
def test_a_head_of_one_to_nine_encoders_of_both_passes_scores_alike(n_read):
    pairs = [("with_context", n) for n in SUBSET_NAMES] + [("closed_book", "HPRA")]
    reads = {"with_context": tuple(pairs[-n_read:])}
    assert_alike(make_detector(CONFIG, reads), "with_context")


def test_hidden_states_of_only_the_answer_are_read_alike():
    reads = {"with_context": (("with_context", "HPRA"), ("with_context", "H"))}
    detector = make_detector(CONFIG, reads, hidden_spans="answer")
    assert_alike(detector, "with_context")
    passes, scorer = passes_of(detector), TorchForward(detector)
    before = scorer.score("with_context", passes).raw
    passes["with_context"].tokens[0][..., :12] += 9  # the context's hidden states
    np.testing.assert_array_equal(scorer.score("with_context", passes).raw, before)


def test_while_a_detector_scores_no_other_thread_rounds_its_products():
    seen = []

    class Recording(Features):
        @property
        def n_examples(self):
            seen.append(precision_beside())
            return len(self.masks[0])

    detector = make_detector(CONFIG, {"closed_book": (("closed_book", "HPRA"),)})
    passes = {"closed_book": Recording(*passes_of(detector)["closed_book"])}
    TorchForward(detector).score("closed_book", passes)
    assert set(seen) == {torch.backends.mkldnn.matmul.fp32_precision}


def test_mixed_products_score_alike():
    config = dataclasses.replace(CONFIG, matmul_dtype="bfloat16")
    reads = {"closed_book": (("closed_book", "HPRA"), ("closed_book", "PA"))}
    assert_alike(make_detector(config, reads), "closed_book", atol=2e-3)


def test_networks_that_add_nothing_are_not_run_and_score_alike():
    config = dataclasses.replace(CONFIG, is_linear_first=True)
    reads = {"closed_book": (("closed_book", "HPRA"), ("closed_book", "A"))}
    detector = make_detector(config, reads, is_mean=True)
    passes = passes_of(detector)

    def n_operations():
        with FlopCounterMode(display=False) as counter:
            TorchForward(detector).score("closed_book", passes)
        return counter.get_total_flops()

    n_before = n_operations()
    for bank in detector.banks.values():
        for name in ("kernel", "bias"):
            bank.params["params"]["mlp_out"][name] *= 0
    assert n_operations() < n_before
    assert_alike(detector, "closed_book")


def test_a_detector_scores_on_the_device_of_its_model():
    config = dataclasses.replace(CONFIG, is_linear_first=True)
    reads = {"with_context": (("with_context", "HPRA"), ("closed_book", "HP"))}
    detector = make_detector(config, reads)
    passes = passes_of(detector)
    expected = TorchForward(detector).score("with_context", passes)
    with PretendedGpu():
        scores = TorchForward(detector, DEVICE).score("with_context", passes)
    np.testing.assert_array_equal(scores.raw, expected.raw)
    np.testing.assert_array_equal(scores.encoders, expected.encoders)


@pytest.mark.parametrize("what", ["encoders", "heads"])
def test_jax_multiplies_at_the_highest_precision_on_a_gpu(what):
    """Torch rounds no factors; JAX by default keeps ten bits of them, as TF32 does."""
    config = dataclasses.replace(CONFIG, is_linear_first=True)
    reads = {"closed_book": (("closed_book", "HPRA"),)}
    detector = make_detector(config, reads)
    bank, head = detector.banks["closed_book"], detector.heads["closed_book"]
    if what == "encoders":
        features = passes_of(detector)["closed_book"]
        families = split_families(features, bank.dims, bank.standardizer)
        params = jax.tree.map(lambda x: x[0, 0], bank.params)
        arguments = params, jnp.asarray(bank.dims.subset_masks[0]), families
        encoder = Encoder(bank.config, bank.dims)
        traced = apply_member.trace(*arguments, encoder=encoder)
    else:
        pool = PoolOutputs(jnp.zeros((2, 1, config.d_pooled + 1, 3)), *[None] * 3)
        params = jax.tree.map(lambda x: x[0], head.params)
        arguments = params, *slots_of((0,), head.config.n_slots), pool, np.int32(0)
        traced = apply_head.trace(*arguments, head=FusionHead(head.config))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_a_padded_token_and_a_neighbour_in_the_batch_change_no_score():
    reads = {"with_context": (("with_context", "HPRA"), ("closed_book", "HP"))}
    detector = make_detector(CONFIG, reads)
    passes, scorer = passes_of(detector), TorchForward(detector)
    together = scorer.score("with_context", passes).raw
    for i in range(len(together)):
        padded = {}
        for setting, features in passes.items():
            row = features.take(slice(i, i + 1))
            padded[setting] = Features(
                tuple(np.pad(x, ((0, 0), (0, 3), (0, 0)), constant_values=9.0)
                      for x in row.tokens),
                tuple(np.pad(mask, ((0, 0), (0, 3))) for mask in row.masks),
            )  # fmt: skip
        alone = scorer.score("with_context", padded).raw
        np.testing.assert_allclose(alone, together[i : i + 1], atol=2e-6)


def test_scores_do_not_depend_on_how_many_answers_fit_in_memory(probed):
    questions = [QUESTION, "what is the genre of Skiband Rugrond?"] * 6
    contexts = {"closed_book": (), "with_context": [Passage(title="", text=PASSAGE)]}
    passes = {
        setting: probed.read(
            probed.answer(probed.requests(setting, questions, [context] * 12))
        )
        for setting, context in contexts.items()
    }
    whole = probed.score("with_context", passes)
    assert probed.reader.hidden_layers == (LAYER,)
    banks = {
        where: dataclasses.replace(bank, lengths=(64,) * len(SPANS[where]))
        for where, bank in probed.detector.banks.items()
    }
    detector = dataclasses.replace(probed.detector, banks=banks)
    for n_bytes, at_once in ((10 * banks["with_context"].row_bytes, 10), (1, 1)):
        shared = probed.backbone, detector, probed.config
        small = ProbedBackbone(*shared, most_bytes=n_bytes)
        assert small.rows_at_once("with_context") == at_once
        parts = small.score("with_context", passes)
        assert parts.encoder_names == whole.encoder_names
        np.testing.assert_allclose(parts.raw, whole.raw, atol=1e-5)
        np.testing.assert_allclose(parts.encoders, whole.encoders, atol=1e-5)


def test_batches_are_hardly_padded_after_the_shared_worked_examples(probed):
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 40, 256)
    shots = rng.integers(3, 90, 69)
    sequences = []
    for n in 69 + lengths:
        ids = np.concatenate([shots, rng.integers(3, 90, n - 69)])
        spans = np.array([(69, 69), (69, n - 4), (n - 4, n)])
        sequences.append(TokenSequence(ids=ids, targets=ids, spans=spans))
    with input_shapes(probed.backbone) as shapes:
        probed.read_sequences(sequences)
    assert sum(map(math.prod, shapes)) <= 69 + 1.15 * lengths.sum()


@pytest.mark.parametrize("name", ["projection_1", "mlp_in/kernel", "span_1/entry_bias"])
def test_arrays_that_do_not_fit_the_settings_are_refused(name):
    detector = make_detector(CONFIG, {"closed_book": (("closed_book", "PR"),)})
    bank = detector.banks["closed_book"]
    arrays = {path: np.asarray(x) for path, x in leaves(bank.params["params"])}
    x = arrays[name]
    for wrong in (None, x[:, :, :0], np.repeat(x, 3, axis=2), np.float32(0)):
        params = {"params": arrays | {name: wrong}}
        if wrong is None:
            del params["params"][name]
        broken = dataclasses.replace(bank, params=params)
        with pytest.raises(ValueError, match="arrays do not fit its settings"):
            TorchForward(dataclasses.replace(detector, banks={"closed_book": broken}))
    scope = bank.scope._replace(limits=np.ones(1))
    with pytest.raises(ValueError, match=r"arrays of shapes .* found .*\(1,\)"):
        dataclasses.replace(bank, scope=scope)
