"""Forms of KempnerForge's config files that differ from jaxforge's, rewritten to the latter.

plugins = ["my_module"]            [plugins] modules = ["my_module"]
model.head_dim_override = 128      model.head_dim = 128
dim = 4096 (no table at all)       [model] dim = 4096, as in KempnerForge's configs/model
"""

from collections.abc import Mapping
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.reading.lines import Path
from jaxforge.errors import UserError

_HEAD_DIM = "head_dim_override"


def rewrite(
    values: dict[Any, Any], lines: Mapping[Path, int], source: str
) -> tuple[dict[Any, Any], dict[Path, int]]:
    """Return the tables of a file and the lines of its keys, in jaxforge's form.

    Args:
        values: Section -> key -> value, as the file gives them.
        lines: Path of each key -> line.
        source: Source of the tables, for messages.

    Raises:
        UserError: If the file sets head_dim and head_dim_override to different values.
    """
    values, lines = dict(values), dict(lines)
    if _is_model_alone(values):
        values = {"model": values}
        lines = {("model", *path): line for path, line in lines.items()}
    if isinstance(values.get("plugins"), list):
        values["plugins"] = {"modules": values["plugins"]}
        if ("plugins",) in lines:
            lines["plugins", "modules"] = lines["plugins",]
    model = values.get("model")
    if isinstance(model, dict) and _HEAD_DIM in model:
        values["model"] = _with_head_dim(model, source)
        if ("model", _HEAD_DIM) in lines:
            lines["model", "head_dim"] = lines.pop(("model", _HEAD_DIM))
    return values, lines


def _is_model_alone(values: Mapping[Any, Any]) -> bool:
    keys = {*ModelConfig.model_fields, _HEAD_DIM}
    return bool(values) and values.keys() <= keys and not values.keys() & JobConfig.model_fields


def _with_head_dim(model: Mapping[str, Any], source: str) -> dict[str, Any]:
    head_dim = model[_HEAD_DIM]
    if model.get("head_dim", head_dim) != head_dim:
        raise UserError(
            f"{source}: model.head_dim = {model['head_dim']} and model.{_HEAD_DIM} = {head_dim} "
            "are two names of one key: remove one"
        )
    return {key: value for key, value in model.items() if key != _HEAD_DIM} | {"head_dim": head_dim}
