"""Limits on untrusted checkpoints.

Each limit is far beyond real checkpoints. Together they bound the cost of any small file to seconds
and 300 MB. The cost of a large file is at most proportional to its size.
"""

from jaxforge.config.section import MOST_LAYERS as LAYERS
from jaxforge.errors import UserError
from jaxforge.storage.untrusted_json import excerpt as shown

NAME = 1024  # characters of a tensor's or a file's name
INTEGER = 512  # bytes of an integer in a pickle
LINE = 4096  # bytes of a pickled name or number that ends at a newline
COLLIDING = 1000  # keys in a pickle that are tuples or complex numbers, which can collide
PICKLED = 32 << 20  # bytes that the objects of a pickle may take, apart from MADE_PER_BYTE
MADE_PER_BYTE = 24  # bytes that the objects may take in addition, per byte of the pickle
PICKLE = 1 << 30  # bytes of a pickle
CHUNK = 20  # smallest number of bytes of `.metadata` per chunk
CUT_DIMENSIONS = 4  # dimensions along which a tensor may be cut into chunks
EXPANDED = 64 << 20  # bytes of a tensor that repeats its storage
CHECKED = 64 << 10  # bytes of a record in an archive up to which its checksum is verified
ENTRIES = 16 << 20  # bytes of an archive's index
EXPERTS = 1 << 16  # experts of all layers together: each has entries of its own
WIDTH = 2**31  # any size in a model: vocabulary, matrices, positions
KEYS = 1 << 20  # keys of a nested state dict
COUNT = 2**53  # steps or tokens, up to which a float64 is exact


def is_name(name: object) -> bool:
    """Return whether a value is a name: printable text of limited length."""
    return isinstance(name, str) and len(name) <= NAME and name.isprintable()


def check_name(name: object, where: str) -> None:
    """Check a name that was read from a file.

    Raises:
        UserError: the value is not a name.
    """
    if not is_name(name):
        what = f"{shown(name, 60)!r}, not a name" if isinstance(name, str) else "not text"
        raise UserError(f"{where}: a key is {what}")


def check_layers(layers: object, experts: object, where: str) -> None:
    """Check the numbers of layers and of experts per layer.

    Raises:
        UserError: a number exceeds its limit.
    """
    numbers = [_to_int(layers), _to_int(experts)]
    if numbers[0] > LAYERS or numbers[0] * numbers[1] > EXPERTS:
        raise UserError(
            f"{where}: {numbers[0]} layers of {numbers[1]} experts each exceed the limits"
        )


def _to_int(value: object) -> int:
    """Return a setting as an integer; 0 if it is none, which the config refuses later."""
    try:
        return int(value) if isinstance(value, int | float | str) else 0
    except (ValueError, OverflowError):
        return 0
