"""Registry of dialects: tables of the names that other code bases give to our parameters."""

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.registry import REGISTRATION_HINT
from torch_compat.families import FAMILIES, Family
from torch_compat.names.kempnerforge import KEMPNERFORGE, KEMPNERFORGE_PACKED
from torch_compat.names.megatron import MEGATRON
from torch_compat.names.table import NameMap
from torch_compat.names.torchtitan import TORCHTITAN, TORCHTITAN_2025

NAME_MAPS: dict[str, NameMap] = {
    dialect.name: dialect
    for dialect in (
        KEMPNERFORGE,
        KEMPNERFORGE_PACKED,
        TORCHTITAN,
        TORCHTITAN_2025,
        MEGATRON,
        *(family.dialect for family in FAMILIES.values()),
    )
}
"""Command-line name -> dialect."""


def name_map(name: str) -> NameMap:
    """Return the dialect of a name.

    Raises:
        UserError: no dialect has this name.
    """
    if name not in NAME_MAPS:
        raise UserError(f"no dialect {name!r}; there are {', '.join(NAME_MAPS)}{REGISTRATION_HINT}")
    return NAME_MAPS[name]


def register_name_map(dialect: NameMap) -> None:
    """Register a dialect, such as that of a registered model.

    Raises:
        UserError: the name is taken.
    """
    if dialect.name in NAME_MAPS:
        raise UserError(f"dialect {dialect.name!r} is registered already: choose another name")
    NAME_MAPS[dialect.name] = dialect


def register_family(family: Family) -> None:
    """Register a Hugging Face family and its dialect.

    Raises:
        UserError: the `model_type` or the name of the dialect is taken.
    """
    if family.model_type in FAMILIES:
        raise UserError(f"family {family.model_type!r} is registered already: choose another name")
    register_name_map(family.dialect)
    FAMILIES[family.model_type] = family


def usual_dialect(model: ModelConfig) -> str:
    """Return the dialect in which checkpoints for PyTorch are written by default."""
    is_packed = model.is_moe and model.moe_packed_experts
    return (KEMPNERFORGE_PACKED if is_packed else KEMPNERFORGE).name
