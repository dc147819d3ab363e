"""Limits on untrusted checkpoints, in one place.

Each is far beyond what a real checkpoint has. Together they keep what a small file costs within
seconds and 300 MB, whatever it says; what a large one may cost is in proportion to its bytes.
"""

from jaxforge.errors import UserError
from jaxforge.storage.untrusted_json import excerpt as shown

NAME = 1024  # characters of a tensor's or a file's name
INTEGER = 512  # bytes of an integer in a pickle
LINE = 4096  # bytes of a name in a pickle, one that ends with its line
COLLIDING = 1000  # keys in a pickle that are tuples or complex: anyone can make theirs collide
PICKLED = 32 << 20  # bytes that reading a pickle may make, and for each of its own bytes ...
MADE_PER_BYTE = 24
PICKLE = 1 << 30  # bytes of a pickle
CHUNK = 20  # bytes of a `.metadata` for each chunk, at least
CUT_DIMENSIONS = 4  # of one tensor, along which its chunks are cut
EXPANDED = 64 << 20  # bytes of a tensor that repeats its storage
CHECKED = 64 << 10  # bytes of a record in an archive whose checksum is computed
ENTRIES = 16 << 20  # bytes of an archive's index
LAYERS = 10_000
EXPERTS = 1 << 16  # of all layers: each has entries of its own
WIDTH = 2**31  # of anything in a model: its vocabulary, its matrices, its positions
KEYS = 1 << 20  # of a nested state dict
COUNT = 2**53  # steps, tokens: what a float64 still counts


def is_name(name: object) -> bool:
    """Return whether a value of a file is a name: printable text of limited length."""
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
    """Check that a model can have this many layers and experts.

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
