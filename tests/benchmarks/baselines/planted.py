"""Small inputs in which every detector of the catalogue finds what was planted."""

import numpy as np

from beatrice.benchmarks.baselines.detector import DetectorInput
from beatrice.extract.generate.requests import PromptConfig
from beatrice.extract.records import Answer, Example, Passage, Sample
from beatrice.extract.store.families import Family
from beatrice.extract.store.spec import StoreSpec
from beatrice.extract.store.store import create_store, write_range
from tests.benchmarks.rows import rows_of

N, D, N_LAYERS, N_HEADS, N_SAMPLES, N_PROMPT, N_TOLD = 150, 6, 5, 3, 4, 3, 3
SETTING, LAYER = "with_context", 2  # of which hidden states tell, 0 the embedding
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


def readings(labels, rng):
    """Noise, and the label at layer 2 where there are layers."""
    found = {}
    for name, shape in SHAPES.items():
        values = rng.standard_normal((len(labels), *shape)).astype(np.float32)
        told = values[:, LAYER] if shape else values
        sign = 1 if name in UP else -1
        told += 3 * sign * labels.reshape(-1, *[1] * (told.ndim - 1))
        found[name] = values
    # The states of draws that mean the same lie together.
    spread = np.where(labels, 0.1, 2.0)[:, None, None]
    states = rng.standard_normal((len(labels), N_SAMPLES, D)) * spread
    return {**found, "sample_states": states.astype(np.float32)}


def store_of(labels, rng, name):
    """Hidden states of which layer 2 tells, and surprisals that do."""
    length = N_PROMPT + N_TOLD
    shape = (len(labels), length)
    hidden = rng.standard_normal((*shape, N_LAYERS, D)).astype(np.float32)
    hidden[:, :, LAYER, 0] += 3 * labels[:, None]
    prob = rng.random((*shape, 5)).astype(np.float32)
    prob[:, :, 1] += 2 * ~labels[:, None]
    span = [(0, 0), (0, N_PROMPT - 1), (N_PROMPT - 1, length)]
    spec = StoreSpec(
        families={
            "hidden": Family(shape=(N_LAYERS, D), by_layer=True, dtype="float32"),
            "prob": Family(shape=(5,), dtype="float32"),
        },
        keys=tuple((f"q{i}", SETTING, "original") for i in range(len(labels))),
        lengths=np.full(len(labels), length),
        spans=np.array([span] * len(labels)),
        rows_per_shard=64,
        hidden_layers=tuple(range(N_LAYERS)),
        fingerprint={"answer_span": "emitting"},
    )
    store = create_store(f"memory://{name}", spec)
    flat = {"hidden": hidden.reshape(-1, N_LAYERS, D), "prob": prob.reshape(-1, 5)}
    for range_id in range(spec.n_ranges):
        parts = {
            family: values[slice(*spec.range_rows(range_id, family))]
            for family, values in flat.items()
        }
        write_range(store, range_id, parts)
    return store


def samples_of(i, is_right, rng):
    """Draws that repeat the answer where it is right, and all differ where not."""
    texts = [f"told {i}"] * N_SAMPLES
    if not is_right:
        texts = [f"other {i} {rng.integers(10**6)}" for _ in range(N_SAMPLES)]
    return [
        Sample(
            example_id=f"q{i}",
            setting=SETTING,
            variant="original",
            sample=number,
            text=text,
            token_ids=(7, 8),
            stop_id=0,
            log_probs=tuple(-rng.random(3)),
            finish="stop",
        )
        for number, text in enumerate(texts)
    ]


def inputs(seed=0):
    """Return inputs with context, of 150 rows, a third each of three splits."""
    rng = np.random.default_rng(seed)
    labels = rng.random(N) < 0.5
    splits = np.array(["train", "validation", "test"])[np.arange(N) % 3]
    words = np.where(labels, "clear", "vague")
    examples = [
        Example(
            id=f"q{i}",
            dataset="d",
            split=splits[i],
            question=f"{words[i]} word{i}?",
            golds=("g",),
            passages=(Passage(title="t", text="A page."),),
        )
        for i in range(N)
    ]
    answers = [
        Answer(
            example_id=f"q{i}",
            setting=SETTING,
            variant="original",
            text=f"told {i}",
            prompt_ids=(1,) * N_PROMPT,
            token_ids=(2,) * N_TOLD,
            stop_id=3,
            context_span=(0, 0),
        )
        for i in range(N)
    ]
    drawn = [one for i in range(N) for one in samples_of(i, labels[i], rng)]
    rows = rows_of(labels, SETTING, splits)

    def relations(pairs):
        same = np.array([a.split()[-2:] == b.split()[-2:] for a, b in pairs])
        return np.where(same[:, None], (0.9, 0.08, 0.02), (0.02, 0.08, 0.9))

    return DetectorInput.of(
        store_of(labels, rng, f"planted-{seed}"),
        rows,
        layer=LAYER,
        questions=examples,
        answers=answers,
        samples=drawn,
        template=PromptConfig().prompt_template(),
        readings=readings(labels, rng),
        relations=relations,
    )
