"""Rotary position embedding (arXiv:2104.09864) in the rotate-half layout of GPT-NeoX and Llama."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxforge.config.model import Rope, RopeScaling


class Rotation(NamedTuple):
    """Cosine and sine of the angles of each position, float32."""

    cos: Float[Array, "b s half"]
    sin: Float[Array, "b s half"]


def rotation(
    rope: Rope,
    positions: Int[Array, "b s"],
    lengths: Int[Array, "b 1"] | int | None = None,
) -> Rotation:
    """Compute the angles position · frequency for every pair of channels of a head.

    Args:
        rope: rotary positions of a layer.
        positions: positions of the tokens.
        lengths: number of tokens of each sequence, which determines some scalings; None: the number
            of `positions`.
    """
    scaling = rope.scaling
    frequencies = jnp.asarray(inverse_frequencies(rope))
    if scaling is not None and scaling.rope_type in ("dynamic", "longrope"):
        tokens = jnp.asarray(positions.shape[1] if lengths is None else lengths)
        frequencies = _by_length(rope, scaling, tokens[..., None])
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin, factor = jnp.cos(angles), jnp.sin(angles), attention_factor(scaling)
    return Rotation(cos, sin) if factor == 1.0 else Rotation(cos * factor, sin * factor)


def rotations(
    ropes: Sequence[Rope | None],
    positions: Int[Array, "b s"],
    lengths: Int[Array, "b 1"] | int | None = None,
) -> tuple[Rotation, ...]:
    """Return the rotation of each of `ropes`; for None, by angles of 0."""
    unrotated = Rope(1.0, None, min((rope.size for rope in ropes if rope), default=2))
    zeros = jnp.zeros_like(positions)
    return tuple(
        rotation(unrotated, zeros) if rope is None else rotation(rope, positions, lengths)
        for rope in ropes
    )


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Return theta^(-2i / size) for i < size / 2 in float32, scaled by `rope.scaling`.

    Scalings that depend on the length of a sequence return the frequencies of short sequences.
    """
    size = rope.size
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    scaling = rope.scaling
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / np.float32(scaling.factor)
    if scaling.rope_type == "proportional":
        is_rotated = np.arange(size // 2) < int(scaling.rotated_share * size // 2)
        return np.where(is_rotated, frequencies / np.float32(scaling.factor), np.float32(0))
    if scaling.rope_type == "longrope":
        return frequencies / np.asarray(scaling.short_factor, np.float32)
    if scaling.rope_type == "yarn":
        return _yarn_scaled(frequencies, rope.theta, scaling)
    return _llama3_scaled(frequencies, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of rotated queries and keys: 1 except for YaRN and LongRoPE."""
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.rope_type == "yarn":
        if scaling.mscale is None or scaling.mscale_all_dim is None:
            return scaling.yarn_factor(1.0)
        return scaling.yarn_factor(scaling.mscale) / scaling.yarn_factor(scaling.mscale_all_dim)
    longer = math.log(max(1.0, scaling.factor))
    return math.sqrt(1 + longer / math.log(scaling.original_max_seq_len))


def rotate(
    x_BSHh: Float[Array, "b s heads h"], by: Rotation, *, rope_as_matmul: bool = False
) -> Float[Array, "b s heads h"]:
    """Rotate each pair (channel i, channel i + n/2) by its angle, in float32.

    With n / 2 angles, the first n channels are rotated. `rope_as_matmul` does not change the
    result (see `Runtime`).
    """
    size = 2 * by.cos.shape[-1]
    if size < x_BSHh.shape[-1]:
        rotated = rotate(x_BSHh[..., :size], by, rope_as_matmul=rope_as_matmul)
        return jnp.concatenate([rotated, x_BSHh[..., size:]], axis=-1)
    if rope_as_matmul:
        return _rotate_by_product(x_BSHh, by)
    first, second = jnp.split(x_BSHh.astype(jnp.float32), 2, axis=-1)
    cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSHh.dtype)


def _rotate_by_product(x_BSHh: Float[Array, "b s heads h"], by: Rotation) -> Array:
    cos = jnp.concatenate([by.cos, by.cos], axis=-1)[:, :, None, :]
    sin = jnp.concatenate([-by.sin, by.sin], axis=-1)[:, :, None, :]
    batch, *_, h = x_BSHh.shape
    # The product with a permutation is exact, because each sum has one term. It has a batch
    # dimension, because remat policies save products without one.
    swap = jnp.roll(jnp.eye(h, dtype=x_BSHh.dtype), h // 2, axis=0)
    swapped = jnp.einsum("bsnh,bhg->bsng", x_BSHh, jnp.broadcast_to(swap, (batch, h, h)))
    return (x_BSHh.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin).astype(
        x_BSHh.dtype
    )


def _llama3_scaled(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Scale as Llama 3.1: low frequencies by 1/factor, high ones not, with a ramp in between."""
    wavelengths = 2 * math.pi / frequencies
    rotations_in_context = scaling.original_max_seq_len / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unscaled = np.clip((rotations_in_context - low) / (high - low), 0.0, 1.0)
    return (frequencies * (unscaled + (1 - unscaled) / scaling.factor)).astype(np.float32)


def _yarn_scaled(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Scale as YaRN (arXiv:2309.00071, section 3.2): as Llama 3.1, with a ramp over channels."""
    pairs, original = len(frequencies), scaling.original_max_seq_len

    def channel(rotations_in_context: float) -> float:
        """Return the index of the pair with this number of rotations in the original context."""
        return pairs * math.log(original / (rotations_in_context * 2 * math.pi)) / math.log(theta)

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low or 0.001
    stretch = np.clip((np.arange(pairs, dtype=np.float32) - low) / width, 0.0, 1.0)
    return (frequencies * (1 - stretch + stretch / scaling.factor)).astype(np.float32)


def _by_length(
    rope: Rope, scaling: RopeScaling, tokens: Int[Array, "*b 1 1"]
) -> Float[Array, "*b 1 half"]:
    """Return the rotary frequencies for sequences of the given number of tokens.

    Beyond the original length, LongRoPE (arXiv:2402.13753) uses `long_factor`, and dynamic
    (NTK-aware) scaling multiplies the base by
    (factor · tokens / original - factor + 1)^(size / (size - 2)).
    """
    original, size = scaling.original_max_seq_len, rope.size
    is_longer = tokens > original
    if scaling.rope_type == "longrope":
        plain = inverse_frequencies(rope._replace(scaling=None))
        stretched: Array | np.ndarray = plain / np.asarray(scaling.long_factor, np.float32)
    else:
        longer = tokens.astype(jnp.float32) / original
        grown = jnp.maximum(scaling.factor * longer - (scaling.factor - 1), 1.0)
        base = rope.theta * grown ** (size / max(1, size - 2))
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        stretched = 1.0 / base**exponents
    return jnp.where(is_longer, stretched, inverse_frequencies(rope))
