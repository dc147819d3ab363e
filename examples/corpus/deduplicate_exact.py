"""Drop documents whose text has occurred before: `--map FILE:same_text`.

    jaxforge prepare texts/ --output data --map examples/corpus/deduplicate_exact.py:same_text

The first occurrence in the order of the inputs stays, whatever the number of processes. Texts are
compared without upper case and with single blanks. An extra pass reads all inputs.
"""

from typing import Any

from jaxforge.data.corpus.maps import drop_repeated

TEXT = "text"
"""Field of the text."""


@drop_repeated
def same_text(record: dict[str, Any]) -> list[bytes]:
    """Return the normalized text as the record's key."""
    return [" ".join(record[TEXT].lower().split()).encode("utf-8", errors="replace")]


@drop_repeated
def same_url(record: dict[str, Any]) -> list[bytes]:
    """Return the address as the record's key; records without one stay."""
    return [record["url"].encode()] if isinstance(record.get("url"), str) else []
