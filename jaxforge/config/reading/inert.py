"""Removal of settings with side effects from configs of untrusted runs.

The author of a run or capsule may be untrusted. If a command uses a run without training it, the
config decides the computation, but never which files are written or which compiled code is loaded.
"""

from collections.abc import Mapping
from typing import Any

from jaxforge.config.metrics import WRITERS

_LEFT_OUT = {
    "data": ("mixture_file", "cache_dir"),
    "train": ("compilation_cache_dir", "executable"),
    "checkpoint": (
        "non_persistent_interval", "non_persistent_dir", "replica_interval", "replica_dir",
        "export_interval", "export_last",
    ),
    "metrics": (
        "writers", "log_progress", "prometheus_port", *(f"enable_{name}" for name in WRITERS),
    ),
    "profiling": ("enable", "trace_dir"),
}  # fmt: skip


def inert(values: Mapping[str, Any], run: str) -> dict[str, Any]:
    """Return the tables of a config without the settings that write files or load compiled code.

    Args:
        values: Section -> key -> value, as read.
        run: The run directory, which overrides `checkpoint.dir`.
    """
    remaining = dict(values)
    for section, keys in _LEFT_OUT.items():
        table = remaining.get(section)
        if isinstance(table, Mapping):
            remaining[section] = {key: value for key, value in table.items() if key not in keys}
    if isinstance(checkpoint := remaining.get("checkpoint", {}), Mapping):
        remaining["checkpoint"] = {**checkpoint, "dir": run}
    return remaining
