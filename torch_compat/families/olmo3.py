"""OLMo 3: OLMo 2 with sliding windows, whose layers have unscaled rotary positions."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import FULL, SLIDING
from torch_compat.families.family import Config, Family, Table, name_map
from torch_compat.families.olmo2 import DEFAULTS, RULES, keys, norms


def _read(c: Config, where: str) -> Table:
    n_layers = c["num_hidden_layers"]
    every_fourth = [SLIDING if (i + 1) % 4 else FULL for i in range(n_layers)]
    table = common.shape(c) | common.feed_forward(c, where) | common.biases(c) | norms(c)
    positions = common.rotary_by_layer_kind(c, where, None)
    differ = "local_rope_theta" in positions
    table |= common.windows(c, c["layer_types"] or every_fourth, where, differ=differ)
    if "sliding_window" not in table:
        positions.pop("local_rope_theta", None)
    return table | positions


def _write(model: ModelConfig) -> Table:
    window = {"sliding_window": model.sliding_window, "layer_types": common.layer_kinds(model)}
    return {
        **keys(model),
        "rope_scaling": None,
        **common.rotary_by_layer_kind_keys(model),
        **window,
    }


FAMILY = Family(
    "olmo3",
    name_map("hf-olmo3", "Olmo3ForCausalLM", *RULES),
    {**DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None},
    read=_read,
    write=_write,
)
