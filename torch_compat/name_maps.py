"""One table per dialect: how a code base names the parameters that `jaxforge.model` declares."""

from torch_compat.families import FAMILIES
from torch_compat.names.kempnerforge import KEMPNERFORGE, KEMPNERFORGE_PACKED
from torch_compat.names.table import NameMap
from torch_compat.names.torchtitan import TORCHTITAN, TORCHTITAN_2025

NAME_MAPS: dict[str, NameMap] = {
    dialect.name: dialect
    for dialect in (
        KEMPNERFORGE,
        KEMPNERFORGE_PACKED,
        TORCHTITAN,
        TORCHTITAN_2025,
        *(family.dialect for family in FAMILIES.values()),
    )
}
"""Every dialect by the name that the command line has for it."""
