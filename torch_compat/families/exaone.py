"""EXAONE 4 (arXiv:2507.11407)."""

import reprlib

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION,
    GATED,
    OUTSIDE,
    POST_NORMS,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.values import integer


def _read(c: Config, where: str) -> Table:
    # Without a window, all layers are full and have positions.
    is_hybrid = c["sliding_window"] is not None
    period = c["sliding_window_pattern"]
    if is_hybrid and not c["layer_types"] and not integer()(period):
        raise UserError(
            f"{where}: sliding_window_pattern = {reprlib.repr(period)} is not a positive integer, "
            "which transformers requires. Set layer_types"
        )
    all_full = [FULL] * c["num_hidden_layers"]
    kinds = common.sliding_kinds(c) if is_hybrid else c["layer_types"] or all_full
    pattern = [kind == SLIDING or not is_hybrid for kind in kinds]
    table = common.llama(c, where) | common.windows(c, kinds, where) | {
        "norm_placement": "post", "qk_norm": True, "qk_norm_eps": c["rms_norm_eps"],
    }  # fmt: skip
    return table if all(pattern) else {**table, "rope_pattern": pattern}


def _write(model: ModelConfig) -> Table:
    kinds = [FULL if rope is None else SLIDING for rope in model.ropes]
    window = model.sliding_window
    if FULL in kinds:  # a window as long as the longest sequence has no effect
        window = window or model.max_seq_len
    return {
        **common.llama_keys(model),
        "sliding_window": window,
        "layer_types": [FULL] * model.n_layers if window is None else kinds,
    }


EXAONE4_FAMILY = Family(
    "exaone4",
    name_map(
        "hf-exaone4", "Exaone4ForCausalLM", *OUTSIDE, *ATTENTION, *QK_NORMS, *POST_NORMS, *GATED
    ),
    {**COMMON, "rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096,
     "sliding_window_pattern": 4, "layer_types": None},
    summary="EXAONE 4: norms after the sublayers, q/k norms; windows, and positions only in layers "
            "with one",
    read=_read,
    write=_write,
    # transformers writes 0 without a window, and older files have strings such as LLLG.
    ranges={"sliding_window_pattern": lambda v: v is None or isinstance(v, str) or integer(0)(v)},
)  # fmt: skip
