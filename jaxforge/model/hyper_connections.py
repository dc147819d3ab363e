"""Hyper-connections: n residual streams, which each part of a block combines, mixes and extends.

A part T, such as a mixer with its norm, reads one combination of the streams H [n, d] of a token.
The streams are mixed, and its result is added to each of them:

    x = Σ_i α_i H_i          H_i <- Σ_j A_ji H_j + β_i T(x)

α, A and β are functions of the streams of the token (`model.hyper_connections`):

    dynamic     arXiv:2409.19606. α_i, A_ij, β_i = s tanh(RMSNorm(H_i) W) + c with learned s and c.
                At first W = 0, A = 1 and β = 1, and part k reads stream k mod n. The final norm
                reads the sum of the streams.
    manifold    arXiv:2512.24880, as in DeepSeek V4. With all streams h [n d] as one vector of unit
                mean square and u = s h W + c: α = σ(u) + ε, β = 2 σ(u), and A = softmax(u) + ε,
                whose columns and rows are divided by their sums until A is doubly stochastic.
                The final norm reads a combination with another α.

Initial values of "manifold" differ from those of transformers, with which every part averages the
streams: here s is small, α = 1 / n, β = 1 and A is near 1, which begins like a plain residual.

Between layers, the streams of a token are one vector: [b, s, n d].
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxforge.config.model import ModelConfig
from jaxforge.model.linear import Declare, Float32Linear, Initializer
from jaxforge.model.norm import RMSNorm

Streams = Float[Array, "b s n d"]

_SCALE = 0.01  # initial s, in both papers
_EPS = 1e-6
_STAY = 4.0  # initial logit of a stream's share in itself; the others have 0


class Mixing(NamedTuple):
    """Coefficients of a part, float32.

    Attributes:
        shares: A; `shares[..., j, i]` is the factor of stream j in the next stream i.
        factors: β, the factor of the part's result in each stream.
    """

    shares: Float[Array, "b s n n"]
    factors: Float[Array, "b s n"]


def expand(x_BSD: Float[Array, "b s d"], config: ModelConfig) -> Float[Array, "b s n*d"]:
    """Return streams that all begin with the embedding."""
    return x_BSD if config.n_streams == 1 else jnp.tile(x_BSD, config.n_streams)


class HyperConnection(nnx.Module):
    """Connection of a part of a block with the streams.

    Args:
        config: the model.
        declare: declares the parameters.
        part: index of the part in its block.
    """

    def __init__(self, config: ModelConfig, declare: Declare, part: int) -> None:
        self.n, self.dim = config.n_streams, config.dim

    def read(self, x_BSH: Float[Array, "b s n*d"]) -> tuple[Float[Array, "b s d"], Mixing]:
        """Return the input of the part, and the coefficients for `write`."""
        streams = _split(x_BSH, self.n)
        factors, mixing = self.coefficients(streams)
        return _combine(streams, factors), mixing

    def coefficients(self, streams: Streams) -> tuple[Float[Array, "b s n"], Mixing]:
        """Return α, and the other coefficients."""
        raise NotImplementedError

    def write(
        self, x_BSH: Float[Array, "b s n*d"], y_BSD: Float[Array, "b s d"], mixing: Mixing
    ) -> Float[Array, "b s n*d"]:
        """Return the next streams.

        Args:
            x_BSH: streams that the part has read.
            y_BSD: result of the part.
            mixing: coefficients.
        """
        streams, factors = _split(x_BSH, self.n), mixing.factors.astype(y_BSD.dtype)
        extended = [
            _combine(streams, mixing.shares[..., i]) + factors[..., i, None] * y_BSD
            for i in range(self.n)
        ]
        return jnp.concatenate(extended, axis=-1)


class DynamicConnection(HyperConnection):
    """Hyper-connection with coefficients of each stream from that stream."""

    def __init__(self, config: ModelConfig, declare: Declare, part: int) -> None:
        super().__init__(config, declare, part)
        n = self.n
        self.norm = RMSNorm(self.dim, config.norm_eps, declare)
        # For each stream: α, its shares in all streams, β.
        self.proj = Float32Linear((n + 2, None), (self.dim, "embed"), 0.0, declare)
        self.scale = declare((2,), (None,), jax.nn.initializers.constant(_SCALE))
        self.read_bias = declare((n,), (None,), _in_turn(part))
        self.share_bias = declare((n, n), (None, None), _diagonal(1.0))
        self.factor_bias = declare((n,), (None,), jax.nn.initializers.ones)

    def coefficients(self, streams: Streams) -> tuple[Float[Array, "b s n"], Mixing]:
        """Return α, and the other coefficients."""
        batch, length, n, dim = streams.shape
        normed = self.norm(streams.astype(jnp.float32)).reshape(batch, length * n, dim)
        values = jnp.tanh(self.proj(normed)).reshape(batch, length, n, n + 2)
        of_width, of_depth = self.scale[...].astype(jnp.float32)
        read, shares, factors = (
            bias[...].astype(jnp.float32)
            for bias in (self.read_bias, self.share_bias, self.factor_bias)
        )
        mixing = Mixing(shares + of_width * values[..., 1:-1], factors + of_depth * values[..., -1])
        return read + of_width * values[..., 0], mixing


class ManifoldConnection(HyperConnection):
    """Hyper-connection whose shares are doubly stochastic, so that no stream grows by mixing."""

    def __init__(self, config: ModelConfig, declare: Declare, part: int) -> None:
        super().__init__(config, declare, part)
        n = self.n
        self.iterations, self.norm_eps = config.sinkhorn_iterations, config.norm_eps
        # α, β and A row by row.
        self.proj = Float32Linear(
            (n * (n + 2), None), (n * self.dim, "embed"), config.init_std, declare
        )
        self.scale = declare((3,), (None,), jax.nn.initializers.constant(_SCALE))
        self.read_bias = declare((n,), (None,), _even(n))
        self.factor_bias = declare((n,), (None,), jax.nn.initializers.zeros)
        self.share_bias = declare((n, n), (None, None), _diagonal(_STAY))

    def coefficients(self, streams: Streams) -> tuple[Float[Array, "b s n"], Mixing]:
        """Return α, and the other coefficients."""
        n = self.n
        values = self.proj(_unit_mean_square(streams, self.norm_eps))
        of_read, of_factors, of_shares = self.scale[...].astype(jnp.float32)
        read = of_read * values[..., :n] + self.read_bias[...]
        factors = of_factors * values[..., n : 2 * n] + self.factor_bias[...]
        logits = values[..., 2 * n :].reshape(*values.shape[:2], n, n)
        shares = doubly_stochastic(of_shares * logits + self.share_bias[...], self.iterations)
        return jax.nn.sigmoid(read) + _EPS, Mixing(shares, 2 * jax.nn.sigmoid(factors))


class StreamHead(nnx.Module):
    """Combination of the streams that the final norm reads, of "manifold"."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        n = self.n = config.n_streams
        self.norm_eps = config.norm_eps
        self.proj = Float32Linear((n, None), (n * config.dim, "embed"), config.init_std, declare)
        self.scale = declare((1,), (None,), jax.nn.initializers.constant(_SCALE))
        self.read_bias = declare((n,), (None,), _even(n))

    def __call__(self, x_BSH: Float[Array, "b s n*d"]) -> Float[Array, "b s d"]:
        """Return Σ_i α_i H_i."""
        streams = _split(x_BSH, self.n)
        values = self.proj(_unit_mean_square(streams, self.norm_eps))
        read = self.scale[...] * values + self.read_bias[...]
        return _combine(streams, jax.nn.sigmoid(read) + _EPS)


