"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention and a sigmoid router with a bias."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import experts, latent
from torch_compat.families.family import (
    GATED,
    OUTSIDE,
    PRE_NORMS,
    PREDICTION,
    Config,
    Family,
    Table,
    name_map,
)

RULES = (
    *OUTSIDE, *PRE_NORMS, *GATED, *latent.RULES, *experts.EXPERTS, experts.BIAS,
    *experts.shared("shared_experts"), *PREDICTION,
)  # fmt: skip
DEFAULTS = {
    **latent.DEFAULTS, **experts.SIGMOID, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "moe_intermediate_size": 2048, "num_nextn_predict_layers": 1,
}  # fmt: skip
ONLY = {
    "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}  # fmt: skip


def read(c: Config, where: str) -> Table:
    """Read `[model]`."""
    return latent.read(c, where) | experts.sigmoid(c, where)


def write(model: ModelConfig) -> Table:
    """Return the keys that `read` reads."""
    return {
        **latent.keys(model),
        **experts.sigmoid_keys(model),
        "num_nextn_predict_layers": model.mtp_depth,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


FAMILY = Family(
    "deepseek_v3",
    name_map("hf-deepseek-v3", "DeepseekV3ForCausalLM", *RULES),
    DEFAULTS,
    read=read,
    write=write,
    only=ONLY,
    aliases={"num_mtp_layers": "num_nextn_predict_layers", "num_local_experts": "n_routed_experts"},
    unused=latent.UNUSED,
    further_layers_key="num_nextn_predict_layers",
)
