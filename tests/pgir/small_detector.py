"""A real, untrained detector for a backbone: random encoders, heads and a map."""

import jax
import jax.numpy as jnp
import numpy as np

from beatrice.jaxprobe.calibration import fit_calibrator
from beatrice.jaxprobe.config import EncoderConfig, FusionConfig
from beatrice.jaxprobe.detector import Detector, EncoderBank, Provenance, SettingHead
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import FamilyTokens, Standardizer, paper_dims
from beatrice.jaxprobe.fusion import FusionHead, head_inputs

LAYER = 3
QUESTION = "where was Skiband Rugrond born?"
PASSAGE = "Skiband Rugrond was born in Guzolt Falls."
CONFIG = EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2)
FUSION = FusionConfig(hidden=8, n_slots=2)


def _bank(dims, n_spans):
    tokens = tuple(jnp.zeros((2 * n_spans, 1, size)) for size in dims.sizes)
    masks = tuple(jnp.ones((2, 1), bool) for _ in range(n_spans))
    params = jax.jit(Encoder(CONFIG, dims).init)(
        jax.random.key(0),
        FamilyTokens(tokens, masks),
        jnp.ones(4, bool),
    )
    return EncoderBank(
        dims=dims,
        config=CONFIG,
        standardizer=Standardizer(
            np.zeros(dims.total, np.float32), np.ones(dims.total, np.float32)
        ),
        names=("HPRA",),
        spans=tuple(range(3 - n_spans, 3)),
        params=jax.tree.map(lambda x: np.asarray(x)[None, None], params),
    )


def _head(reads):
    params = jax.jit(FusionHead(FUSION).init)(
        jax.random.key(1),
        head_inputs(jnp.zeros((2, 1, CONFIG.d_pooled)), jnp.zeros((2, 1))),
        jnp.arange(2),
        jnp.arange(2) < len(reads),
    )
    scores = np.linspace(0, 1, 20)
    return SettingHead(
        reads=reads,
        config=FUSION,
        params=jax.tree.map(lambda x: np.asarray(x)[None], params),
        calibrator=fit_calibrator(scores, scores > 0.5),
    )


def make_detector(backbone):
    n_readings = 2 * 2 * len(backbone.attention_layers) * backbone.n_heads
    dims = paper_dims(
        hidden=backbone.d_model, prob=5, resid=4 * backbone.n_layers, attn=n_readings
    )
    closed, grounded = ("closed_book", "HPRA"), ("with_context", "HPRA")
    return Detector(
        banks={"closed_book": _bank(dims, 2), "with_context": _bank(dims, 3)},
        heads={
            "closed_book": _head((closed,)),
            "with_context": _head((grounded, closed)),
            "single_pass": _head((grounded,)),
        },
        provenance=Provenance(
            model="embedded", revision=backbone.revision, layer=LAYER
        ),
    )
