"""Parameter names and config keys of experts that several families share."""

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from jaxforge.config.model import ModelConfig, every_nth
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.family import HF_NAME, NAME, Config, Table
from torch_compat.names.table import Rule

_PROJECTIONS = ("gate", "up", "down")
ROUTER = Rule(f"{NAME}mlp.router.gate.weight", f"{HF_NAME}mlp.gate.weight")
BIAS = Rule(f"{NAME}mlp.router.expert_bias", f"{HF_NAME}mlp.gate.e_score_correction_bias")
EXPERTS = (
    ROUTER,
    *(
        Rule(
            f"{NAME}mlp.experts.{{j}}.{m}_proj.weight",
            f"{HF_NAME}mlp.experts.{{j}}.{m}_proj.weight",
        )
        for m in _PROJECTIONS
    ),
)
BLOCK_SPARSE = (
    Rule(f"{NAME}mlp.router.gate.weight", f"{HF_NAME}block_sparse_moe.gate.weight"),
    *(
        Rule(
            f"{NAME}mlp.experts.{{j}}.{m}_proj.weight",
            f"{HF_NAME}block_sparse_moe.experts.{{j}}.{w}.weight",
        )
        for m, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    ),
)
"""Rules of a router and its experts by Mixtral's names."""


def shared(name: str) -> tuple[Rule, ...]:
    """Return the rules of the shared expert, which each family names differently."""
    return tuple(
        Rule(f"{NAME}mlp.shared_expert.{m}_proj.weight", f"{HF_NAME}mlp.{name}.{m}_proj.weight")
        for m in _PROJECTIONS
    )


SOFTMAX: Mapping[str, Any] = {"norm_topk_prob": False, "num_experts_per_tok": 8}
"""Keys of a softmax router and their defaults in transformers."""
SPARSE: Mapping[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None}
"""Qwen's keys that select the layers with experts."""
SIGMOID: Mapping[str, Any] = {
    "n_routed_experts": None, "num_experts_per_tok": None, "n_shared_experts": None,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "moe_intermediate_size": 1408,
}  # fmt: skip
"""DeepSeek-V3's keys and their defaults in the families that adopted them."""
FLOAT32: dict[str, str] = dict.fromkeys(("bfloat16", "float16"), r".*\.router\.gate\.weight")
"""`Family.float32` of families whose routers are in float32."""
KINDS, DENSE, SPARSE_LAYER = "mlp_layer_types", "dense", "sparse"
"""Key of the kind of each layer's feed-forward, and its values."""
LOSSES = ("output_router_logits", "router_aux_loss_coef")
"""Keys of auxiliary losses, which jaxforge sets per run."""


def softmax(c: Config, count: str, width: str) -> Table:
    """Read a softmax router and its experts.

    Args:
        c: the config.
        count: key of the number of experts.
        width: key of their width.
    """
    return {
        "num_experts": c[count],
        "moe_top_k": c["num_experts_per_tok"],
        "moe_expert_dim": c[width],
        "moe_norm_topk": c["norm_topk_prob"],
    }


def softmax_keys(model: ModelConfig, count: str, width: str) -> Table:
    """Return the keys that `softmax` reads."""
    return {
        count: model.num_experts,
        "num_experts_per_tok": model.moe_top_k,
        width: model.expert_dim,
        "norm_topk_prob": model.moe_norm_topk,
    }


def sparse(c: Config, where: str) -> Table:
    """Read the period of layers with experts, and leading layers without.

    Raises:
        UserError: other layers than the first ones are excepted from the period.
    """
    step, dense = c["decoder_sparse_step"], set(c["mlp_only_layers"] or ())
    layers = range(c["num_hidden_layers"])
    # Qwen counts layers from 1: with step 2, layers 1, 3, 5, ... of 0, 1, 2, ... have experts.
    kinds = [(i + 1) % step == 0 and i not in dense for i in layers]
    if not any(kinds):
        raise UserError(f"{where}: no layer has experts with decoder_sparse_step = {step}")
    first = kinds.index(True)
    if any((i + 1) % step == 0 and not has for i, has in enumerate(kinds) if i >= first):
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of mlp_only_layers = "
            f"{reprlib.repr(c['mlp_only_layers'])}: only the first layers may lack "
            "experts, and those between decoder_sparse_step"
        )
    return {"feed_forward_pattern": every_nth(step), "moe_first_dense_layers": first}


