"""Rotary position embedding (arXiv:2104.09864) in the rotate-half layout of GPT-NeoX and Llama."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxforge.config.model import RopeScaling
from jaxforge.model.plan import Rope


class Rotation(NamedTuple):
    """Cosine and sine of each position's angles, float32."""

    cos: Float[Array, "b s half"]
    sin: Float[Array, "b s half"]


def rotation(rope: Rope, head_size: int, positions: Int[Array, "b s"]) -> Rotation:
    """The angles position · frequency for every pair of channels of a head."""
    frequencies_h = jnp.asarray(inverse_frequencies(rope, head_size))
    angles = positions[..., None].astype(jnp.float32) * frequencies_h
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotations(
    ropes: Sequence[Rope | None], head_size: int, positions: Int[Array, "b s"]
) -> tuple[Rotation, ...]:
    """The angles by each; None turns nothing."""
    nowhere = jnp.zeros_like(positions)
    return tuple(
        rotation(Rope(1.0, None), head_size, nowhere)
        if rope is None
        else rotation(rope, head_size, positions)
        for rope in ropes
    )


def inverse_frequencies(rope: Rope, head_size: int) -> np.ndarray:
    """theta^(-2i / h), i < h / 2, float32; scaled where `scaling` asks."""
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    frequencies = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    return frequencies if rope.scaling is None else _llama3_scaled(frequencies, rope.scaling)


def rotate(
    x_BSHh: Float[Array, "b s heads h"], by: Rotation, *, swap_by_product: bool = False
) -> Float[Array, "b s heads h"]:
    """Turns each pair (channel i, channel i + h/2) by its angle, in float32.

    Either way of bringing a pair together gives the same numbers: see `Execution`.
    """
    if swap_by_product:
        return _rotate_by_product(x_BSHh, by)
    first, second = jnp.split(x_BSHh.astype(jnp.float32), 2, axis=-1)
    cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BSHh.dtype)


def _rotate_by_product(x_BSHh: Float[Array, "b s heads h"], by: Rotation) -> Array:
    cos = jnp.concatenate([by.cos, by.cos], axis=-1)[:, :, None, :]
    sin = jnp.concatenate([-by.sin, by.sin], axis=-1)[:, :, None, :]
    batch, *_, h = x_BSHh.shape
    # Exact: each sum has one term. Batched, since remat policies save products that are not.
    swap = jnp.roll(jnp.eye(h, dtype=x_BSHh.dtype), h // 2, axis=0)
    swapped = jnp.einsum("bsnh,bhg->bsng", x_BSHh, jnp.broadcast_to(swap, (batch, h, h)))
    turned = x_BSHh.astype(jnp.float32) * cos + swapped.astype(jnp.float32) * sin
    return turned.astype(x_BSHh.dtype)


def _llama3_scaled(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's context extension: long wavelengths / factor, short ones kept, a ramp between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_seq_len / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (frequencies * (keep + (1 - keep) / scaling.factor)).astype(np.float32)
