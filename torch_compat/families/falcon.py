"""TII's Falcon-H1: attention and Mamba-2 side by side in each layer, with constant factors."""

from typing import Any

from jaxforge.config.mixers import MAMBA2
from jaxforge.config.model import ATTENTION, ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, state_space
from torch_compat.families.common import BIASES, COMMON
from torch_compat.families.family import Config, Family, Table, name_map
from torch_compat.families.granite import BAMBA_RULES
from torch_compat.families.values import integer, is_size, nullable

_BOTH = f"{ATTENTION}+{MAMBA2}"
_NO_FACTORS = [1.0] * 5
_FACTORS = {
    "key_multiplier": 1.0, "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0, "ssm_multipliers": None,
    "mlp_multipliers": None, "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0,
}  # fmt: skip
"""Keys of constant factors, and their defaults in transformers."""
_GATED_NORMS = {(False, False): "none", (False, True): "none", (True, False): "after_gate",
                (True, True): "before_gate"}  # fmt: skip
"""(mamba_rms_norm, mamba_norm_before_gate) -> `mamba2.gated_norm`."""


def _sizes_of(count: int) -> Any:  # noqa: ANN401 (a check)
    """Return the check of lists of this many positive numbers."""
    return nullable(
        lambda value: isinstance(value, list) and len(value) == count and all(map(is_size, value))
    )


def _read(c: Config, where: str) -> Table:
    mamba2 = state_space.mamba2(c, where)[MAMBA2]
    mamba2["gated_norm"] = _GATED_NORMS[c["mamba_rms_norm"], c["mamba_norm_before_gate"]]
    factors = [c["ssm_in_multiplier"] * factor for factor in c["ssm_multipliers"] or _NO_FACTORS]
    mamba2["multipliers"] = [] if factors == _NO_FACTORS else factors
    table = common.llama(c, where) | {"mixer_pattern": [_BOTH], MAMBA2: mamba2}
    return table | _factors(c, where)


def _factors(c: Config, where: str) -> Table:
    """Read the factors outside of Mamba-2.

    A factor on the input of attention is the same factor on queries, keys and values. Factors on
    queries and keys are factors on scores, and those on values are factors on the output.

    Raises:
        UserError: biases are added between factors, or are in only one of Mamba-2's projections.
    """
    for key, bias in (("attention_in_multiplier", "attention_bias"),
                      ("ssm_in_multiplier", "mamba_proj_bias")):  # fmt: skip
        if c[bias] and c[key] != 1:
            raise UserError(
                f"{where}: jaxforge's model has no counterpart of {key} = {c[key]} with "
                f"{bias} = true"
            )
    if c["projectors_bias"] != c["mamba_proj_bias"]:
        raise UserError(
            f"{where}: projectors_bias = {c['projectors_bias']} must equal mamba_proj_bias = "
            f"{c['mamba_proj_bias']}: jaxforge's Mamba-2 has biases in both projections or in none"
        )
    before = c["attention_in_multiplier"]
    outputs = {ATTENTION: before * c["attention_out_multiplier"],
               MAMBA2: c["ssm_out_multiplier"]}  # fmt: skip
    return {
        **common.scale(common.head_size(c) ** -0.5 * c["key_multiplier"] * before**2, c),
        "mixer_multipliers": {name: factor for name, factor in outputs.items() if factor != 1},
        "mlp_multipliers": c["mlp_multipliers"] or [1.0, 1.0],
        "embedding_multiplier": c["embedding_multiplier"],
        # jaxforge divides logits.
        "logits_scaling": 1 / c["lm_head_multiplier"],
    }


def _write(model: ModelConfig) -> Table:
    mamba2, outputs = model.mamba2, model.mixer_multipliers
    scale = model.attention_scale or model.head_size**-0.5
    return {
        **common.llama_keys(model),
        **common.bias_keys(model),
        **state_space.mamba2_keys(model),
        "mamba_d_ssm": mamba2.inner_size,
        "mamba_expand": 2,  # without effect
        "projectors_bias": mamba2.proj_bias,
        "mamba_rms_norm": mamba2.gated_norm != "none",
        "mamba_norm_before_gate": mamba2.gated_norm != "after_gate",
        "key_multiplier": scale * model.head_size**0.5,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": outputs.get(ATTENTION, 1.0),
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": outputs.get(MAMBA2, 1.0),
        "ssm_multipliers": list(mamba2.multipliers) or _NO_FACTORS,
        "mlp_multipliers": list(model.mlp_multipliers),
        "embedding_multiplier": model.embedding_multiplier,
        "lm_head_multiplier": 1 / model.logits_scaling,
    }


FALCON_H1_FAMILY = Family(
    "falcon_h1",
    name_map("hf-falcon-h1", "FalconH1ForCausalLM", *BAMBA_RULES),
    {**COMMON, **BIASES, **state_space.DEFAULTS, **_FACTORS, "rms_norm_eps": 1e-5,
     "num_key_value_heads": 8, "mamba_d_ssm": 1024, "mamba_rms_norm": False,
     "mamba_norm_before_gate": True, "projectors_bias": False},
    summary="Falcon-H1: attention and Mamba-2 side by side in each layer; factors on keys, "
            "projections, outputs, feed-forwards, embeddings and logits",
    read=_read,
    write=_write,
    ranges={**state_space.RANGES, "mamba_d_ssm": nullable(integer()),
            "ssm_multipliers": _sizes_of(5), "mlp_multipliers": _sizes_of(2)},
    only={"hidden_act": "silu"},  # also the activation of convolutions
    unused=("attn_layer_indices", "calc_logits_for_entire_prompt", "layers_block_type",
            "mamba_use_mlp", "mlp_expansion_factor", "num_logits_to_keep", "time_step_floor",
            "time_step_max", "time_step_min", "time_step_rank", "use_mamba_kernels"),
)  # fmt: skip
