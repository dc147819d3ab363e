"""Keys that earlier versions of jaxforge had.

Configs that earlier runs stored name every key. A retired key with its default value is ignored,
and any other value is an unknown key, whose message has a note.
"""

from collections.abc import Mapping
from typing import Any

_ALIBI = "retired with ALiBi, BLOOM and MPT: position_embedding is rotary or learned"

RETIRED: dict[str, tuple[Any, str]] = {
    "model.alibi_max_bias": (8.0, _ALIBI),
    "model.embedding_norm": (False, "retired with BLOOM: remove it"),
    "model.head_bias": (False, "retired with GPT-J, Phi-1 and Phi-2: remove it"),
}
"""Key -> its default value, and the note of the message about another value."""


def without_retired_defaults(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the tables of a config without retired keys that have their default values."""
    remaining = dict(values)
    for name, (default, _) in RETIRED.items():
        section, key = name.split(".")
        table = remaining.get(section)
        if isinstance(table, Mapping) and key in table and table[key] == default:
            remaining[section] = {k: value for k, value in table.items() if k != key}
    return remaining
