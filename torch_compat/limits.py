"""What a checkpoint from a stranger may ask for: every limit, in one place.

Each is far beyond what a real checkpoint has. Together they keep what a small file costs within
seconds and 300 MB, whatever it says; what a large one may cost is in proportion to its bytes.
"""

import json
from typing import Any

from jaxforge.errors import UserError, printable

NAME = 1024  # characters of a tensor's or a file's name
INTEGER = 512  # bytes of an integer in a pickle
LINE = 4096  # bytes of a name in a pickle, one that ends with its line
TUPLE_KEYS = 1000  # keys of dicts in a pickle that are tuples: anyone can make theirs collide
MADE = 32 << 20  # bytes that reading a pickle may make, and for each of its own bytes ...
MADE_PER_BYTE = 24
PICKLE = 1 << 30  # bytes of a pickle
DOCUMENT = 32 << 20  # bytes of a JSON document
DEPTH = 64  # of what a JSON document holds
DOCUMENT_MADE = 160 << 20  # bytes of the values in it
CHUNK = 20  # bytes of a `.metadata` for each chunk, at least
CUT_DIMENSIONS = 4  # of one tensor, along which its chunks are cut
EXPANDED = 64 << 20  # bytes of a tensor that repeats its storage
CHECKED = 64 << 10  # bytes of a record in an archive whose checksum is computed
ENTRIES = 16 << 20  # bytes of an archive's index
LAYERS = 10_000
EXPERTS = 1 << 16  # of all layers: each has entries of its own
WIDTH = 2**31  # of anything in a model: its vocabulary, its matrices, its positions
COUNT = 2**53  # steps, tokens: what a float64 still counts


def shown(text: object, most: int = 200) -> str:
    """Text of a file as a message may have it: cut, and nothing in it that a terminal obeys."""
    cut = str(text)[: most + 1]
    plain = printable(cut).replace("\n", "\\n")
    return plain if len(plain) <= most else plain[:most] + "..."


def is_name(name: object) -> bool:
    """Whether something in a file is a name: text that can be printed, and not too much of it."""
    return isinstance(name, str) and len(name) <= NAME and name.isprintable()


def check_name(name: object, where: str) -> None:
    """Looks at a name in a file.

    Raises:
        UserError: it is none.
    """
    if not is_name(name):
        what = f"{shown(name, 60)!r}, no name" if isinstance(name, str) else "no text"
        raise UserError(f"{where}: a key is {what}")


def check_layers(layers: object, experts: object, where: str) -> None:
    """Looks whether a model can have so many layers, with so many experts each.

    Raises:
        UserError: it cannot.
    """
    numbers = [_count(layers), _count(experts)]
    if numbers[0] > LAYERS or numbers[0] * numbers[1] > EXPERTS:
        raise UserError(
            f"{where}: {numbers[0]} layers of {numbers[1]} experts each are more than is read here"
        )


def _count(value: object) -> int:
    """The number that a setting becomes; 0 for what becomes none, which the config will refuse."""
    try:
        return int(value) if isinstance(value, int | float | str) else 0
    except (ValueError, OverflowError):
        return 0


def load_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON document that is an object with keys.

    Raises:
        UserError: it is none, or its values would take far more memory than its bytes.
    """
    things = 72 * (data.count(b"[") + data.count(b"{")) + 40 * data.count(b",")
    if len(data) > DOCUMENT or things > DOCUMENT_MADE:
        raise UserError(f"{where}: {len(data)} bytes of JSON, which is more than is read here")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({shown(error)})") from error
    if not isinstance(document, dict):
        raise UserError(f"{where}: not an object with keys")
    if _is_deeper(document, DEPTH):
        raise UserError(f"{where}: lists and objects in each other, more than {DEPTH} deep")
    return document


def _is_deeper(value: Any, depth: int) -> bool:  # noqa: ANN401 (any JSON)
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
