"""Every reading of its own, by loops over the eager model's outputs."""

import math

import numpy as np
import torch

from tests.extract.readings import gnosis_loops


class Eager:
    """One answer through the untouched model, everything kept."""

    def __init__(self, model, ids):
        self.model, layers = model, model.model.layers
        self.mid, self.ffn, self.last = [], [], []
        is_gemma = hasattr(layers[0], "pre_feedforward_layernorm")
        handles = [
            model.model.norm.register_forward_pre_hook(
                lambda _, inputs: self.last.append(inputs[0][0])
            )
        ]
        for layer in layers:
            before = "pre_feedforward" if is_gemma else "post_attention"
            norm = getattr(layer, f"{before}_layernorm")
            behind = layer.post_feedforward_layernorm if is_gemma else layer.mlp
            handles.append(
                norm.register_forward_pre_hook(
                    lambda _, inputs: self.mid.append(inputs[0][0])
                )
            )
            handles.append(
                behind.register_forward_hook(
                    lambda _, inputs, output: self.ffn.append(output[0])
                )
            )
        kinds = {"output_attentions": True, "output_hidden_states": True}
        output = model(torch.tensor([ids]), use_cache=False, **kinds)
        for handle in handles:
            handle.remove()
        self.states = [state[0] for state in output.hidden_states]
        self.maps = [one[0].double() for one in output.attentions]
        self.logits = output.logits[0].double()

    def lens(self, state):
        return self.model.lm_head(self.model.model.norm(state)).double()

    @property
    def unnormed(self):
        return [*self.states[1:-1], self.last[0]]


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
    for one in (p, q):
        a, b = (m, one) if is_swapped else (one, m)
        total += 0.5 * float((a * (a.log() - b.log())).sum())
    return total


def mmd(p, q, embeddings):
    unit = embeddings / embeddings.norm(dim=-1, keepdim=True)
    kernel = (1 + unit @ unit.T) / 2
    return float(p @ kernel @ p + q @ kernel @ q - 2 * p @ kernel @ q)


def expected(model, answer, swapped, n_cue):
    """Return every reading, by loops over what the eager model puts out."""
    p, n_told = len(answer.prompt_ids), len(answer.token_ids)
    ids = answer.prompt_ids + answer.token_ids
    seen = Eager(model, ids)
    before, told = range(p - 1, p + n_told - 1), range(p, p + n_told)
    n_words = seen.logits.shape[-1]
    found = {}
    for name, rows in (("", told), ("_all", range(len(ids)))):
        found[f"llmcheck_hidden{name}"] = [
            log_gram(state[list(rows)]) for state in seen.states[1:]
        ]
        found[f"llmcheck_attention{name}"] = [
            sum(np.mean([math.log(h[t, t]) for t in rows]) for h in heads)
            for heads in seen.maps
        ]
    for name, rows in (("", told), ("_corrected", before)):
        found[f"window_entropy{name}"] = max(
            entropy(seen.logits[t]) / n_words for t in rows
        )
        tops = [seen.logits[t].sort(descending=True).values[:50] for t in rows]
        found[f"logit_entropy{name}"] = np.mean([entropy(top) / 50 for top in tops])
    c = p - n_cue
    steps = range(p - 1, len(ids) - (answer.stop_id is None))
    found["lookback"] = np.zeros((len(seen.maps), len(seen.maps[0])))
    found["redeep_ecs"] = np.zeros_like(found["lookback"])
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
            found["lookback"][layer, head] = np.mean(ratios)
            found["redeep_ecs"][layer, head] = np.mean(cosines)
    for name, is_swapped in (("redeep_pks", False), ("redeep_pks_swapped", True)):
        found[name] = []
        for mid, post in zip(seen.mid, seen.unnormed, strict=True):
            pairs = [[seen.lens(h[n]).softmax(-1) for h in (mid, post)] for n in before]
            found[name].append(np.mean([shannon(a, b, is_swapped) for a, b in pairs]))
    for name, states in (
        ("lumina_ipr", seen.states[1:]),
        ("lumina_ipr_inner", seen.states[1:-1]),
    ):
        rates = []
        for n in before:
            own = seen.logits[n].softmax(-1)
            best = int(own.argmax())
            late = weight = 0.0
            for number, state in enumerate(states, start=1):
                lens = seen.lens(state[n])
                late += number * (1 - min(float(lens.softmax(-1)[best] / own[best]), 1))
                weight += number / (entropy(lens) + 1e-8)
            rates.append(late / weight * float(own[ids[n + 1]] / own[best]))
        found[name] = np.mean(rates)
    found["lumina_mmd"] = math.nan
    if swapped is not None:
        other = Eager(model, swapped + answer.token_ids).logits
        table = model.get_input_embeddings().weight.double()
        values = [
            mmd(
                seen.logits[p - 1 + t].softmax(-1),
                other[len(swapped) - 1 + t].softmax(-1),
                table,
            )
            for t in range(n_told)
        ]
        found["lumina_mmd"] = np.mean(values)
    found["gnosis_maps"] = gnosis_loops.maps(seen.maps)
    found["gnosis_states"] = gnosis_loops.trace(seen.states[-1][p - 1 :])
    found["mlp_exact_answer"] = [part[len(ids) - 1].numpy() for part in seen.ffn]
    return found
