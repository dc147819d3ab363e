"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): latent attention and a softmax router by groups."""

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import experts, latent
from torch_compat.families.family import (
    GATED,
    OUTSIDE,
    PRE_NORMS,
    Config,
    Family,
    Table,
    name_map,
)

_GREEDY, _BY_GROUPS = "greedy", "group_limited_greedy"


def _read(c: Config, where: str) -> Table:
    method = c["topk_method"]
    if method not in (_GREEDY, _BY_GROUPS):
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of topk_method = {method!r}; supported "
            f"are {_GREEDY} and {_BY_GROUPS}"
        )
    needed = ["num_experts_per_tok", *(["n_group", "topk_group"] if method == _BY_GROUPS else [])]
    if missing := [key for key in needed if c[key] is None]:
        raise UserError(f"{where}: the config does not give {', '.join(missing)}")
    table = latent.read(c, where) | experts.shared_sizes(c) | {
        "moe_norm_topk": False,
        "moe_routed_scaling": c["routed_scaling_factor"],
    }  # fmt: skip
    if method == _GREEDY:
        return table
    return table | {
        "moe_groups": c["n_group"],
        "moe_top_k_groups": c["topk_group"],
        "moe_group_score": "max",
    }


def _write(model: ModelConfig) -> Table:
    has_groups = model.moe_groups != model.moe_top_k_groups
    return {
        **latent.keys(model),
        **experts.shared_size_keys(model),
        "norm_topk_prob": False,
        "routed_scaling_factor": model.moe_routed_scaling,
        "topk_method": _BY_GROUPS if has_groups else _GREEDY,
        "n_group": model.moe_groups,
        "topk_group": model.moe_top_k_groups,
        "scoring_func": "softmax",
    }


FAMILY = Family(
    "deepseek_v2",
    name_map(
        "hf-deepseek-v2", "DeepseekV2ForCausalLM", *OUTSIDE, *PRE_NORMS, *GATED, *latent.RULES,
        *experts.EXPERTS, *experts.shared("shared_experts"),
    ),
    {**latent.DEFAULTS, "n_routed_experts": 64, "num_experts_per_tok": None, "n_shared_experts": 2,
     "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0, "topk_method": _GREEDY,
     "n_group": None, "topk_group": None, "first_k_dense_replace": 0},
    read=_read,
    write=_write,
    only={"norm_topk_prob": False, "scoring_func": "softmax", "mlp_bias": False,
          "moe_layer_freq": 1},
    aliases={"num_experts": "n_routed_experts"},
    unused=latent.UNUSED,
)  # fmt: skip
