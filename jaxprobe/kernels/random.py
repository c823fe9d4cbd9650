"""Random draws of a training run: weights, batches, dropout, input noise.

All are hashes of a position and of two words that name the draw. Threefry's rounds cost
more than the convolutions that they regularise, and each place that uses them 0.2-0.7 s
to compile; a hash fuses into the loop that uses it, and is recomputed in the backward
pass instead of being stored.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What is drawn, as the second number of a run's words after its root seed.
BATCHES, MEMBERS, HEADS, PROBES = range(4)


def words_of(*numbers: jax.Array | int) -> jax.Array:
    """Two uint32 words that name a draw, from the integers that identify it.

    Order matters: `words_of(1, 2)` and `words_of(2, 1)` are unrelated. More numbers can
    follow later: `words_of(1, 2)` is `mix(words_of(1), 2)`.
    """
    words = jnp.array([0x243F6A88, 0x85A308D3], jnp.uint32)
    for number in numbers:
        words = mix(words, number)
    return words


def mix(words: jax.Array, number: jax.Array | int) -> jax.Array:
    """Words of a draw within a draw, such as a step's within a run's: `[2]` uint32."""
    number = jnp.asarray(number).astype(jnp.uint32)
    first = _finalize(words[0] ^ (number * jnp.uint32(0xCC9E2D51)))
    second = _finalize((words[1] + first) ^ (number * jnp.uint32(0x1B873593)))
    return jnp.stack([first + second * jnp.uint32(5), second])


def _finalize(bits: jax.Array) -> jax.Array:
    """Spread every bit over the word (the finaliser of MurmurHash3)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def hashed_bits(words: jax.Array, site: int, shape: tuple[int, ...]) -> jax.Array:
    """Counter-based random bits: a keyed multiply-xorshift hash of the index.

    Args:
      words: `[2]` uint32, from `words_of`.
      site: tells draws of the same step apart.
      shape: of the result.

    Returns:
      `shape` uint32.
    """
    index = jax.lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    start = words[0] + jnp.uint32(site * 0x3C6EF372 % 2**32)
    step = words[1] ^ jnp.uint32(site * 0x1B873593 % 2**32)
    bits = (index + start) * jnp.uint32(0x9E3779B1)
    bits = ((bits ^ (bits >> 15)) + step) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def hashed_normal(words: jax.Array, site: int, shape: tuple[int, ...]) -> jax.Array:
    """Nearly normal float32 of mean 0 and variance 1: four random bytes, summed.

    As regularising noise it does what an exact normal does (kurtosis 2.7 instead of 3)
    at a sixth of the cost, which per token was a fifth of a training step.
    """
    bits = hashed_bits(words, site, shape)
    total = sum(((bits >> shift) & 0xFF for shift in (8, 16, 24)), bits & 0xFF)
    spread = np.sqrt(4 * (256**2 - 1) / 12)
    return (total.astype(jnp.float32) - 510.0) * np.float32(1 / spread)


def exact_normal(words: jax.Array, site: int, shape: tuple[int, ...]) -> jax.Array:
    """Normal float32 of mean 0 and variance 1, for initial weights.

    An element depends on its place in row-major order, not on the shape's first axis.
    """
    bits = hashed_bits(words, site, shape) >> 8
    uniform = (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-24)
    # The largest of the 2**24 values rounds to one, whose normal is infinite: of a
    # hundred million weights, six.
    uniform = jnp.minimum(uniform, np.float32(1.0 - 2.0**-24))
    return np.float32(np.sqrt(2.0)) * jax.lax.erf_inv(2.0 * uniform - 1.0)


def hashed_permutation(words: jax.Array, n: int) -> jax.Array:
    """Permutation of `n` rows, `[n]` int32, by a Feistel network.

    The network permutes the next power of two; what it sends beyond `n` is left out.
    Sorting random numbers instead took as long as the gradients of a fusion head.
    """
    n_bits = max(2, int(n - 1).bit_length())
    low, high = n_bits // 2, n_bits - n_bits // 2
    index = jax.lax.iota(jnp.uint32, 2**n_bits)
    left, right = index >> low, index & jnp.uint32(2**low - 1)
    for turn in range(4):
        key = mix(words, turn)
        left ^= _finalize(right + key[0]) >> (32 - high)
        right ^= _finalize(left + key[1]) >> (32 - low)
    sent = ((left << low) | right).astype(jnp.int32)
    real = sent < n
    place = jnp.where(real, jnp.cumsum(real) - 1, n)
    return jnp.zeros(n, jnp.int32).at[place].set(sent, mode="drop")


def draw_weights(deviations: Any, words: jax.Array) -> Any:
    """Initial weights from their standard deviations.

    Args:
      deviations: tree whose leaves named `bias`, `scale` or `gaps` are initial values
        already, and whose other leaves are standard deviations.
      words: of the draw.

    Returns:
      The same tree, with weights drawn.
    """
    paths, tree = jax.tree.flatten_with_path(deviations)
    leaves = [
        leaf
        if path[-1].key.endswith(("bias", "scale", "gaps"))
        else leaf * exact_normal(words, site, leaf.shape)
        for site, (path, leaf) in enumerate(paths)
    ]
    return jax.tree.unflatten(tree, leaves)


def dropout(x: jax.Array, rate: float, words: jax.Array | None, site: int) -> jax.Array:
    """Zero elements with probability `rate` and rescale; the identity without words."""
    if words is None or rate == 0.0:
        return x
    keep = hashed_bits(words, site, x.shape) >= jnp.uint32(rate * 2**32)
    return jnp.where(keep, x * (1.0 / (1.0 - rate)), 0.0)
