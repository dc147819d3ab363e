"""Names and shapes of all parameters that a config of our own model declares, told without JAX.

`jaxforge.model` declares them too, but to ask it takes JAX and Flax, whose imports last longer than
converting a small checkpoint does. A test holds the two together. A registered model is asked
(`training_state.model_shapes`).
"""

from collections.abc import Iterator

from jaxforge.config.model import ModelConfig
from torch_compat.names.table import EMBEDDING, HEAD, POSITIONS

Shape = tuple[int, ...]


def parameters(model: ModelConfig) -> dict[str, Shape]:
    """Our names -> shapes, an entry per layer, sorted as a checkpoint has them."""
    layers = sorted(_block(model))
    found = {f"layers.{i}.{name}": shape for name, shape in layers for i in range(model.n_layers)}
    norm = dict(_norm("norm", model.dim, model.norm_type))
    table = (model.vocab_size, model.dim)
    head = {} if model.tie_embeddings else {HEAD: table}
    learned = model.position_embedding == "learned"
    positions = {POSITIONS: (model.max_seq_len, model.dim)} if learned else {}
    return {**found, **dict(sorted(norm.items())), **head, **positions, EMBEDDING: table}


def _block(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """One layer."""
    sides = {"pre": ("norm",), "post": ("post_norm",), "sandwich": ("norm", "post_norm")}
    for side in sides[model.norm_placement]:
        yield from _norm(f"attention_{side}", model.dim, model.norm_type)
        yield from _norm(f"mlp_{side}", model.dim, model.norm_type)
    queries, keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        yield from _linear(f"attention.{name}_proj", size, model.dim, bias=model.qkv_bias)
    yield from _linear("attention.o_proj", model.dim, queries, bias=model.o_bias)
    if model.qk_norm:
        whole = model.qk_norm_scope == "projection"
        yield from _norm("attention.q_norm", queries if whole else model.head_size)
        yield from _norm("attention.k_norm", keys if whole else model.head_size)
    for name in ("gate", "up") if model.is_gated else ("up",):
        yield from _linear(f"mlp.{name}_proj", model.ffn_dim, model.dim, bias=model.mlp_bias)
    yield from _linear("mlp.down_proj", model.dim, model.ffn_dim, bias=model.mlp_bias)


def _linear(name: str, out: int, inp: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out, inp)
    if bias:
        yield f"{name}.bias", (out,)


def _norm(name: str, size: int, kind: str = "rmsnorm") -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if kind == "layernorm":
        yield f"{name}.bias", (size,)
