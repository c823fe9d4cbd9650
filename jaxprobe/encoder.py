"""A combination encoder: maps a subset of the signal families to one logit.

Paper, section 3.3 and appendix B. One module serves all fifteen subsets: a
`[n_families]` mask tells which families are read, and weights start with the scale of
an encoder of only those families.

An encoder may have a linear part, a regression on pooled signals: the mean, minimum and
maximum of each channel over the answer span, and the mean over every other span. It is
in a variable collection of its own, so that no training step changes it.

Modules here take a batch of examples: activations are `[d, n_span_tokens, n_examples]`.
Masks, statistics per example and shifts along the tokens then vary only over outer
axes, so that every element-wise loop runs over examples without a branch, and no
convolution mixes neighbouring examples. With channels innermost a training step took
three times as long.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from beatrice.jaxprobe.config import EncoderConfig, MatmulDtype
from beatrice.jaxprobe.families import FamilyDims
from beatrice.jaxprobe.projection import Draw, project, project_span
from beatrice.jaxprobe.random import RowKeys, dropout
from beatrice.jaxprobe.stored import product, values_of
from beatrice.jaxprobe.tokens import FamilyTokens

N_TAPS = 3  # kernel size of the convolutions within a block
N_JOINED = 4  # output tokens per window on an accelerator
N_WINDOW = N_JOINED + N_TAPS - 1  # input tokens per window


def channel_product(
    weight: jax.Array, x: jax.Array, matmul_dtype: MatmulDtype
) -> jax.Array:
    """Multiply the channels of `[d_in, ...]` by `[d_out, d_in]`: `[d_out, ...]`."""
    y = product(weight, x.reshape(x.shape[0], -1), matmul_dtype)
    return y.reshape(-1, *x.shape[1:])


def materialize(x: jax.Array, flag: jax.Array) -> jax.Array:
    """Return `x`, forcing the compiler to compute it only once.

    XLA's CPU compiler would otherwise compute everything before a shift three times,
    once per shifted copy. A branch that it cannot resolve is the only barrier that
    lasts until fusion: `flag` is True, but that must not be known at compile time.
    """
    return jax.lax.cond(flag, lambda: x, lambda: jnp.zeros_like(x))


def _beside(x: jax.Array) -> jax.Array:
    """Stack tokens and neighbours: `[d, n_tokens, n]` to `[3 * d, n_tokens * n]`."""
    edge = jnp.zeros((x.shape[0], 1, x.shape[2]), x.dtype)
    before = jnp.concatenate([edge, x[:, :-1]], axis=1)
    after = jnp.concatenate([x[:, 1:], edge], axis=1)
    return jnp.concatenate([before, x, after]).reshape(N_TAPS * x.shape[0], -1)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_convolution(
    x: jax.Array, kernel: jax.Array, flag: jax.Array, matmul_dtype: MatmulDtype
) -> jax.Array:
    """Convolve over tokens with kernel size 3, as one matrix product.

    Each gradient is one product as well; autodiff would pad and add instead.

    Args:
      x: `[d_in, n_span_tokens, n_examples]`, zero on padding.
      kernel: `[d_out, 3, d_in]`.
      flag: see `materialize`.
      matmul_dtype: see `jaxprobe.stored`.

    Returns:
      `[d_out, n_span_tokens, n_examples]`.
    """
    return _token_convolution_forward(x, kernel, flag, matmul_dtype)[0]


def _token_convolution_forward(x, kernel, flag, matmul_dtype):
    x = materialize(x, flag)
    y = jax.lax.platform_dependent(
        x,
        kernel,
        cpu=partial(_convolve_on_cpu, matmul_dtype),
        default=partial(convolve_on_accelerator, matmul_dtype),
    )
    return y, (x, kernel, flag)


def _token_convolution_backward(matmul_dtype, residuals, dy):
    d_x, d_kernel = jax.lax.platform_dependent(
        dy,
        *residuals,
        cpu=partial(_cpu_vjp, matmul_dtype),
        default=partial(_accelerator_vjp, matmul_dtype),
    )
    return d_x, d_kernel, np.zeros((), jax.dtypes.float0)


def _convolve_on_cpu(matmul_dtype, x, kernel):
    y = product(kernel.reshape(kernel.shape[0], -1), _beside(x), matmul_dtype)
    return y.reshape(-1, *x.shape[1:])


def _cpu_vjp(matmul_dtype, dy, x, kernel, flag):
    d_out, _, d_in = kernel.shape
    beside = _beside(materialize(dy, flag))
    flipped = kernel[:, ::-1].transpose(2, 1, 0).reshape(d_in, -1)
    d_x = product(flipped, beside, matmul_dtype).reshape(x.shape)
    d_kernel = product(beside, x.reshape(d_in, -1).T, matmul_dtype)
    return d_x, d_kernel.reshape(N_TAPS, d_out, d_in)[::-1].transpose(1, 0, 2)


def convolve_on_accelerator(
    matmul_dtype: MatmulDtype, x: jax.Array, kernel: jax.Array
) -> jax.Array:
    """Compute `token_convolution` on an accelerator, where memory traffic limits it.

    One product computes several tokens from the window that they share. Compared with
    one token at a time, half as many copies of tokens are written and read, for twice
    the operations. On an H100 a step of the paper's grid takes 39 ms, compared with 42
    for one token at a time and 45 for the CPU's method (docs/measurements.md).
    """
    (_, n_tokens, n), d_out = x.shape, len(kernel)
    n_windows = -(-n_tokens // N_JOINED)
    after = n_windows * N_JOINED - n_tokens + 1
    padded = jnp.pad(x, ((0, 0), (1, after), (0, 0)))
    windows = jnp.concatenate(
        [padded[:, i:][:, ::N_JOINED][:, :n_windows] for i in range(N_WINDOW)]
    )
    # The kernel of each output token, padded to the window.
    spread = jnp.pad(kernel, ((0, 0), (N_JOINED - 1,) * 2, (0, 0)))
    taps = [spread[:, i : i + N_WINDOW] for i in reversed(range(N_JOINED))]
    kernels = jnp.concatenate(taps).reshape(N_JOINED * d_out, -1)
    y = product(kernels, windows.reshape(-1, n_windows * n), matmul_dtype)
    y = y.reshape(N_JOINED, d_out, n_windows, n).transpose(1, 2, 0, 3)
    return y.reshape(d_out, -1, n)[:, :n_tokens]


def _accelerator_vjp(matmul_dtype, dy, x, kernel, flag):
    del flag  # unused: the compiler keeps the forward pass's windows anyway
    convolve = partial(convolve_on_accelerator, matmul_dtype)
    return jax.vjp(convolve, x, kernel)[1](dy)


token_convolution.defvjp(_token_convolution_forward, _token_convolution_backward)


def masked_pool(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Return maximum and mean over the real tokens, concatenated; zeros if none is.

    Args:
      x: `[d, n_span_tokens, n_examples]`, zero on padding.
      mask: `[n_span_tokens, n_examples]` float32.

    Returns:
      `[2 * d, n_examples]`.
    """
    count = mask.sum(axis=0)[None]
    highest = jnp.where(mask[None] > 0, x, -jnp.inf).max(axis=1, initial=-1e30)
    highest = jnp.where(count > 0, highest, 0.0)
    mean = x.sum(axis=1) / jnp.maximum(count, 1.0)
    return jnp.concatenate([highest, mean])


