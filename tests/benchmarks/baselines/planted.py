"""Small inputs in which every detector of the catalogue finds what was planted."""

import itertools

import numpy as np

from beatrice.benchmarks.baselines.detector import DetectorInput
from beatrice.extract.generate.requests import PromptConfig
from beatrice.extract.records import Passage
from beatrice.extract.store.families import Family
from beatrice.extract.store.spec import StoreSpec
from beatrice.extract.store.store import create_store, write_range
from tests.benchmarks.rows import rows_of
from tests.records import a_sample, an_answer, an_example

N, D, N_LAYERS, N_HEADS, N_SAMPLES, N_PROMPT, N_TOLD = 150, 6, 5, 3, 4, 3, 3
SETTING, LAYER = "with_context", 2  # of which hidden states tell, 0 the embedding
_NUMBERS = itertools.count()
# Readings that are higher for right answers; all others are lower.
UP = {"redeep_ecs", "lumina_mmd", "p_true", "llmcheck_attention_all"}
SHAPES = {
    **dict.fromkeys(("llmcheck_hidden", "llmcheck_hidden_all"), (N_LAYERS,)),
    **dict.fromkeys(("llmcheck_attention", "llmcheck_attention_all"), (N_LAYERS,)),
    **dict.fromkeys(("window_entropy", "window_entropy_corrected"), ()),
    **dict.fromkeys(("logit_entropy", "logit_entropy_corrected"), ()),
    **dict.fromkeys(("redeep_ecs", "lookback"), (N_LAYERS, N_HEADS)),
    **dict.fromkeys(("redeep_pks", "redeep_pks_swapped"), (N_LAYERS,)),
    **dict.fromkeys(("lumina_ipr", "lumina_ipr_inner"), ()),
    **dict.fromkeys(("lumina_mmd", "p_true"), ()),
    "mlp_exact_answer": (N_LAYERS, D),
    "gnosis_maps": (N_LAYERS, N_HEADS, 23),
    "gnosis_states": (8, D),
}


def readings(labels, rng, strength):
    """Noise, and the label at layer 2 where there are layers."""
    found = {}
    for name, shape in SHAPES.items():
        values = rng.standard_normal((len(labels), *shape)).astype(np.float32)
        told = values[:, LAYER] if shape else values
        sign = 1 if name in UP else -1
        told += strength * sign * labels.reshape(-1, *[1] * (told.ndim - 1))
        found[name] = values
    # The states of draws that mean the same lie together.
    spread = np.where(labels, 0.1, 2.0)[:, None, None]
    states = rng.standard_normal((len(labels), N_SAMPLES, D)) * spread
    return {**found, "sample_states": states.astype(np.float32)}


def memory_store(values, lengths, spans, *, layers=(), setting=SETTING, **fields):
    """Return a store in memory, of values end to end by family, `[n_tokens, ...]`.

    Args:
      values: of "hidden" with a layer axis behind the tokens.
      lengths: `[n_rows]` tokens.
      spans: `[n_rows, 3, 2]` or, the same for all rows, `[3, 2]`.
      layers: of the hidden states.
      setting: of the answers.
      fields: of the hidden family ("spans"), or the fingerprint.
    """
    n_rows, hidden = len(lengths), {"spans": fields.pop("hidden_spans", "all")}
    families = {
        name: Family(
            shape=x.shape[1:],
            by_layer=name == "hidden",
            dtype="float32",
            **(hidden if name == "hidden" else {}),
        )
        for name, x in values.items()
    }
    spec = StoreSpec(
        families=families,
        keys=tuple((f"q{i}", setting, "original") for i in range(n_rows)),
        lengths=np.asarray(lengths, np.int64),
        spans=np.broadcast_to(spans, (n_rows, 3, 2)).astype(np.int64),
        rows_per_shard=64,
        hidden_layers=tuple(layers),
        fingerprint=fields,
    )
    store = create_store(f"memory://planted-{next(_NUMBERS)}", spec)
    for range_id in range(spec.n_ranges):
        rows = {name: slice(*spec.range_rows(range_id, name)) for name in values}
        write_range(store, range_id, {name: values[name][rows[name]] for name in rows})
    return store


def store_of(labels, rng):
    """Hidden states of which layer 2 tells, and surprisals that do."""
    length = N_PROMPT + N_TOLD
    shape = (len(labels), length)
    hidden = rng.standard_normal((*shape, N_LAYERS, D)).astype(np.float32)
    hidden[:, :, LAYER, 0] += 3 * labels[:, None]
    prob = rng.random((*shape, 5)).astype(np.float32)
    prob[:, :, 1] += 2 * ~labels[:, None]
    return memory_store(
        {"hidden": hidden.reshape(-1, N_LAYERS, D), "prob": prob.reshape(-1, 5)},
        np.full(len(labels), length),
        [(0, 0), (0, N_PROMPT - 1), (N_PROMPT - 1, length)],
        layers=range(N_LAYERS),
        answer_span="emitting",
    )


def samples_of(i, is_right, rng):
    """Draws that repeat the answer where it is right, and all differ where not."""
    texts = [f"told {i}"] * N_SAMPLES
    if not is_right:
        texts = [f"other {i} {rng.integers(10**6)}" for _ in range(N_SAMPLES)]
    return [
        a_sample(
            text,
            example_id=f"q{i}",
            setting=SETTING,
            sample=number,
            token_ids=(7, 8),
            log_probs=tuple(-rng.random(3)),
        )
        for number, text in enumerate(texts)
    ]


def inputs(seed=0, strength=3.0):
    """Return inputs with context, of 150 rows, a third each of three splits."""
    rng = np.random.default_rng(seed)
    labels = rng.random(N) < 0.5
    splits = np.array(["train", "validation", "test"])[np.arange(N) % 3]
    words = np.where(labels, "clear", "vague")
    examples = [
        an_example(
            id=f"q{i}",
            split=splits[i],
            question=f"{words[i]} word{i}?",
            passages=(Passage(title="t", text="A page."),),
        )
        for i in range(N)
    ]
    answers = [
        an_answer(
            example_id=f"q{i}",
            setting=SETTING,
            text=f"told {i}",
            prompt_ids=(1,) * N_PROMPT,
            token_ids=(2,) * N_TOLD,
        )
        for i in range(N)
    ]
    drawn = [one for i in range(N) for one in samples_of(i, labels[i], rng)]
    rows = rows_of(labels, SETTING, splits)

    def relations(pairs):
        same = np.array([a.split()[-2:] == b.split()[-2:] for a, b in pairs])
        return np.where(same[:, None], (0.9, 0.08, 0.02), (0.02, 0.08, 0.9))

    return DetectorInput.of(
        store_of(labels, rng),
        rows,
        layer=LAYER,
        questions=examples,
        answers=answers,
        samples=drawn,
        template=PromptConfig().prompt_template(),
        readings=readings(labels, rng, strength),
        relations=relations,
    )
