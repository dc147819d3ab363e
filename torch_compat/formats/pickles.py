"""Pickle files: loading without running code, and dumping without the named classes.

A pickle is a program: `pickle.load` runs every function that it calls. `load` refuses names outside
a table and maps the names in the table to stand-ins that only hold data.
"""

import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxforge.errors import UserError
from torch_compat.formats.limits import shown
from torch_compat.formats.pickle_machine import PickleMachine


class UnsafePickleError(UserError):
    """A pickle names something that no checkpoint needs."""


def load(
    data: bytes | memoryview,
    names: Mapping[tuple[str, str], Any],
    where: str,
    load_persistent: Callable[[Any], Any] | None = None,
) -> Any:  # noqa: ANN401 (a pickle holds anything)
    """Load a pickle that may use only the given names.

    Args:
        data: the pickle.
        names: (module, name) -> stand-in.
        where: file or item, for messages.
        load_persistent: persistent id -> stand-in. None: persistent ids are refused.

    Raises:
        UnsafePickleError: the pickle uses another name. No code was run.
        UserError: the data are not a pickle.
    """

    def find_class(module: str, name: str) -> Any:  # noqa: ANN401
        if (module, name) in names:
            return names[module, name]
        raise UnsafePickleError(
            f"{where}: the pickle names {shown(f'{module}.{name}')}, which no checkpoint needs; "
            "refused, nothing was run"
        )

    def refuse(_: object) -> None:
        raise UnsafePickleError(f"{where}: the pickle refers to objects outside it; refused")

    try:
        return PickleMachine(data, find_class, load_persistent or refuse).run()
    except UserError:
        raise
    except Exception as error:  # arbitrary bytes may raise any error
        why = shown(error) or type(error).__name__
        raise UserError(f"{where}: not a readable pickle ({why})") from error


class Global(NamedTuple):
    """Name of a class or function."""

    module: str
    name: str


class Call(NamedTuple):
    """Call of a function with arguments."""

    function: Global
    arguments: tuple


class New(NamedTuple):
    """Instance of a class, or result of a call, whose state is set afterwards."""

    constructor: Global | Call
    state: Any


class Pairs(NamedTuple):
    """Dict as a list of items, for keys that are not hashable in Python."""

    items: list[tuple[Any, Any]]


class Persistent(NamedTuple):
    """Persistent id, which `torch.save` uses for storages."""

    id: tuple


def dump(value: Any, protocol: int = 2) -> bytes:  # noqa: ANN401
    """Return the pickle of plain values and of `Global`, `Call`, `New`, `Pairs`, `Persistent`.

    Args:
        value: nested dicts, lists and tuples of None, bool, int, float, str, bytes and these types.
        protocol: 2, as torch.save writes and `weights_only` loading expects, or 4.
    """
    out = bytearray(pickle.PROTO + bytes([protocol]))
    _Writer(out, protocol).write(value)
    return bytes(out + pickle.STOP)


class _Writer:
    """Encoder that memoizes strings and names, which metadata repeat thousands of times."""

    def __init__(self, out: bytearray, protocol: int) -> None:
        self._out, self._protocol = out, protocol
        self._memo: dict[Any, int] = {}

    def write(self, value: Any) -> None:  # noqa: ANN401
        match value:
            case Global():
                self._memoize(value, lambda: self._write_global(value))
            case Call(function, arguments):
                self._write_all(function, arguments)
                self._out += pickle.REDUCE
            case New(constructor, state):
                if isinstance(constructor, Call):
                    self.write(constructor)
                else:
                    self._write_all(constructor, ())
                    self._out += pickle.NEWOBJ
                self.write(state)
                self._out += pickle.BUILD
            case Persistent(identity):
                self.write(identity)
                self._out += pickle.BINPERSID
            case Pairs(items):
                self._out += pickle.EMPTY_DICT + pickle.MARK
                for pair in items:
                    self._write_all(*pair)
                self._out += pickle.SETITEMS
            case None:
                self._out += pickle.NONE
            # Before `int`: `bool` is a subclass.
            case bool():
                self._out += pickle.NEWTRUE if value else pickle.NEWFALSE
            case int():
                self._write_integer(value)
            case float():
                self._out += pickle.BINFLOAT + struct.pack(">d", value)
            case str():
                self._memoize(value, lambda: self._write_string(value))
            # Protocol 2 has no instruction for bytes. CPython writes the same call.
            case bytes() if self._protocol < 3:
                text = value.decode("latin1")
                self.write(Call(Global("_codecs", "encode"), (text, "latin1")))
            case bytes():
                self._out += pickle.BINBYTES + struct.pack("<I", len(value)) + value
            # After the named tuples of this module, which are tuples, too.
            case tuple():
                self._out += pickle.MARK
                self._write_all(*value)
                self._out += pickle.TUPLE
            case list():
                self._out += pickle.EMPTY_LIST + pickle.MARK
                self._write_all(*value)
                self._out += pickle.APPENDS
            case dict():
                self.write(Pairs(list(value.items())))
            case _:
                raise TypeError(f"cannot pickle a {type(value).__name__}")

    def _write_all(self, *values: Any) -> None:  # noqa: ANN401
        for value in values:
            self.write(value)

    def _memoize(self, key: Any, write: Callable[[], None]) -> None:  # noqa: ANN401
        if key in self._memo:
            self._out += pickle.LONG_BINGET + struct.pack("<I", self._memo[key])
            return
        write()
        self._memo[key] = len(self._memo)
        self._out += pickle.LONG_BINPUT + struct.pack("<I", self._memo[key])

    def _write_global(self, value: Global) -> None:
        if self._protocol >= 4:
            self._write_all(value.module, value.name)
            self._out += pickle.STACK_GLOBAL
        else:
            self._out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()

    def _write_string(self, value: str) -> None:
        encoded = value.encode("utf-8", "surrogatepass")
        self._out += pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded

    def _write_integer(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self._out += pickle.BININT + struct.pack("<i", value)
        else:
            encoded = pickle.encode_long(value)
            self._out += pickle.LONG1 + bytes([len(encoded)]) + encoded
