"""Every reading, by loops over the eager model's outputs."""

import math

import numpy as np
import torch

from beatrice.benchmarks.bench.oracle import run_model
from beatrice.extract.readings.formulas import map_statistics


class Eager:
    """All outputs of the untouched model for one answer."""

    def __init__(self, model, ids):
        run, self.model = run_model(model, np.array(ids)), model
        self.logits, self.maps = torch.from_numpy(run.logits), run.maps
        attended, self.ffn = zip(*run.contributions, strict=True)
        before, self.unnormed = run.states[:-1], run.states[1:]
        self.mid = [(h + att).float() for h, att in zip(before, attended, strict=True)]
        self.states = [*before, model.model.norm(run.states[-1])]

    def lens(self, state):
        return self.model.lm_head(self.model.model.norm(state)).double()


def entropy(logits):
    p = logits.double().softmax(-1).numpy()
    return float(-sum(x * math.log(x) for x in p if x > 0))


def log_gram(states):
    rows = states.double().numpy()
    rows = rows - rows.mean(1, keepdims=True)
    gram = rows @ rows.T + 1e-3 * np.eye(len(rows))
    return np.log(np.linalg.svd(gram, compute_uv=False)).mean()


def shannon(p, q, is_swapped):
    total, m = 0.0, (p + q) / 2
    for item in (p, q):
        a, b = (m, item) if is_swapped else (item, m)
        total += 0.5 * float((a * (a.log() - b.log())).sum())
    return total


def mmd(p, q, embeddings):
    unit = embeddings / embeddings.norm(dim=-1, keepdim=True)
    kernel = (1 + unit @ unit.T) / 2
    return float(p @ kernel @ p + q @ kernel @ q - 2 * p @ kernel @ q)


def expected(model, answer, swapped, n_cue):
    """Return every reading, by loops over the eager model's outputs."""
    p, n_answer = len(answer.prompt_ids), len(answer.token_ids)
    ids = answer.prompt_ids + answer.token_ids
    seen = Eager(model, ids)
    before, within = range(p - 1, p + n_answer - 1), range(p, p + n_answer)
    n_words = seen.logits.shape[-1]
    result = {}
    for name, rows in (("", within), ("_all", range(len(ids)))):
        result[f"llmcheck_hidden{name}"] = [
            log_gram(state[list(rows)]) for state in seen.states[1:]
        ]
        result[f"llmcheck_attention{name}"] = [
            sum(np.mean([math.log(h[t, t]) for t in rows]) for h in heads)
            for heads in seen.maps
        ]
    for name, rows in (("", within), ("_corrected", before)):
        result[f"window_entropy{name}"] = max(
            entropy(seen.logits[t]) / n_words for t in rows
        )
        tops = [seen.logits[t].sort(descending=True).values[:50] for t in rows]
        result[f"logit_entropy{name}"] = np.mean([entropy(top) / 50 for top in tops])
    steps = range(p - 1, len(ids) - (answer.stop_id is None))
    result |= of_attention(seen, p, p - n_cue, steps, before)
    for name, is_swapped in (("redeep_pks", False), ("redeep_pks_swapped", True)):
        result[name] = []
        for mid, post in zip(seen.mid, seen.unnormed, strict=True):
            pairs = [[seen.lens(h[n]).softmax(-1) for h in (mid, post)] for n in before]
            result[name].append(np.mean([shannon(a, b, is_swapped) for a, b in pairs]))
    result["lumina_ipr"] = lumina_rate(seen, ids, before, seen.states[1:])
    result["lumina_ipr_inner"] = lumina_rate(seen, ids, before, seen.states[1:-1])
    result["lumina_mmd"] = math.nan
    if swapped is not None:
        other = Eager(model, swapped + answer.token_ids).logits
        table = model.get_input_embeddings().weight.double()
        pairs = zip(seen.logits[p - 1 :], other[len(swapped) - 1 :], strict=True)
        distributions = [[logits.softmax(-1) for logits in pair] for pair in pairs]
        result["lumina_mmd"] = np.mean(
            [mmd(*x, table) for x in distributions[:n_answer]]
        )
    result["gnosis_maps"] = gnosis_maps(seen.maps)
    result["gnosis_states"] = gnosis_trace(seen.states[-1][p - 1 :])
    result["mlp_exact_answer"] = [out[len(ids) - 1].numpy() for out in seen.ffn]
    return result


def of_attention(seen, p, c, steps, before):
    """Return Lookback Lens's ratios and ReDeEP's ECS, a cell per head."""
    lookback = np.zeros((len(seen.maps), len(seen.maps[0])))
    ecs = np.zeros_like(lookback)
    for layer, heads in enumerate(seen.maps):
        for head, weights in enumerate(heads):
            ratios, cosines = [], []
            for n in steps:
                a, b = weights[n, :c].mean(), weights[n, c : n + 1].mean()
                ratios.append(float(a / (a + b)))
            for n in before:
                most = sorted(range(p), key=lambda j: -float(weights[n, j]))
                most = [j for j in most[: max(1, p // 10)] if weights[n, j] > 0]
                mean = seen.states[-1][most].mean(0)
                if most:
                    cosine = torch.cosine_similarity(mean, seen.states[-1][n], dim=0)
                    cosines.append(float(cosine))
            lookback[layer, head] = np.mean(ratios)
            ecs[layer, head] = np.mean(cosines)
    return {"lookback": lookback, "redeep_ecs": ecs}


def lumina_rate(seen, ids, before, states):
    """Return LUMINA's information processing rate over some states."""
    rates = []
    for n in before:
        last = seen.logits[n].softmax(-1)
        best = int(last.argmax())
        late = weight = 0.0
        for number, state in enumerate(states, start=1):
            lens = seen.lens(state[n])
            late += number * (1 - min(float(lens.softmax(-1)[best] / last[best]), 1))
            weight += number / (entropy(lens) + 1e-8)
        rates.append(late / weight * float(last[ids[n + 1]] / last[best]))
    return np.mean(rates)


def cells(weights, n):
    """Average a map over n by n cells, entry by entry."""
    size = len(weights)

    def tokens(i):
        return range(i * size // n, math.ceil((i + 1) * size / n))

    every = range(n)
    return np.array(
        [[weights[np.ix_(tokens(i), tokens(j))].mean() for j in every] for i in every]
    )


def gnosis_maps(attentions, n=32):
    """`[n_layers, n_heads, 23]` of the maps of one sequence."""
    maps = [[cells(h, n) for h in heads] for heads in attentions]
    return [[map_statistics(torch.from_numpy(x)).numpy() for x in row] for row in maps]


def gnosis_trace(states, n=8):
    """`[n, d_model]`: means of standardised states `[n_tokens, d_model]`."""
    rows = [(x - x.mean()) / math.sqrt(x.var() + 1e-5) for x in states.numpy()]
    size = len(rows)
    return [
        np.mean(rows[i * size // n : math.ceil((i + 1) * size / n)], axis=0)
        for i in range(n)
    ]
