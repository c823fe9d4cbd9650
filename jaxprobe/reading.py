"""From token rows to padded spans: what the encoders read, out of the store.

Signals lie on disk as ragged rows; an encoder reads every span padded to one length.
Closed-book there are two spans, with context three; the answer is the last.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from extract.records import Setting
from extract.store import FeatureStore, read_family
from jaxprobe.features import FAMILIES, FamilyDims, Features

SPANS: dict[Setting, tuple[int, ...]] = {
    "closed_book": (1, 2),
    "with_context": (0, 1, 2),
}


def family_dims(shapes: Mapping[str, tuple[int, ...]]) -> FamilyDims:
    """Return the channels of each family; of `hidden`, those of one layer.

    Args:
      shapes: family to the axes behind the row axis, as in the store.
    """
    hidden = {"hidden": shapes["hidden"][1:]}
    sizes = {name: int(np.prod({**shapes, **hidden}[name])) for name in FAMILIES}
    return FamilyDims(**sizes)


def pad_span(
    rows: np.ndarray, starts: np.ndarray, spans: np.ndarray, n_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut one span out of ragged rows and pad it on the right with zeros.

    Args:
      rows: `[n_rows, d_total]`.
      starts: `[n_examples]`, first row of each example.
      spans: `[n_examples, 2]`, `[start, stop)` inside the example.
      n_tokens: padded length; no span is longer.

    Returns:
      `[n_examples, n_tokens, d_total]` float32 and its mask `[n_examples, n_tokens]`.

    Raises:
      ValueError: a span is longer than `n_tokens`; nothing is cut.
    """
    lengths = spans[:, 1] - spans[:, 0]
    if lengths.max(initial=0) > n_tokens:
        raise ValueError(
            f"a span has {lengths.max()} tokens, expected at most {n_tokens}; "
            "pad to a larger length"
        )
    mask = np.arange(n_tokens)[None, :] < lengths[:, None]
    first = starts + spans[:, 0]
    index = np.where(mask, first[:, None] + np.arange(n_tokens)[None, :], 0)
    tokens = rows[index].astype(np.float32, copy=False)
    tokens[~mask] = 0.0
    return tokens, mask


def longest_spans(spans: np.ndarray, setting: Setting) -> tuple[int, ...]:
    """Return the padded length of each span of a setting, at least one token."""
    lengths = spans[:, :, 1] - spans[:, :, 0]
    return tuple(max(1, int(lengths[:, s].max())) for s in SPANS[setting])


def assemble(
    families: Mapping[str, np.ndarray],
    starts: np.ndarray,
    spans: np.ndarray,
    setting: Setting,
    n_tokens: Sequence[int] | None = None,
) -> Features:
    """Lay the families side by side and pad the spans.

    Args:
      families: by name `[n_rows, ...]`; `hidden` of one layer.
      starts: `[n_examples]`, first row of each example.
      spans: `[n_examples, 3, 2]`, see the glossary in `extract/store.py`.
      setting: decides which spans are read.
      n_tokens: padded length per span; None takes the longest of each.
    """
    n_rows = len(families["prob"])
    rows = np.concatenate(
        [
            np.asarray(families[name]).reshape(n_rows, -1).astype(np.float32)
            for name in FAMILIES
        ],
        axis=1,
    )
    widths = longest_spans(spans, setting) if n_tokens is None else tuple(n_tokens)
    padded = [
        pad_span(rows, starts, spans[:, s], width)
        for s, width in zip(SPANS[setting], widths, strict=True)
    ]
    tokens, masks = zip(*padded, strict=True)
    return Features(tokens, masks)


def read_features(
    store: FeatureStore,
    setting: Setting,
    layer: int,
    examples: np.ndarray | None = None,
    n_tokens: Sequence[int] | None = None,
) -> Features:
    """Read the signals of stored examples as the encoders read them.

    Args:
      store: an extracted setting.
      setting: decides which spans are read.
      layer: entry of the resid axis for the hidden family (0 is the embedding).
      examples: `[n]` indices into the store, or None for all.
      n_tokens: padded length per span; None takes the longest of each.

    Raises:
      ValueError: a range is not extracted or damaged.
    """
    families = {}
    for name in FAMILIES:
        ragged = read_family(
            store, name, examples, layer=layer if name == "hidden" else None
        )
        families[name] = ragged.values
    spans = store.spec.spans if examples is None else store.spec.spans[examples]
    return assemble(families, ragged.starts, spans, setting, n_tokens)


def mean_answer_states(
    store: FeatureStore, examples: np.ndarray | None = None, layer: int = 0
) -> np.ndarray:
    """Return the mean hidden state over the answer span, for the layer sweep.

    Args:
      store: an extracted setting.
      examples: `[n]` indices into the store, or None for all.
      layer: entry of the resid axis (0 is the embedding).

    Returns:
      `[n_examples, d_model]` float32.
    """
    ragged = read_family(store, "hidden", examples, layer=layer)
    spans = store.spec.spans if examples is None else store.spec.spans[examples]
    bounds = ragged.starts[:, None] + spans[:, 2]
    total = np.cumsum(ragged.values.astype(np.float64), axis=0)
    total = np.concatenate([np.zeros((1, total.shape[1])), total])
    lengths = np.maximum(1, bounds[:, 1] - bounds[:, 0])
    sums = total[bounds[:, 1]] - total[bounds[:, 0]]
    return (sums / lengths[:, None]).astype(np.float32)