COLLECTION = "linear"
Params = Any


def pooled_signals(features: FamilyTokens) -> tuple[jax.Array, ...]:
    """Pool every family of standardised signals over the spans, for linear parts.

    Per family `[n_parts * d_family, n_examples]`: mean, minimum and maximum of the
    answer (the last span), then the mean of each other span; zeros for an empty span.
    """
    return tuple(_pooled(values_of(family), features) for family in features.tokens)


def _pooled(tokens: jax.Array, features: FamilyTokens) -> jax.Array:
    means, extremes = [], []
    for mask, at in zip(features.masks, features.span_slices, strict=True):
        span, is_real = tokens[at], mask[..., None]
        count = jnp.maximum(mask.sum(axis=0, dtype=span.dtype), 1.0)[:, None]
        means.append(jnp.where(is_real, span, 0.0).sum(axis=0) / count)
    answer, is_real = tokens[features.span_slices[-1]], features.masks[-1][..., None]
    is_empty = ~features.masks[-1].any(axis=0)[:, None]
    for sign in (-1.0, 1.0):
        most = jnp.where(is_real, sign * answer, -jnp.inf).max(0, initial=-jnp.inf)
        extremes.append(jnp.where(is_empty, 0.0, sign * most))
    return jnp.concatenate([means[-1], *extremes, *means[:-1]], axis=1).T


