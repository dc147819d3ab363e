"""Names of Megatron-Core's GPT model, and the layouts in which checkpoints store its tensors.

The name map has one entry per layer and expert, with separate gate and up, as
`singleton_local_shards` stores them. `separate` converts the other layouts:

    decoder.layers.mlp.linear_fc1.weight            [L, 2F, H]   all layers stacked
    decoder.layers.mlp.experts.experts.linear_fc1.weight [L, E, 2F, H]   all experts, too
    decoder.layers.0.mlp.experts.linear_fc1.weight3 [2F, H]      grouped experts of `fsdp_dtensor`
    decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight   sequential experts
    mtp.layers.0.transformer_layer.mlp.linear_fc2.weight   multi-token prediction: layer L
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from jaxforge.config.mixers import LATENT_ATTENTION, MAMBA2
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.formats import limits
from torch_compat.formats.lazy import LazyTensor, interleave_rows, stack
from torch_compat.names.table import (
    EMBEDDING,
    HEAD,
    LATENT_KEYS,
    LATENT_QUERIES,
    POSITIONS,
    DepthwiseConvolution,
    Fused,
    NameMap,
    Rule,
)

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
_NAME, _KEY = "layers.{i}.", "decoder.layers.{i}."
_ATTENTION, _MLP = f"{_KEY}self_attention.", f"{_KEY}mlp."
_EXPERTS = f"{_MLP}experts.experts.{{j}}."
_LATENT = f"{_NAME}{LATENT_ATTENTION}."
_STATE_SPACE, _MIXER = f"{_NAME}{MAMBA2}.", f"{_KEY}mixer."
MODULE_NORM = "enorm.weight"
"""Last part of a key that only modules of multi-token prediction have."""


def rows_by_group(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of queries, keys and values of a fused matrix, grouped by key head."""
    queries = model.n_heads // model.kv_heads
    rows = np.arange((queries + 2) * model.kv_heads * model.head_size)
    # [group, queries of the group + key + value, channel]
    groups = rows.reshape(model.kv_heads, queries + 2, model.head_size)
    return [groups[:, :queries].reshape(-1), groups[:, -2].reshape(-1), groups[:, -1].reshape(-1)]


def _linears(prefix: str, key: str, *, biases: bool = True) -> Iterator[Rule]:
    """Yield the rules of a feed-forward network."""
    for kind in ("weight", "bias") if biases else ("weight",):
        optional = kind == "bias"
        yield Rule(f"{prefix}gate_proj.{kind}", f"{key}linear_fc1.{kind}_w", optional=optional)
        yield Rule(f"{prefix}up_proj.{kind}", f"{key}linear_fc1.{kind}_v", optional=optional)
        yield Rule(f"{prefix}down_proj.{kind}", f"{key}linear_fc2.{kind}", optional=optional)


_PROJECTIONS = ("z", "x", "B", "C", "dt")  # parts in which `torch_dist` stores `in_proj` of Mamba-2

MEGATRON = NameMap(
    "megatron",
    "Megatron-Core's GPT model",
    (
        Rule(EMBEDDING, WORD_EMBEDDINGS),
        Rule(POSITIONS, "embedding.position_embeddings.weight", optional=True),
        Rule(HEAD, "output_layer.weight"),
        *(
            rule
            for kind in ("weight", "bias")
            for rule in (
                Rule(f"norm.{kind}", f"decoder.final_layernorm.{kind}"),
                Rule(f"{_NAME}attention_norm.{kind}", f"{_ATTENTION}linear_qkv.layer_norm_{kind}"),
                Rule(f"{_NAME}mlp_norm.{kind}", f"{_MLP}linear_fc1.layer_norm_{kind}"),
                *(
                    Rule(
                        f"{_NAME}attention.{m}_proj.{kind}",
                        f"{_ATTENTION}linear_qkv.{kind}",
                        Fused(part, rows_by_group),
                    )
                    for part, m in enumerate("qkv")
                ),
                Rule(f"{_NAME}attention.o_proj.{kind}", f"{_ATTENTION}linear_proj.{kind}"),
            )
        ),
        *(
            Rule(f"{_NAME}attention.{m}_norm.weight", f"{_ATTENTION}{m}_layernorm.weight")
            for m in "qk"
        ),
        *_linears(f"{_NAME}mlp.", _MLP),
        Rule(f"{_NAME}mlp.router.gate.weight", f"{_MLP}router.weight"),
        Rule(f"{_NAME}mlp.router.gate.bias", f"{_MLP}router.bias", optional=True),
        Rule(f"{_NAME}mlp.router.expert_bias", f"{_MLP}router.expert_bias", optional=True),
        *_linears(f"{_NAME}mlp.experts.{{j}}.", _EXPERTS),
        Rule(f"{_NAME}mlp.latent_down_proj.weight", f"{_MLP}fc1_latent_proj.weight"),
        Rule(f"{_NAME}mlp.latent_up_proj.weight", f"{_MLP}fc2_latent_proj.weight"),
        *_linears(f"{_NAME}mlp.shared_expert.", f"{_MLP}shared_experts.", biases=False),
        Rule(f"{_NAME}mlp.shared_expert_gate.weight", f"{_MLP}shared_experts.gate_weight"),
        *(
            Rule(f"{_LATENT}{name}.weight", f"{_ATTENTION}{key}.weight", change, optional=True)
            for name, key, change in (
                ("q_proj", "linear_q_proj", LATENT_QUERIES),
                ("q_a_proj", "linear_q_down_proj", None),
                ("q_a_norm", "q_layernorm", None),
                ("q_b_proj", "linear_q_up_proj", LATENT_QUERIES),
                ("kv_a_proj", "linear_kv_down_proj", LATENT_KEYS),
                ("kv_a_norm", "kv_layernorm", None),
                ("kv_b_proj", "linear_kv_up_proj", None),
                ("o_proj", "linear_proj", None),
            )
        ),
        *(
            Rule(f"{_STATE_SPACE}{name}", f"{_MIXER}{key}", optional=True)
            for name, key in (
                ("a_log", "A_log"),
                ("dt_bias", "dt_bias"),
                ("skip", "D"),
                ("norm.weight", "norm.weight"),
                ("out_proj.weight", "out_proj.weight"),
                *((f"{m.lower()}_proj.weight", f"in_proj.weight.{m}") for m in _PROJECTIONS),
                *((f"{m.lower()}_conv.bias", f"conv1d.bias.{m}") for m in "xBC"),
            )
        ),
        *(
            Rule(f"{_STATE_SPACE}{m.lower()}_conv.weight", f"{_MIXER}conv1d.weight.{m}",
                 DepthwiseConvolution(), optional=True)
            for m in "xBC"
        ),
        *(
            Rule(f"{_NAME}{name}.{kind}", f"{_KEY}{key}.{kind}", optional=True)
            for kind in ("weight", "bias")
            for name, key in (
                ("embedding_norm", "enorm"),
                ("hidden_norm", "hnorm"),
                ("input_proj", "eh_proj"),
                ("output_norm", "final_layernorm"),
            )
        ),
    ),
)  # fmt: skip

