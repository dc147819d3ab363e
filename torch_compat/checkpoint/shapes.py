"""Names and shapes of all parameters that a config declares, without JAX.

`jaxforge.model` declares them too, but importing JAX and Flax takes longer than the conversion of a
small checkpoint. A test checks that both agree. Shapes of a registered model come from the model
itself (`training_state.model_shapes`).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping

from jaxforge.config.model import ATTENTION, MTP, LayerParts, ModelConfig
from torch_compat.checkpoint.stacking import EXPERTS, Stacking
from torch_compat.names.table import EMBEDDING, HEAD, POSITIONS

Shape = tuple[int, ...]


def parameters(model: ModelConfig) -> dict[str, Shape]:
    """Return our name -> shape, one entry per layer and expert, in the order of a checkpoint."""
    norm = dict(_norm("norm", model.dim, model))
    table = (model.vocab_size, model.dim)
    head = {} if model.tie_embeddings else {HEAD: table}
    learned = model.position_embedding == "learned"
    positions = {POSITIONS: (model.max_seq_len, model.dim)} if learned else {}
    outside = {**norm, **head, **positions, **_stream_head(model), EMBEDDING: table}
    outside |= dict(_layer_embeddings(model))
    groups = _in_layers(model, _block)
    for name, shape in sorted(outside.items()):
        groups.setdefault(name.partition(".")[0], {})[name] = shape
    return _merged(groups)


def untrained(model: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of non-trainable state."""
    names = {"sign": "expert_bias", "kempnerforge": "expert_ema"}

    def in_block(
        model: ModelConfig, parts: LayerParts, *, is_module: bool = False
    ) -> Iterator[tuple[str, Shape]]:
        if model.layer_multipliers:
            yield "multiplier", (1,)
        if parts.feed_forward == "experts" and model.bias_update in names:
            yield f"mlp.router.{names[model.bias_update]}", (model.num_experts,)

    return _merged(_in_layers(model, in_block))


def _merged(groups: Mapping[str, Mapping[str, Shape]]) -> dict[str, Shape]:
    """Return the shapes of all parameter groups in the order of the names of groups."""
    return {name: shape for _, group in sorted(groups.items()) for name, shape in group.items()}


def _in_layers(
    model: ModelConfig, block: Callable[..., Iterator[tuple[str, Shape]]]
) -> dict[str, dict[str, Shape]]:
    """Return the shapes in all layers and modules of multi-token prediction, by parameter group.

    Args:
        model: the model.
        block: declares one layer.
    """
    stacking = Stacking(model)
    shapes: dict[str, dict[str, Shape]] = {name: {} for name in (*model.stacks, MTP)}
    for stack, layers in model.stacks.items():
        for name, shape in sorted(block(model, model.layer_parts[layers[0]])):
            of_experts = (model.num_experts,) if name.startswith(EXPERTS) else ()
            # [layers, experts, ...], or [layers, ...]
            array = (len(layers), *of_experts, *shape)
            shapes[stack] |= {e: shape for e, _ in stacking.entries(f"{stack}.{name}", array)}
    for depth in range(model.mtp_depth):
        for name, shape in sorted(block(model, model.mtp_parts, is_module=True)):
            of_experts = (model.num_experts,) if name.startswith(EXPERTS) else ()
            entries = stacking.entries(f"{MTP}.{depth}.{name}", (*of_experts, *shape))
            shapes[MTP] |= {entry: shape for entry, _ in entries}
    return shapes


def _block(
    model: ModelConfig, parts: LayerParts, *, is_module: bool = False
) -> Iterator[tuple[str, Shape]]:
    """Yield the parameters of a layer, with those of one expert.

    Args:
        model: the model.
        parts: mixer and feed-forward.
        is_module: whether the layer is a module of multi-token prediction.
    """
    if is_module:
        yield from _linear("input_proj", model.dim, 2 * model.dim, bias=False)
        for name in ("embedding_norm", "hidden_norm", "output_norm"):
            yield from _norm(name, model.dim, model)
    norm_names = {"pre": ("norm",), "post": ("post_norm",), "sandwich": ("norm", "post_norm")}
    if model.shared_norm:
        yield from _norm("shared_norm", model.dim, model)
    for edge in () if model.shared_norm else norm_names[model.norm_placement]:
        if parts.mixers:
            yield from _norm(f"attention_{edge}", model.dim, model)
        has_own = parts.feed_forward == "experts" and model.moe_separate_norms
        if parts.feed_forward != "none" and not (has_own and edge == "norm"):
            yield from _norm(f"mlp_{edge}", model.dim, model)
    if parts.mixers:
        yield from _connection("attention_connection", model)
    if parts.feed_forward != "none":
        yield from _connection("mlp_connection", model)
    for mixer in parts.mixers:
        shapes = _attention(model) if mixer == ATTENTION else _mixer(model, mixer)
        yield from ((f"{mixer}.{name}", shape) for name, shape in shapes)
    if parts.feed_forward == "experts":
        yield from _experts(model)
    elif parts.feed_forward == "dense":
        yield from _feed_forward("mlp", model.dim, model.dense_width(parts), model)
    if (width := model.layer_embedding_dim) is not None:
        yield from _linear("layer_embedding.gate", width, model.dim, bias=False)
        yield from _linear("layer_embedding.proj", model.dim, width, bias=False)
        yield from _norm("layer_embedding.norm", model.dim, model)