def linear_logits(
    linear: Mapping[str, Any], pooled: tuple[jax.Array, ...]
) -> jax.Array:
    """Return a linear part's logits of `pooled_signals`, `[n_examples]`.

    A linear part has a `kernel_f` `[n_parts * d_family]` for every family f, zero if
    the family is not read, and a scalar `bias`.
    """
    products = (
        jnp.matmul(linear[f"kernel_{f}"], x, precision="highest")
        for f, x in enumerate(pooled)
    )
    return sum(products, start=jnp.asarray(linear["bias"]))


class MemberOutputs(NamedTuple):
    """The outputs of trained encoders for some examples."""

    logits: Any  # `[n_members, n_examples]` float32
    pooled: Any  # `[n_members, n_examples, 2 * hidden]` float32


# Initialises weights `[d_out, ..., d_in]`: standard deviation `1 / sqrt(fan-in)`.
fan_in_normal = nn.initializers.variance_scaling(
    1.0, "fan_in", "normal", in_axis=-1, out_axis=0
)


def entry_init(key: jax.Array, config: EncoderConfig, family_mask: jax.Array):
    """Draw weights `[hidden, n_families * projection]`; zero for families not read.

    Like `fan_in_normal`, but the fan-in counts only the families that are read, so that
    a masked member starts like an encoder of only those families.
    """
    read = jnp.repeat(family_mask.astype(jnp.float32), config.projection)
    deviation = read * jax.lax.rsqrt(jnp.maximum(read.sum(), 1.0))
    return jax.random.normal(key, (config.hidden, len(read))) * deviation[None]


