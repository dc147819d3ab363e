"""Removal of settings with side effects from configs of untrusted runs.

The author of a run or capsule may be untrusted. If a command uses a run without training it, the
config decides the computation, but never which files are written or which compiled code is loaded.
"""

from collections.abc import Mapping
from typing import Any

from jaxforge.config.facts import Flag, flagged
from jaxforge.config.job import JobConfig


def inert(values: Mapping[str, Any], run: str) -> dict[str, Any]:
    """Return the tables of a config without the settings that write files or load compiled code.

    Args:
        values: Section -> key -> value, as read.
        run: The run directory, which overrides `checkpoint.dir`.
    """
    removed = flagged(JobConfig, Flag.SIDE_EFFECT)
    remaining = {
        section: {key: value for key, value in table.items() if f"{section}.{key}" not in removed}
        if isinstance(table, Mapping) else table
        for section, table in values.items()
    }  # fmt: skip
    if isinstance(checkpoint := remaining.get("checkpoint", {}), Mapping):
        remaining["checkpoint"] = {**checkpoint, "dir": run}
    return remaining
