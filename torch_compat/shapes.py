"""Names and shapes of all parameters that a config declares, told without JAX.

`jaxforge.model` declares them too, but to ask it takes JAX and Flax, whose imports last longer than
converting a small checkpoint does. A test holds the two together.
"""

from collections.abc import Iterator

from jaxforge.config.model import ModelConfig
from torch_compat.names.table import EMBEDDING, HEAD

Shape = tuple[int, ...]


def parameters(model: ModelConfig) -> dict[str, Shape]:
    """Our names -> shapes, an entry per layer, sorted as a checkpoint has them."""
    layers = sorted(_block(model))
    found = {f"layers.{i}.{name}": shape for name, shape in layers for i in range(model.n_layers)}
    norm = dict(_norm("norm", model.dim, model.norm_type))
    table = (model.vocab_size, model.dim)
    head = {} if model.tie_embeddings else {HEAD: table}
    return {**found, **dict(sorted(norm.items())), **head, EMBEDDING: table}


def _block(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """One layer."""
    yield from _norm("attention_norm", model.dim, model.norm_type)
    queries, keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        yield f"attention.{name}_proj.weight", (size, model.dim)
        if model.qkv_bias:
            yield f"attention.{name}_proj.bias", (size,)
    yield "attention.o_proj.weight", (model.dim, queries)
    if model.qk_norm:
        yield from _norm("attention.q_norm", model.head_size)
        yield from _norm("attention.k_norm", model.head_size)
    yield from _norm("mlp_norm", model.dim, model.norm_type)
    for name in ("gate", "up") if model.activation == "silu" else ("up",):
        yield f"mlp.{name}_proj.weight", (model.ffn_dim, model.dim)
    yield "mlp.down_proj.weight", (model.dim, model.ffn_dim)


def _norm(name: str, size: int, kind: str = "rmsnorm") -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if kind == "layernorm":
        yield f"{name}.bias", (size,)