class ChannelMap(nn.Module):
    """Affine map of channels, `[d_in, n_examples]` to `[features, n_examples]`."""

    features: int
    matmul_dtype: MatmulDtype
    kernel_init: nn.initializers.Initializer = fan_in_normal

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map the vector of every example."""
        shape = (self.features, x.shape[0])
        kernel = self.param("kernel", self.kernel_init, shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return channel_product(kernel, x, self.matmul_dtype) + bias[:, None]


class MaskedConv(nn.Module):
    """Convolution of kernel size 3 over tokens, with a bias."""

    features: int
    matmul_dtype: MatmulDtype

    @nn.compact
    def __call__(self, x: jax.Array, flag: jax.Array) -> jax.Array:
        """Map `[d_in, n_span_tokens, n_examples]`, zero on padding, to `features`."""
        shape = (self.features, N_TAPS, x.shape[0])
        kernel = self.param("kernel", fan_in_normal, shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        y: Any = token_convolution(x, kernel, flag, self.matmul_dtype)
        return y + bias[:, None, None]


class MaskedGroupNorm(nn.Module):
    """Group normalisation with statistics of the real tokens only."""

    n_groups: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Normalise `[d, n_span_tokens, n_examples]`, zero on padding.

        `mask` is `[n_span_tokens, n_examples]` float32, and `n_groups` divides `d`.
        """
        d, n_groups = x.shape[0], self.n_groups
        scale = self.param("scale", nn.initializers.ones, (d,))
        bias = self.param("bias", nn.initializers.zeros, (d,))
        # Small products sum and broadcast over groups, instead of a reshape of `x`.
        members = np.kron(np.eye(n_groups), np.ones(d // n_groups))
        members = jnp.asarray(members, x.dtype)
        count = jnp.maximum(mask.sum(axis=0), 1.0)[None] * (d // n_groups)
        mean = (members @ x.sum(axis=1)) / count
        square = (members @ jnp.square(x).sum(axis=1)) / count
        inv_std = jax.lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0.0) + 1e-5)
        spread = members.T * scale[:, None]
        gain = spread @ inv_std
        shift = bias[:, None] - spread @ (mean * inv_std)
        return (x * gain[:, None] + shift[:, None]) * mask[None]


class SpanCNN(nn.Module):
    """The network of one span: width-1 convolution, residual blocks, pooling."""

    config: EncoderConfig
    span: int

    @nn.compact
    def __call__(
        self,
        enter: Callable[[jax.Array], jax.Array],
        mask: jax.Array,
        family_mask: jax.Array,
        key: jax.Array | RowKeys | None,
    ) -> jax.Array:
        """Encode one span.

        Args:
          enter: multiplies the projections of all families by the entry kernel
            `[hidden, n_families * projection]`: `[hidden, n_span_tokens, n_examples]`.
          mask: `[n_span_tokens, n_examples]` bool.
          family_mask: `[n_families]` bool.
          key: seed of the dropout; None outside training.

        Returns:
          `[2 * hidden, n_examples]`.
        """
        cfg = self.config
        flag = family_mask.any()
        real = materialize(mask.astype(jnp.float32), flag)
        kernel = self.param("entry_kernel", entry_init, cfg, family_mask)
        bias = self.param("entry_bias", nn.initializers.zeros, (cfg.hidden,))
        x = (enter(kernel) + bias[:, None, None]) * real[None]
        conv = partial(MaskedConv, cfg.hidden, cfg.matmul_dtype)
        for block in range(cfg.n_blocks):
            stream = self.span * cfg.n_blocks + block
            y = conv(name=f"conv_{block}_0")(x, flag) * real[None]
            y = MaskedGroupNorm(cfg.n_groups, name=f"norm_{block}_0")(y, real)
            y = dropout(nn.gelu(y), cfg.dropout, key, stream)
            y = conv(name=f"conv_{block}_1")(y, flag) * real[None]
            y = MaskedGroupNorm(cfg.n_groups, name=f"norm_{block}_1")(y, real)
            x = nn.gelu(x + y)
        return masked_pool(x, real)


class Encoder(nn.Module):
    """Maps all spans to one logit and one pooled vector (paper, appendix B)."""

    config: EncoderConfig
    dims: FamilyDims

    @nn.compact
    def __call__(
        self, features: FamilyTokens, family_mask: jax.Array, draw: Draw | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Score answers.

        Args:
          features: standardised signals, one array per family.
          family_mask: `[n_families]` bool, the subset that is read.
          draw: the training batch to score; None for all examples, without noise or
            dropout.

        Returns:
          logits `[n_examples]`, the network's plus the linear part's if the variables
          hold one, and pooled vectors `[n_examples, 2 * hidden]`: those of the answer
          span, which carries nearly all of the signal (paper, appendix E).
        """
        if draw is None:
            masks, dropout_key = features.masks, None
        else:
            masks = tuple(jnp.take(mask, draw.rows, axis=1) for mask in features.masks)
            dropout_key = draw.dropout
        entries = self._entries(features, masks, family_mask, draw)
        vectors = []
        for span, (enter, mask) in enumerate(zip(entries, masks, strict=True)):
            cnn = SpanCNN(self.config, span, name=f"span_{span}")
            vectors.append(cnn(enter, mask, family_mask, dropout_key))
        pairs = itertools.combinations(vectors, 2)
        x = jnp.concatenate([*vectors, *(a - b for a, b in pairs)])
        matmul_dtype = self.config.matmul_dtype
        x = ChannelMap(self.config.hidden, matmul_dtype, name="mlp_in")(x)
        norm = nn.LayerNorm(reduction_axes=0, feature_axes=0, name="mlp_norm")
        # A network on top of a linear part starts at zero.
        is_zero = self.config.is_linear_first
        start = nn.initializers.zeros if is_zero else fan_in_normal
        out = ChannelMap(1, matmul_dtype, start, name="mlp_out")
        logits = out(nn.gelu(norm(x)))[0]
        if self.has_variable(COLLECTION, "bias"):
            linear = self.variables[COLLECTION]
            logits += linear_logits(linear, pooled_signals(features))
        return logits, vectors[-1].T

    def _entries(self, features, masks, family_mask, draw):
        """Return what multiplies a span's projections by its entry kernel, per span."""
        cfg = self.config
        weights = [
            self.param(f"projection_{f}", fan_in_normal, (cfg.projection, size))
            for f, size in enumerate(self.dims.sizes)
        ]
        shape = (self.dims.n_families, cfg.projection)
        biases = self.param("projection_bias", nn.initializers.zeros, shape)
        bias = (biases * family_mask.astype(jnp.float32)[:, None]).reshape(-1)
        if draw is not None and is_folded(cfg):
            fixed = features, weights, bias, masks, family_mask, draw
            return [partial(self._folded, *fixed, span) for span in range(len(masks))]
        real = jnp.concatenate(masks)
        families = [
            project(
                weights[f],
                tokens,
                real,
                family_mask[f],
                draw,
                deviation=cfg.input_noise,
                stream=f,
                matmul_dtype=cfg.matmul_dtype,
            )
            for f, tokens in enumerate(features.tokens)
        ]
        for f in self.dims.of_answers:
            # Zero in the other spans at evaluation, so without noise there in training.
            n_before = features.span_slices[-1].start
            families[f] = families[f].at[:, :n_before].set(0.0)
        rows = jnp.concatenate(families) + bias[:, None, None]
        product = partial(channel_product, matmul_dtype=cfg.matmul_dtype)
        return [partial(product, x=rows[:, at]) for at in features.span_slices]

    def _folded(self, features, weights, bias, masks, family_mask, draw, span, kernel):
        """Multiply a training batch's span by entry kernel and projections at once."""
        cfg, mask = self.config, masks[span]
        is_read = self.dims.read_in(span, len(masks))
        folded = folded_weights(kernel, weights, is_read)
        entered: Any = jnp.zeros((cfg.hidden, *mask.shape))
        if any(is_read):
            entered = project_span(
                folded,
                features.tokens,
                features.span_slices[span].start,
                mask,
                family_mask,
                draw,
                deviation=cfg.input_noise,
                span=span,
                matmul_dtype=cfg.matmul_dtype,
            )
        return entered + (kernel @ bias)[:, None, None]


def is_folded(config: EncoderConfig) -> bool:
    """Return whether training multiplies entry kernel and projections beforehand.

    Both are linear, so that their product can be applied to the tokens, which takes
    less if an encoder's hidden width is no larger than that of its projections. The
    noise of all wider families then takes one draw. Final scores take two steps on
    accelerators.
    """
    return config.hidden <= config.projection


def folded_weights(
    kernel: jax.Array, weights: Sequence[jax.Array], is_read: Sequence[bool]
) -> list[jax.Array | None]:
    """Return products of an entry kernel with each family's projection.

    `kernel` is `[..., hidden, n_families * projection]`, and `weights` are
    `[..., projection, d_family]`. None stands for a family that is not read.
    """
    size = weights[0].shape[-2]
    return [
        kernel[..., f * size : (f + 1) * size] @ weight if is_read[f] else None
        for f, weight in enumerate(weights)
    ]


def apply_module(module: nn.Module, *arguments: Any) -> Any:
    """Apply a trained module with matrix products in full float32.

    On NVIDIA GPUs JAX by default rounds float32 factors to the ten bits of TF32, which
    training keeps; but scores must equal those of Torch (see `pgir.forward`).
    """
    with jax.default_matmul_precision("highest"):
        return module.apply(*arguments)
