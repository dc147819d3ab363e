"""Causal self-attention with grouped queries, and the one door to every attention kernel."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxforge.config.model import ModelConfig
from jaxforge.model.linear import Declare, Linear
from jaxforge.model.norm import RMSNorm
from jaxforge.model.rope import Rotation, rotate
from jaxforge.parallel.sharding import constrain

_QK_NORM_EPS = 1e-5  # whatever norm_eps says, as in KempnerForge


class Visible(NamedTuple):
    """Which keys a query sees: those at or before it and, when packed, of its own document.

    Attributes:
        positions: position of each query among the keys; None: query i stands at key i.
        doc_ids: document of each token; None: one document a row.
    """

    positions: Int[Array, "b s"] | None = None
    doc_ids: Int[Array, "b s"] | None = None

    def mask(self, n_keys: int) -> Bool[Array, "b 1 s t"] | None:
        """The explicit mask; None when causality alone says it."""
        assert self.positions is None or self.doc_ids is None  # no cache holds packed documents
        if self.positions is not None:
            return (jnp.arange(n_keys) <= self.positions[..., None])[:, None]
        if self.doc_ids is not None:
            same = self.doc_ids[:, :, None] == self.doc_ids[:, None, :]
            return jnp.tril(same)[:, None]
        return None


Backend = Callable[
    [Float[Array, "b s heads h"], Float[Array, "b t kv h"], Float[Array, "b t kv h"], Visible],
    Float[Array, "b s heads h"],
]


def reference_attention(
    q_BSHh: Float[Array, "b s heads h"],
    k_BTKh: Float[Array, "b t kv h"],
    v_BTKh: Float[Array, "b t kv h"],
    visible: Visible,
) -> Float[Array, "b s heads h"]:
    """softmax(q kᵀ / √h) v, scores and softmax in float32. Runs everywhere, judges the others."""
    mask = visible.mask(k_BTKh.shape[1])
    return jax.nn.dot_product_attention(
        q_BSHh, k_BTKh, v_BTKh, mask=mask, is_causal=mask is None, implementation="xla"
    )


BACKENDS: dict[str, Backend] = {"reference": reference_attention}
"""Every backend honours `Visible` in full, or raises."""

_NAMES = {"auto": "reference", "math": "reference"}


def backend_name(config: ModelConfig) -> str:
    """The attention backend that `model.sdpa_backend` stands for here."""
    return _NAMES.get(config.sdpa_backend, config.sdpa_backend)


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, after rotation; outside the scan, of all layers."""

    k: Float[Array, "b t kv h"]
    v: Float[Array, "b t kv h"]

    def write(self, k: Array, v: Array, positions: Int[Array, "b s"]) -> "KVCache":
        """The cache with new rows at `positions`, which may differ between sequences."""
        rows = jnp.arange(k.shape[0])[:, None]
        return KVCache(self.k.at[rows, positions].set(k), self.v.at[rows, positions].set(v))


class Attention(nnx.Module):
    """Queries, keys and values of `n_heads` / `kv_heads` heads; optional RMSNorm on q and k."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = config
        embed, heads = (c.dim, "embed"), (c.n_heads * c.head_dim, "heads")
        kv_heads = (c.kv_heads * c.head_dim, "kv_heads")
        self.q_proj = Linear(heads, embed, std=c.init_std, declare=declare)
        self.k_proj = Linear(kv_heads, embed, std=c.init_std, declare=declare)
        self.v_proj = Linear(kv_heads, embed, std=c.init_std, declare=declare)
        self.o_proj = Linear(embed, heads, std=residual_std(c), declare=declare)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, _QK_NORM_EPS, declare)
            self.k_norm = RMSNorm(c.head_dim, _QK_NORM_EPS, declare)
        self.config = c

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        rope: Rotation,
        visible: Visible,
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "b s d"], KVCache | None]:
        """Attends within `x`, or, with a cache, to all that came before as well."""
        c = self.config
        q_BSHh = self._heads(self.q_proj(x_BSD), "heads")
        k_BSKh = self._heads(self.k_proj(x_BSD), "kv_heads")
        v_BSKh = self._heads(self.v_proj(x_BSD), "kv_heads")
        if c.qk_norm:
            q_BSHh, k_BSKh = self.q_norm(q_BSHh), self.k_norm(k_BSKh)
        q_BSHh, k_BSKh = rotate(q_BSHh, rope), rotate(k_BSKh, rope)
        if cache is not None:
            assert visible.positions is not None
            cache = cache.write(k_BSKh, v_BSKh, visible.positions)
            k_BSKh, v_BSKh = cache
        y_BSHh = BACKENDS[backend_name(c)](q_BSHh, k_BSKh, v_BSKh, visible)
        y_BSHh = constrain(y_BSHh, "batch", None, "heads", None)
        return self.o_proj(y_BSHh.reshape(*x_BSD.shape[:2], -1)), cache

    def _heads(self, x: Float[Array, "b s d"], axis: str) -> Float[Array, "b s heads h"]:
        x = x.reshape(*x.shape[:2], -1, self.config.head_dim)
        return constrain(x, "batch", None, axis, None)


def residual_std(config: ModelConfig) -> float:
    """Initial std of the two matrices that write to the residual stream: init_std / √(2 L)."""
    return config.init_std / (2 * config.n_layers) ** 0.5
