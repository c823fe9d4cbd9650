"""Small inputs: with a signal for every detector to find, and with a few draws."""

import itertools

import msgspec
import numpy as np

from beatrice.benchmarks.baselines.detector import Baseline, DetectorInput
from beatrice.extract.generate.templates import PromptConfig
from beatrice.extract.records import Passage
from beatrice.extract.store.spec import Family
from tests.jaxprobe.samples import rows_of, store_like
from tests.records import a_sample, an_answer, an_example

N, D, N_LAYERS, N_HEADS, N_SAMPLES, N_PROMPT, N_ANSWER = 150, 6, 5, 3, 4, 3, 3
SETTING, LAYER = "with_context", 2  # the layer with the signal; 0 is the embedding
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
    """Return noise to which the label is added, at layer 2 if there are layers."""
    arrays = {}
    for name, shape in SHAPES.items():
        values = rng.standard_normal((len(labels), *shape)).astype(np.float32)
        signal = values[:, LAYER] if shape else values
        sign = 1 if name in UP else -1
        signal += strength * sign * labels.reshape(-1, *[1] * (signal.ndim - 1))
        arrays[name] = values
    # The states of draws that mean the same lie together.
    spread = np.where(labels, 0.1, 2.0)[:, None, None]
    states = rng.standard_normal((len(labels), N_SAMPLES, D)) * spread
    return {**arrays, "sample_states": states.astype(np.float32)}


def memory_store(values, lengths, spans, *, layers=(), setting=SETTING, **fields):
    """Return a store in memory of concatenated values by family, `[n_tokens, ...]`.

    Args:
      values: by family; those of "hidden" have a layer axis after the tokens.
      lengths: `[n_rows]` tokens.
      spans: `[n_rows, 3, 2]` or, the same for all rows, `[3, 2]`.
      layers: of the hidden states.
      setting: of the answers.
      fields: `hidden_spans` of the hidden family; all others are the fingerprint.
    """
    hidden = {"by_layer": True, "spans": fields.pop("hidden_spans", "all")}
    families = {}
    for name, x in values.items():
        options = hidden if name == "hidden" else {}
        families[name] = Family(shape=x.shape[1:], dtype="float32", **options)
    n_rows = len(lengths)
    return store_like(
        f"memory://planted-{next(_NUMBERS)}",
        families,
        np.broadcast_to(spans, (n_rows, 3, 2)),
        values,
        keys=tuple((f"q{i}", setting, "original") for i in range(n_rows)),
        lengths=np.asarray(lengths, np.int64),
        rows_per_shard=64,
        hidden_layers=tuple(layers),
        fingerprint=fields,
    )


def store_of(labels, rng):
    """Return a store whose layer 2 and whose surprisals depend on the label."""
    length = N_PROMPT + N_ANSWER
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
    """Return draws that all repeat a right answer, or all differ if it is wrong."""
    texts = [f"told {i}"] * N_SAMPLES
    if not is_right:
        texts = [f"other {i} {rng.integers(10**6)}" for _ in range(N_SAMPLES)]
    about = dict(example_id=f"q{i}", setting=SETTING, token_ids=(7, 8))
    return [
        a_sample(text, sample=number, log_probs=tuple(-rng.random(3)), **about)
        for number, text in enumerate(texts)
    ]


def inputs(seed=0, strength=3.0):
    """Return inputs with context, of 150 rows, a third each of three splits."""
    rng = np.random.default_rng(seed)
    labels = rng.random(N) < 0.5
    splits = np.array(["train", "validation", "test"])[np.arange(N) % 3]
    passages = (Passage(title="t", text="A page."),)
    ids = dict(prompt_ids=(1,) * N_PROMPT, token_ids=(2,) * N_ANSWER)
    examples, answers, drawn = [], [], []
    for i in range(N):
        question = f"{'clear' if labels[i] else 'vague'} word{i}?"
        fields = dict(split=splits[i], question=question, passages=passages)
        examples.append(an_example(id=f"q{i}", **fields))
        fields = dict(setting=SETTING, text=f"told {i}", **ids)
        answers.append(an_answer(example_id=f"q{i}", **fields))
        drawn += samples_of(i, labels[i], rng)
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


def drawn_inputs(drawn, answers=None, labels=None, splits=None, **fields):
    """Return inputs with a row for each list of texts or samples in `drawn`."""
    n = len(drawn)
    splits = ["train", *["test"] * (n - 1)] if splits is None else splits
    examples = [
        an_example(id=f"q{i}", split=splits[i], question=f"Q{i}?") for i in range(n)
    ]
    texts = answers or ["Paris."] * n
    written = [an_answer(example_id=f"q{i}", text=texts[i]) for i in range(n)]
    samples = []
    for i, row in enumerate(drawn):
        for number, item in enumerate(row):
            item = a_sample(item) if isinstance(item, str) else item
            place = dict(example_id=f"q{i}", sample=number)
            samples.append(msgspec.structs.replace(item, **place))
    labels = np.ones(n, bool) if labels is None else labels
    rows = rows_of(labels, splits=splits)
    return DetectorInput.of(
        None, rows, questions=examples, answers=written, samples=samples, **fields
    )


def relations_by(rule):
    """Return a stand-in for an NLI model: `rule(premise, hypothesis)` gives P(...)."""
    return lambda pairs: np.array([rule(*pair) for pair in pairs]).reshape(-1, 3)


def by_last_word(premise, hypothesis):
    """Return entailment if the last words are equal, else contradiction."""
    is_same = premise.split()[-1:] == hypothesis.split()[-1:]
    return (0.9, 0.08, 0.02) if is_same else (0.02, 0.08, 0.9)


def baseline_of(score, **fields):
    """Return a detector of a user's own."""
    named = {"name": "own", "title": "Own", "source": "here"}
    return Baseline(**named | fields, score=score)


def scores(detector, drawn):
    """Return the scores of the only or first seed."""
    return detector.score(drawn).scores[0]