def _connection(name: str, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the parameters of the connection of a part with the residual streams."""
    if model.hyper_connections == "none":
        return
    from jaxforge.model.hyper_connections import CONNECTIONS  # imports JAX
    from jaxforge.model.linear import parameter_shapes

    connection = CONNECTIONS[model.hyper_connections]
    shapes = parameter_shapes(lambda declare: connection(model, declare, part=0))
    yield from ((f"{name}.{key}", shape) for key, shape in shapes.items())


def _stream_head(model: ModelConfig) -> dict[str, Shape]:
    """Return the parameters of the combination of the residual streams, if there is one."""
    if model.hyper_connections != "manifold":
        return {}
    from jaxforge.model.hyper_connections import StreamHead  # imports JAX
    from jaxforge.model.linear import parameter_shapes

    shapes = parameter_shapes(lambda declare: StreamHead(model, declare))
    return {f"stream_head.{name}": shape for name, shape in shapes.items()}


def _layer_embeddings(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the parameters of the embeddings of all layers, in the order of their names."""
    if (width := model.layer_embedding_dim) is not None:
        channels = model.n_layers * width
        yield "layer_embeddings.embedding.weight", (model.vocab_size, channels)
        yield "layer_embeddings.norm.weight", (width,)
        yield from _linear("layer_embeddings.proj", channels, model.dim, bias=False)


def _mixer(model: ModelConfig, mixer: str) -> Iterator[tuple[str, Shape]]:
    """Yield the parameters of a mixer as its module declares them."""
    from jaxforge.model.mixers import mixer_shapes  # imports JAX

    yield from mixer_shapes(model, mixer).items()


def _attention(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    queries, keys = model.n_heads * model.head_size, model.kv_heads * model.head_size
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        yield from _linear(f"{name}_proj", size, model.dim, bias=model.qkv_bias)
    if model.attention_output_gate:
        yield from _linear("gate_proj", queries, model.dim, bias=model.qkv_bias)
    yield from _linear("o_proj", model.dim, queries, bias=model.o_bias)
    if model.attention_sinks:
        yield "sinks", (model.n_heads,)
    if model.qk_norm:
        is_joint = model.qk_norm_scope != "head"
        yield "q_norm.weight", (queries if is_joint else model.head_size,)
        yield "k_norm.weight", (keys if is_joint else model.head_size,)


def _experts(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the feed-forward parameters of a layer with experts."""
    yield from _linear("mlp.router.gate", model.num_experts, model.dim, bias=model.moe_router_bias)
    if model.bias_update == "kempnerforge":
        yield "mlp.router.expert_bias", (model.num_experts,)
    if model.moe_expert_scales:
        yield "mlp.router.expert_scales", (model.num_experts,)
    if model.moe_separate_norms:
        of_parts = itertools.product(("routed", "shared"), ("norm", "post_norm"))
        for name in ("router.norm", *map("_".join, of_parts)):
            yield from _norm(f"mlp.{name}", model.dim, model)
    embed, width = model.expert_embed_dim, model.expert_dim
    yield from _feed_forward(EXPERTS.rstrip("."), embed, width, model)
    if (latent := model.moe_latent_dim) is not None:
        yield from _linear("mlp.latent_down_proj", latent, model.dim, bias=model.mlp_bias)
        yield from _linear("mlp.latent_up_proj", model.dim, latent, bias=model.mlp_bias)
    if model.shared_expert_dim:
        yield from _feed_forward("mlp.shared_expert", model.dim, model.shared_expert_dim, model)
        if model.moe_shared_expert_gate:
            yield from _linear("mlp.shared_expert_gate", 1, model.dim, bias=False)


def _feed_forward(
    name: str, embed: int, width: int, model: ModelConfig
) -> Iterator[tuple[str, Shape]]:
    for edge in ("gate", "up") if model.is_gated else ("up",):
        yield from _linear(f"{name}.{edge}_proj", width, embed, bias=model.mlp_bias)
    yield from _linear(f"{name}.down_proj", embed, width, bias=model.mlp_bias)


def _linear(name: str, outputs: int, inputs: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    # [out, in], as in torch.
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, size: int, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if model.norm_type == "layernorm" and model.norm_bias:
        yield f"{name}.bias", (size,)
