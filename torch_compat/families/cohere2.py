"""Command R7B and Command A: Command R with windows; only layers with one have positions."""

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import cohere, common
from torch_compat.families.common import FULL, SLIDING
from torch_compat.families.family import Config, Family, Table, name_map

_DEFAULTS = {key: value for key, value in cohere.DEFAULTS.items() if key != "use_qk_norm"}


def _read(c: Config, where: str) -> Table:
    if c["sliding_window"] is None:
        raise UserError(
            f"{where}: sliding_window = None: layers without a window have no positions"
        )
    kinds = common.sliding_kinds(c)
    table = cohere.read({**c, "use_qk_norm": False}, where) | common.windows(c, kinds, where)
    pattern = [kind == SLIDING for kind in kinds]
    return table if all(pattern) else {**table, "rope_pattern": pattern}


def _write(model: ModelConfig) -> Table:
    return {
        **cohere.write(model),
        "sliding_window": model.sliding_window or model.max_seq_len,
        "layer_types": [FULL if rope is None else SLIDING for rope in model.ropes],
    }


FAMILY = Family(
    "cohere2",
    name_map("hf-cohere2", "Cohere2ForCausalLM", *cohere.RULES),
    {**_DEFAULTS, "rope_theta": 10000.0, "sliding_window": 4096, "layer_types": None,
     "sliding_window_pattern": 4},
    read=_read,
    write=_write,
    only={"use_qk_norm": False, "use_gated_activation": True, "use_parallel_block": True,
          "position_embedding_type": "rope_gptj", "rotary_pct": 1.0},
    names=cohere.NAMES,
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    unused=("cache_implementation", "order_of_interleaved_layers", "use_embedding_sharing",
            "use_parallel_embedding"),
)  # fmt: skip