def add_streams(x_BSH: Float[Array, "b s n*d"], n: int) -> Float[Array, "b s d"]:
    """Return the sum of the streams."""
    return jnp.sum(_split(x_BSH, n), axis=2)


@functools.partial(jax.checkpoint, static_argnums=1)
def doubly_stochastic(logits: Float[Array, "b s n n"], iterations: int) -> Float[Array, "b s n n"]:
    """Return matrices whose rows and columns sum to 1 (Sinkhorn and Knopp, 1967).

    Args:
        logits: logits of a softmax over each row.
        iterations: number of divisions by the sums of columns; between them those of rows.
    """

    def by_sums(shares: Array, axis: int) -> Array:
        # Sums of slices, which XLA fuses into one kernel; a GPU launches each sum on its own.
        slices = jnp.split(shares, shares.shape[axis], axis)
        return shares / (functools.reduce(jnp.add, slices) + _EPS)

    def divide(shares: Array, _: None) -> tuple[Array, None]:
        return by_sums(by_sums(shares, -1), -2), None

    shares = by_sums(jax.nn.softmax(logits, axis=-1) + _EPS, -2)
    # A loop: unrolled, the divisions took more than half of the time to compile a step.
    return jax.lax.scan(divide, shares, length=iterations - 1)[0]


def _split(x_BSH: Float[Array, "b s n*d"], n: int) -> Streams:
    return x_BSH.reshape(*x_BSH.shape[:2], n, -1)


def _combine(streams: Streams, factors: Float[Array, "b s n"]) -> Float[Array, "b s d"]:
    """Return Σ_i factor_i H_i in the dtype of the streams."""
    factors = factors.astype(streams.dtype)
    # A sum of products, which XLA fuses; products of such small matrices would be slower.
    terms = (factors[..., i, None] * streams[..., i, :] for i in range(streams.shape[2]))
    return functools.reduce(jnp.add, terms)


def _unit_mean_square(streams: Streams, eps: float) -> Float[Array, "b s n*d"]:
    x_BSH = streams.reshape(*streams.shape[:2], -1).astype(jnp.float32)
    return x_BSH * jax.lax.rsqrt(jnp.mean(x_BSH * x_BSH, axis=-1, keepdims=True) + eps)


def _even(n: int) -> Initializer:
    """Return an initializer with which σ(c) + ε is 1 / n."""
    share = 1 / n - _EPS
    return jax.nn.initializers.constant(math.log(share / (1 - share)))


def _diagonal(value: float) -> Initializer:
    """Return an initializer of matrices with one value on the diagonal."""

    def init(_: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        return jnp.broadcast_to(value * jnp.eye(shape[-1], dtype=dtype), shape)

    return init


def _in_turn(part: int) -> Initializer:
    """Return an initializer with which part k of a stack, two in a layer, reads stream k mod n."""

    def init(_: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        *layers, n = shape
        parts = 2 * jnp.arange(layers[0] if layers else 1) + part
        return jax.nn.one_hot(parts % n, n, dtype=dtype).reshape(shape)

    return init


CONNECTIONS = {"dynamic": DynamicConnection, "manifold": ManifoldConnection}
"""Values of `model.hyper_connections` -> connections of the parts."""
