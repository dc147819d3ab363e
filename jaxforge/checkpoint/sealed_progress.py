"""Sealed `progress/metadata` of a checkpoint: checksums of itself and of the stored config.

    {"step": 70, ..., "config_crc32": 123, "crc32": 456}

A restore needs the data position, the counts and the run id as much as the arrays, whose hashes are
in `checksums`. The seal is in the file itself because the file is replaced when an evaluation ends
after the save (`Checkpoints.amend`). Files of versions without a seal are read too.
"""

from collections.abc import Mapping
from typing import Any

from jaxforge.state.progress import Progress
from jaxforge.storage.seals import add_seal, check_seal, crc32

_CONFIG = "config_crc32"


def seal_progress(progress: Progress, config_crc32: int | None) -> dict[str, Any]:
    """Return the JSON of `progress/metadata`.

    Args:
        progress: the counters.
        config_crc32: `crc32` of the config stored in the same checkpoint; None if unknown.
    """
    return add_seal(progress.to_json() | ({} if config_crc32 is None else {_CONFIG: config_crc32}))


def unseal_progress(values: Mapping[str, Any], step: int | None = None) -> Progress:
    """Return the counters of `progress/metadata`.

    Args:
        values: JSON of the file.
        step: step in the name of the directory. None: any step, as for the conversion of a single
            checkpoint.

    Raises:
        ValueError: the content differs from what was saved, or is of another step.
    """
    check_seal(values, "progress/metadata")
    progress = Progress.from_json(dict(values))
    if step not in (None, progress.step):
        raise ValueError(f"progress/metadata is of step {progress.step}, not of step {step}")
    return progress


def stored_config_crc32(values: Mapping[str, Any]) -> int | None:
    """Return the checksum of the config from `progress/metadata`, if any."""
    return values.get(_CONFIG)


def check_config(values: Mapping[str, Any], config: Any) -> None:  # noqa: ANN401 (any JSON)
    """Compare a config with its checksum in the JSON of `progress/metadata`, if any.

    Raises:
        ValueError: the config differs from what was saved.
    """
    if stored_config_crc32(values) not in (None, crc32(config)):
        raise ValueError("config/metadata is not what was saved")