def period(model: ModelConfig) -> int:
    """Return n if every n-th layer has experts."""
    return max(1, len(model.feed_forward_pattern))


def sparse_keys(model: ModelConfig) -> Table:
    """Return the keys that `sparse` reads."""
    step = period(model)
    # Layers that have experts by the period alone.
    skipped = range(step - 1, min(model.moe_first_dense_layers, model.n_layers), step)
    return {"decoder_sparse_step": step, "mlp_only_layers": list(skipped)}


def chosen_layers(layers: Collection[int], c: Config, where: str) -> Table:
    """Return the first layer with experts and their period, from the indices of such layers.

    Raises:
        UserError: the layers have no period.
    """
    n, first = c["num_hidden_layers"], min(layers, default=c["num_hidden_layers"])
    later = [i for i in layers if i > first]
    # With a single such layer, any period fits that reaches it first.
    step = min(later) - first if later else first + 1
    if first == n or set(layers) != {i for i in range(first, n) if (i + 1) % step == 0}:
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of experts in layers "
            f"{reprlib.repr(sorted(layers))} of {n}: they must be every n-th layer from some "
            "layer on"
        )
    return {"feed_forward_pattern": every_nth(step), "moe_first_dense_layers": first}


def listed_layers(c: Config, where: str, dense: int = 1) -> Table:
    """Return the first layer with experts and their period from `mlp_layer_types`.

    Args:
        c: the config.
        where: the file, for messages.
        dense: number of first layers without experts, if the key is null.

    Raises:
        UserError: a kind is unknown, or the layers have no period.
    """
    n_layers = c["num_hidden_layers"]
    kinds = c[KINDS] or [DENSE if i < dense else SPARSE_LAYER for i in range(n_layers)]
    common.check_layer_types(kinds, n_layers, (DENSE, SPARSE_LAYER), where, KINDS)
    return chosen_layers([i for i, kind in enumerate(kinds) if kind == SPARSE_LAYER], c, where)


def listed_layer_keys(model: ModelConfig) -> Table:
    """Return the key that `listed_layers` reads."""
    return {KINDS: [SPARSE_LAYER if has else DENSE for has in model.has_experts]}


def sigmoid(c: Config, where: str) -> Table:
    """Read DeepSeek-V3's router, experts and shared experts (arXiv:2412.19437).

    Raises:
        UserError: the number of experts or of shared experts is missing.
    """
    needed = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts")
    if missing := [key for key in needed if c[key] is None]:
        raise UserError(f"{where}: the config does not give {', '.join(missing)}")
    # A group is scored by the sum of its two best experts.
    if c["n_routed_experts"] < 2 * c["n_group"]:
        raise UserError(f"{where}: n_group = {c['n_group']}: a group needs at least two experts")
    return {
        **shared_sizes(c),
        "moe_router": "sigmoid_topk",
        "moe_bias_update": "sign",
        "moe_norm_topk": c["norm_topk_prob"],
        "moe_routed_scaling": c["routed_scaling_factor"],
        "moe_groups": c["n_group"],
        "moe_top_k_groups": c["topk_group"],
    }


def shared_sizes(c: Config) -> Table:
    """Read the numbers and widths of DeepSeek's routed and shared experts, and its dense layers."""
    width = c["moe_intermediate_size"]
    return {
        "num_experts": c["n_routed_experts"],
        "moe_top_k": c["num_experts_per_tok"],
        "moe_expert_dim": width,
        "moe_shared_experts": c["n_shared_experts"],
        "moe_shared_expert_dim": width * c["n_shared_experts"],
        "moe_first_dense_layers": c["first_k_dense_replace"],
    }


def sigmoid_keys(model: ModelConfig) -> Table:
    """Return the keys that `sigmoid` reads."""
    return {
        **shared_size_keys(model),
        "norm_topk_prob": model.moe_norm_topk,
        "routed_scaling_factor": model.moe_routed_scaling,
        "n_group": model.moe_groups,
        "topk_group": model.moe_top_k_groups,
    }


def shared_size_keys(model: ModelConfig) -> Table:
    """Return the keys that `shared_sizes` reads."""
    return {
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.moe_top_k,
        "moe_intermediate_size": model.expert_dim,
        "n_shared_experts": model.shared_expert_dim // model.expert_dim,
        # The appended True stands for the end: a model without experts is dense throughout.
        "first_k_dense_replace": (*model.has_experts, True).index(True),
    }