_RENAMED = (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
    (r"\.linear_(q|kv)_up_proj\.layer_norm_", r".\1_layernorm."),
    (r"\.mixer\.in_proj\.layer_norm_", ".self_attention.linear_qkv.layer_norm_"),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (
        r"\.mlp\.experts\.linear_fc(\d)\.(weight|bias)(\d+)",
        r".mlp.experts.experts.\3.linear_fc\1.\2",
    ),
    (r"\.mlp\.experts\.local_experts\.", ".mlp.experts.experts."),
)
"""Names of layers without TransformerEngine, of experts in `fsdp_dtensor`, of norms of latents and
of hybrid models -> the map's names."""
_MODULE = re.compile(r"mtp\.layers\.(\d{1,9})\.(?:(?:transformer|mtp_model)_layer\.)?(.+)")
_IN_LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.(.+)")
_MAX_TENSORS = 2 * limits.EXPERTS
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d)(.+)")
_STACKED_EXPERTS = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts\.experts\.)(?!\d)(.+)")
_FC1 = re.compile(r"(.*\.)linear_fc1\.(weight|bias)")


def modules_as_layers(tensors: Mapping[str, LazyTensor], n_layers: int) -> dict[str, LazyTensor]:
    """Return tensors with modules of multi-token prediction as layers from `n_layers` on."""

    def renamed(key: str) -> str:
        match = _MODULE.fullmatch(key)
        return f"decoder.layers.{n_layers + int(match[1])}.{match[2]}" if match else key

    return {renamed(key): tensor for key, tensor in tensors.items()}


def count_layers(tensors: Mapping[str, LazyTensor]) -> int:
    """Return the number of layers, without modules of multi-token prediction."""
    numbers = [int(match[1]) + 1 for key in tensors if (match := _IN_LAYER.fullmatch(key))]
    stacked = [t.shape[0] for key, t in tensors.items() if _STACKED.fullmatch(key) and t.shape]
    return max([*numbers, *stacked], default=0)


