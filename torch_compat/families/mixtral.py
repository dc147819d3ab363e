"""Mixtral (arXiv:2401.04088): Mistral with experts in every layer."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import experts
from torch_compat.families.common import COMMON, llama, llama_keys, uniform_window, window_keys
from torch_compat.families.family import (
    ATTENTION,
    OURS,
    OUTSIDE,
    PRE_NORMS,
    THEIRS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.names.table import Rule

_MOE = f"{THEIRS}block_sparse_moe."
_EXPERTS = (
    Rule(f"{OURS}mlp.router.gate.weight", f"{_MOE}gate.weight"),
    *(
        Rule(f"{OURS}mlp.experts.{{j}}.{ours}_proj.weight", f"{_MOE}experts.{{j}}.{w}.weight")
        for ours, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    ),
)
_SIZES = ("num_local_experts", "intermediate_size")


def _read(c: Config, where: str) -> Table:
    table = llama(c, where) | uniform_window(c, where)
    return table | experts.softmax({**c, "norm_topk_prob": True}, *_SIZES)


def _write(model: ModelConfig) -> Table:
    keys = {**llama_keys(model), **window_keys(model), **experts.softmax_keys(model, *_SIZES)}
    return {key: value for key, value in keys.items() if key != "norm_topk_prob"}


FAMILY = Family(
    "mixtral",
    name_map("hf-mixtral", "MixtralForCausalLM", *OUTSIDE, *PRE_NORMS, *ATTENTION, *_EXPERTS),
    {**COMMON, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
     "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    read=_read,
    write=_write,
    unused=("max_window_layers", "use_sliding_window", "router_jitter_noise", *experts.LOSSES),
)  # fmt: skip
