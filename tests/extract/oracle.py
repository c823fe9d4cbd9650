"""The signals once more, by brute force and through other taps.

One unpadded example at a time. Attention maps come from Transformers' eager path,
states from `output_hidden_states`, probabilities from the full vocabulary; the state
between attention and feed-forward is caught where the next module reads it, so that
contributions are differences of states; the final norm is the model's own module.
Everything after the model is a float64 loop over single numbers.
"""

import copy
import math

import numpy as np
import torch

# The module that reads the state between attention and feed-forward.
_READERS = ("pre_feedforward_layernorm", "ln_2", "post_attention_layernorm")


def eager_copy(model):
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def decoder_parts(model):
    """The layers and the final norm."""
    body = model.base_model
    layers = body.h if hasattr(body, "h") else body.layers
    for name in ("norm", "final_layer_norm", "ln_f"):
        if hasattr(body, name):
            return layers, getattr(body, name)
    raise AssertionError("no final norm")


def middle_reader(layer):
    """The module whose input is h_in + att, or None in a parallel block."""
    if getattr(layer, "use_parallel_residual", False):
        return None
    if "Olmo2" in type(layer).__name__:
        return layer.mlp
    return next(getattr(layer, name) for name in _READERS if hasattr(layer, name))


@torch.no_grad()
def run_model(model, ids):
    """Run the eager model; return logits, states, middles and attention maps."""
    layers, norm = decoder_parts(model)
    middles = [None] * len(layers)
    last = []

    def catch(index):
        def hook(module, args):
            if middles[index] is None:
                middles[index] = args[0][0].clone()

        return hook

    handles = [norm.register_forward_pre_hook(lambda m, a: last.append(a[0][0]))]
    for index, layer in enumerate(layers):
        if middle_reader(layer) is not None:
            reader = middle_reader(layer)
            handles.append(reader.register_forward_pre_hook(catch(index)))
    output = model(
        input_ids=torch.from_numpy(ids)[None],
        output_hidden_states=True,
        output_attentions=True,
        use_cache=False,
    )
    for handle in handles:
        handle.remove()
    # The last of Transformers' hidden states is normed already.
    states = [state[0] for state in output.hidden_states[:-1]] + [last[0]]
    for index, layer in enumerate(layers):
        if middles[index] is None:
            fed = layer.mlp(layer.post_attention_layernorm(states[index]))
            middles[index] = states[index + 1] - fed
    maps = [layer_map[0].double().numpy() for layer_map in output.attentions]
    return output.logits[0].double().numpy(), states, middles, maps


def prob_scalars(logits, target):
    peak = max(logits)
    exponentials = [math.exp(value - peak) for value in logits]
    total = sum(exponentials)
    p = [value / total for value in exponentials]
    first, second = sorted(p, reverse=True)[:2]
    entropy = -sum(value * math.log(value) for value in p if value > 0)
    return [p[target], -math.log(p[target]), entropy, first, first - second]


def entropy_and_mass(weights):
    mass = sum(weights)
    if mass == 0:
        return 0.0, 0.0
    shares = [weight / mass for weight in weights if weight > 0]
    return -sum(share * math.log(share) for share in shares), mass


def attention_reading(attention_map, spans, position):
    """`[2 partners][entropy, mass]` of one token in one head."""
    own = [i for i, (a, b) in enumerate(spans) if a <= position < b]
    if not own:
        return [(0.0, 0.0), (0.0, 0.0)]
    readings = []
    for partner in [i for i in range(3) if i != own[0]]:
        tokens = range(*spans[partner])
        if partner < own[0]:
            weights = [attention_map[position, key] for key in tokens]
        else:
            weights = [attention_map[query, position] for query in tokens]
        readings.append(entropy_and_mass(weights))
    return readings


@torch.no_grad()
def resid_scalars(model, states, middles, targets):
    layers, norm = decoder_parts(model)
    words = model.get_output_embeddings().weight.double()[torch.from_numpy(targets)]

    def lens(state):
        return (norm(state.float()).double() * words).sum(-1)

    columns = []
    for index, layer in enumerate(layers):
        before = states[index].double()
        middle = middles[index].double()
        scale = getattr(layer, "layer_scalar", torch.ones(1)).double()
        after = states[index + 1].double() / scale
        columns += [
            (middle - before).norm(dim=-1),
            lens(middle) - lens(before),
            (after - middle).norm(dim=-1),
            lens(after) - lens(middle),
        ]
    return torch.stack(columns, dim=-1).numpy()


def oracle_signals(model, sequence):
    """Signals of one sequence as a dict of float64 arrays, from an eager model."""
    n_tokens = len(sequence.ids)
    spans = [tuple(map(int, span)) for span in sequence.spans]
    logits, states, middles, maps = run_model(model, sequence.ids)
    n_heads = maps[0].shape[0]
    attn = np.zeros((n_tokens, 2, 2, len(maps), n_heads))
    for layer, layer_map in enumerate(maps):
        for head in range(n_heads):
            for t in range(n_tokens):
                attn[t, :, :, layer, head] = attention_reading(
                    layer_map[head], spans, t
                )
    return {
        "hidden": torch.stack(states, dim=1).double().numpy(),
        "prob": np.array(
            [
                prob_scalars(row, target)
                for row, target in zip(logits, sequence.targets, strict=True)
            ]
        ),
        "resid": resid_scalars(model, states, middles, sequence.targets),
        "attn": attn,
    }