def separate(tensors: Mapping[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    """Return tensors by the names of the map: per layer and expert, with separate gate and up.

    Args:
        tensors: key -> tensor, without prefixes.
        where: the checkpoint, for messages.

    Raises:
        UserError: two keys belong to one parameter, or there are too many layers or experts.
    """
    return dict(_split_gates(unstack(tensors, where)))


def unstack(tensors: Mapping[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    """Return tensors per layer and expert, with gate and up in one tensor.

    Args:
        tensors: key -> tensor, without prefixes.
        where: the checkpoint, for messages.

    Raises:
        UserError: two keys belong to one parameter, or there are too many layers or experts.
    """
    renamed: dict[str, LazyTensor] = {}
    for key, tensor in tensors.items():
        name = key
        for pattern, usual in _RENAMED:
            name = re.sub(pattern, usual, name)
        if name in renamed:
            raise UserError(f"{where}: {key} and another key are both {name}")
        renamed[name] = tensor
    return _unstacked(_unstacked(renamed, _STACKED, where), _STACKED_EXPERTS, where)


def is_gated(key: str, tensors: Mapping[str, LazyTensor]) -> bool:
    """Return whether a tensor holds gate and up: twice the rows that `linear_fc2` has columns."""
    width = _width(key, tensors)
    return width is not None and tensors[key].shape[0] == 2 * width


def _width(key: str, tensors: Mapping[str, LazyTensor]) -> int | None:
    """Return the width of the feed-forward of a `linear_fc1`; None for any other tensor."""
    match = _FC1.fullmatch(key)
    # linear_fc1 [width or 2 width, hidden], linear_fc2 [hidden, width]
    down = tensors.get(f"{match[1]}linear_fc2.weight") if match else None
    return down.shape[-1] if down is not None and down.shape and tensors[key].shape else None


def _unstacked(
    tensors: Mapping[str, LazyTensor], pattern: re.Pattern[str], where: str
) -> dict[str, LazyTensor]:
    """Split the tensors that a pattern matches along their first dimension."""
    single: dict[str, LazyTensor] = {}
    for key, tensor in tensors.items():
        match = pattern.fullmatch(key)
        if not match:
            single[key] = tensor
            continue
        # Before the split: the first dimension of an untrusted tensor may be huge.
        if not tensor.shape or len(single) + tensor.shape[0] > _MAX_TENSORS:
            raise UserError(f"{where}: {key} is {list(tensor.shape)}, too many layers or experts")
        single |= {f"{match[1]}{i}.{match[2]}": tensor.part(i) for i in range(tensor.shape[0])}
    return single


def _split_gates(tensors: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors with separate gate (`_w`) and up (`_v`); without a gate, only up."""
    for key, tensor in tensors.items():
        width = _width(key, tensors)
        if width is None:
            yield key, tensor
        elif is_gated(key, tensors):
            # First the rows of the gate, then those of up.
            yield f"{key}_w", tensor.rows(np.arange(width))
            yield f"{key}_v", tensor.rows(np.arange(width, 2 * width))
        else:
            yield f"{key}_v", tensor


def to_torch_dist(tensors: Mapping[str, LazyTensor], model: ModelConfig) -> dict[str, LazyTensor]:
    """Return tensors by the names and in the layout of `torch_dist`.

    Equal layers are stacked in one tensor. If some layers have experts and others do not, layers
    keep their numbers, and only the experts of each layer are stacked.

    Args:
        tensors: name in the map -> tensor.
        model: config of the model.
    """
    single = dict(join_gates(tensors))
    renamed = {
        _module_key(_usual_name(key, model), model): tensor for key, tensor in single.items()
    }
    experts = _restacked(renamed, re.compile(r"(.*\.mlp\.experts\.experts\.)(\d+)\.(.+)"))
    # `torch_dist` can only stack layers that have the same parameters.
    if len(model.stacks) > 1:
        return experts
    return _restacked(experts, re.compile(r"(decoder\.layers\.)(\d+)\.(.+)"))


def _module_key(key: str, model: ModelConfig) -> str:
    """Return a key of the map with layers from `n_layers` on as modules again."""
    match = _IN_LAYER.fullmatch(key)
    if match is None or int(match[1]) < model.n_layers:
        return key
    is_own = match[2].startswith(("enorm.", "hnorm.", "eh_proj.", "final_layernorm."))
    within = "" if is_own else "transformer_layer."
    return f"mtp.layers.{int(match[1]) - model.n_layers}.{within}{match[2]}"


def _usual_name(key: str, model: ModelConfig) -> str:
    """Return TransformerEngine's name of a key; the norm before experts is a separate module."""
    match = re.fullmatch(r"(decoder\.layers\.(\d+)\.)mlp\.linear_fc1\.layer_norm_(.+)", key)
    # A module of multi-token prediction is like the last layer.
    if match and model.has_experts[min(int(match[2]), model.n_layers - 1)]:
        return f"{match[1]}pre_mlp_layernorm.{match[3]}"
    return key


def join_gates(tensors: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors with gate and up in one tensor, gate first."""
    for key, tensor in tensors.items():
        if key.endswith(("weight_w", "bias_w")):
            continue
        if not key.endswith(("weight_v", "bias_v")):
            yield key, tensor
            continue
        gate = tensors.get(f"{key[:-1]}w")
        n = tensor.shape[0]
        both = [np.arange(n), np.arange(n, 2 * n)]
        yield key[:-2], tensor if gate is None else interleave_rows([gate, tensor], both)


def _restacked(
    tensors: Mapping[str, LazyTensor], pattern: re.Pattern[str]
) -> dict[str, LazyTensor]:
    """Stack the tensors whose names differ only in a number."""
    parts: dict[str, dict[int, LazyTensor]] = {}
    whole: dict[str, LazyTensor] = {}
    for key, tensor in tensors.items():
        if match := pattern.fullmatch(key):
            parts.setdefault(f"{match[1]}{match[3]}", {})[int(match[2])] = tensor
        else:
            whole[key] = tensor
    stacked = {key: stack([of_key[i] for i in sorted(of_key)]) for key, of_key in parts.items()}
    return {**whole, **stacked}
