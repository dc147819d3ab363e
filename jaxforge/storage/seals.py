"""Seals of JSON: a checksum of the values among them.

{"step": 70, ..., "crc32": 456}
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

_SEAL = "crc32"


def add_seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON with a checksum of itself."""
    return {**values, _SEAL: crc32(values)}


def check_seal(values: Mapping[str, Any], name: str) -> None:
    """Compare JSON with the checksum that it contains, if any.

    Raises:
        ValueError: the content differs from what was saved.
    """
    content = {key: value for key, value in values.items() if key != _SEAL}
    if values.get(_SEAL, crc32(content)) != crc32(content):
        raise ValueError(f"{name} is not what was saved")


def remove_seal(values: object, name: str) -> dict[str, Any]:
    """Return JSON without its checksum, which it must contain.

    Raises:
        ValueError: the content differs from what was saved, or has no checksum.
    """
    if not isinstance(values, dict) or _SEAL not in values:
        raise ValueError(f"{name} is incomplete")
    check_seal(values, name)
    return {key: value for key, value in values.items() if key != _SEAL}


def crc32(values: Any) -> int:  # noqa: ANN401 (any JSON)
    """Return the CRC-32 of JSON, independent of key order and white space."""
    # Through JSON once, so that tuples and lists, or keys 1 and "1", count as what is stored.
    return zlib.crc32(json.dumps(json.loads(json.dumps(values)), sort_keys=True).encode())
