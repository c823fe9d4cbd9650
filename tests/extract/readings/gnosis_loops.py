"""What Gnosis reads, by loops over one map and one trace at a time."""

import cmath
import math

import numpy as np


def cells(weights, n):
    """Average a map over n by n cells, entry by entry."""
    size = len(weights)

    def tokens(i):
        return range(i * size // n, math.ceil((i + 1) * size / n))

    return np.array(
        [
            [np.mean([weights[r, c] for r in tokens(i) for c in tokens(j)])]
            for i in range(n)
            for j in range(n)
        ]
    ).reshape(n, n)


def entropy(values):
    return -sum(x * math.log(x) for x in values)


def statistics(a):
    """The 23 numbers of one map, from their definitions."""
    n = len(a)
    places = [(i, j) for i in range(n) for j in range(n)]
    wave = np.array(
        [[cmath.exp(-2j * math.pi * u * x / n) for x in range(n)] for u in range(n)]
    )
    power = np.abs(wave @ a @ wave.T)[:, : n // 2 + 1] ** 2 + 1e-12
    share = power / power.sum()
    bands = [0.0] * 4
    for u in range(n):
        for v in range(n // 2 + 1):
            radius = math.hypot(u / (n - 1) - 0.5, v / n) / math.sqrt(0.5)
            bands[sum(radius > edge for edge in (0.15, 0.35, 0.6))] += share[u, v]
    lines = []
    for one in (a, a.T):
        own = [[max(x / (row.sum() + 1e-8), 1e-8) for x in row] for row in one]
        lines.append(np.mean([entropy(row) for row in own]))
    near = [
        sum(a[i, j] for i, j in places if abs(i - j) <= width)
        for width in (0, n // 32, n // 16)
    ]
    whole = a.sum()
    at = [k / (n - 1) for k in range(n)]
    mean = [sum(a[p] * at[p[axis]] for p in places) / whole for axis in (0, 1)]
    apart = {p: [at[p[axis]] - mean[axis] for axis in (0, 1)] for p in places}
    spread = [
        sum(a[p] * apart[p][axis] ** 2 for p in places) / whole for axis in (0, 1)
    ]
    covariance = sum(a[p] * apart[p][0] * apart[p][1] for p in places) / whole
    p = np.maximum(a, 1e-12) / np.maximum(a, 1e-12).sum()
    joint, down, across = entropy(p.ravel()), entropy(p.sum(1)), entropy(p.sum(0))
    return [
        entropy(share.ravel()),
        *bands,
        np.var(a.sum(1)),
        np.var(a.sum(0)),
        *lines,
        *(x / (whole + 1e-6) for x in near),
        whole - near[0],
        *mean,
        *spread,
        covariance,
        abs(spread[0] - spread[1]) / sum(spread),
        joint / math.log(n * n),
        down / math.log(n),
        across / math.log(n),
        (down + across - joint) / math.log(n),
    ]


def maps(attentions, n=32):
    """`[n_layers, n_heads, 23]` of the maps of one sequence."""
    return [[statistics(cells(h.numpy(), n)) for h in heads] for heads in attentions]


def trace(states, n=8):
    """`[n, d_model]`: means of standardised states `[n_tokens, d_model]`."""
    rows = [(x - x.mean()) / math.sqrt(x.var() + 1e-5) for x in states.numpy()]
    size = len(rows)
    return [
        np.mean(rows[i * size // n : math.ceil((i + 1) * size / n)], axis=0)
        for i in range(n)
    ]
