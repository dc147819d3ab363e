"""The instructions of a pickle, carried out on data alone.

Python's own reader lets a few bytes hang a process, crash it or fill its memory: it hashes what is
nested a million times or shared 2**60-fold, and copies what is long as often as it is told. Here
keys are small, and what is made is counted (`limits`).
"""

import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch_compat.formats import limits

# Upper estimates of CPython's memory per object; `_count_made_bytes` compares their sum with the
# bytes read so far, so that a small file cannot create large objects.
_OBJECT, _ITEM = 64, 16  # bytes of an object, and of each thing in it
_SET = 232
_MEMBER = 128  # of a set or dict: eight times as many slots as members are free after it grew
_ENTRY = 8  # of the memo


class Record:
    """Stands for an instance of any class: what its pickle sets becomes attributes."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401
        if isinstance(state, dict):
            self.__dict__.update({k: v for k, v in state.items() if isinstance(k, str)})
        else:
            self.state = state


class Machine:
    """Reads one pickle.

    Args:
        data: the pickle; mapped, it takes no memory.
        find: (module, name) -> what stands for it.
        persistent: what stands for a persistent id.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        find: Callable[[str, str], Any],
        persistent: Callable[[Any], Any],
    ) -> None:
        self._data, self._at = memoryview(data), 0
        self._find, self._persistent = find, persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        # Stack and marks follow pickle's own machine: MARK pushes the stack's height, and
        # instructions that take "all since the mark" pop from there. The memo maps small integers
        # to objects for sharing.
        self._named: set[type] = set()  # types of what the names stand for: all hash at once
        self._nbytes = 0  # of what was made
        self._colliding = limits.COLLIDING

    def run(self) -> Any:  # noqa: ANN401 (a pickle holds anything)
        """Execute the pickle and return its object.

        Raises:
            Exception: of any kind, where it is none or asks for too much.
        """
        data = self._data
        while (code := data[self._at]) != _STOP:
            self._at += 1
            # No instruction imports a module. GLOBAL and STACK_GLOBAL ask `find`, which knows the
            # few names that checkpoints need; REDUCE and NEWOBJ call only what `find` returned.
            if code not in _INSTRUCTIONS:
                raise ValueError(f"an instruction {bytes([code])!r}, which no checkpoint needs")
            _INSTRUCTIONS[code](self)
        if self._at + 1 < len(data):
            raise ValueError(f"{len(data) - self._at - 1} bytes after its end")
        return self._stack.pop()

    def _take(self, length: int) -> bytes:
        start, self._at = self._at, self._at + length
        if length < 0 or self._at > len(self._data):
            raise ValueError("it ends in the middle")
        return bytes(self._data[start : self._at])

    def _line(self) -> bytes:
        ahead = bytes(self._data[self._at : self._at + limits.LINE])
        return self._take(ahead.index(b"\n") + 1)[:-1]

    def _count_made_bytes(self, nbytes: int) -> None:
        self._nbytes += nbytes
        # Checked against bytes read, not file size: a long tail cannot buy memory for an early
        # bomb.
        if self._nbytes > limits.PICKLED + limits.MADE_PER_BYTE * self._at:
            raise ValueError(f"its first {self._at} bytes would become far more")

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _push_tuple(self, items: list[Any]) -> None:
        self._count_made_bytes(_OBJECT + _ITEM * len(items))
        self._stack.append(tuple(items))

    def _tuple_of(self, length: int) -> None:
        if len(self._stack) < length:
            raise IndexError("nothing is left to take")
        items = self._stack[-length:]
        del self._stack[-length:]
        self._push_tuple(items)

    def _check_keys(self, keys: Iterable[Any]) -> None:
        for key in keys:
            # Hashes of tuples and complex numbers are easy to collide; a dict of n colliding keys
            # costs n² comparisons. Strings and bytes have randomized hashes.
            if isinstance(key, tuple | complex) and type(key) not in self._named:
                self._colliding -= 1
                if self._colliding < 0:
                    raise ValueError(f"more than {limits.COLLIDING} keys are tuples or complex")
            self._check_key(key, 3)

    def _check_key(self, key: Any, depth: int) -> None:  # noqa: ANN401
        """Check that a key is hashed in constant time and that collisions cannot be produced."""
        if isinstance(key, _PLAIN_KEYS) or type(key) in self._named:
            return
        # Python hashes integers modulo 2^61 - 1: below it they cannot collide.
        if isinstance(key, int) and abs(key) < 2**60:
            return
        if type(key) is not tuple or len(key) > 8 or not depth:
            raise ValueError(f"a {type(key).__name__} as a key, or one too large")
        for each in key:
            self._check_key(each, depth - 1)

    def _append(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError(f"items for a {type(self._stack[-1]).__name__}")
        self._count_made_bytes(_ITEM * len(items))
        self._stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError(f"keys for a {type(target).__name__}")
        self._count_made_bytes(_OBJECT * (len(items) // 2))
        self._check_keys(items[::2])
        target.update(zip(items[::2], items[1::2], strict=True))

    def _dict_of(self, items: list[Any]) -> None:
        self._push_new({})
        self._set_items(items)

    def _add_items(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not set:
            raise TypeError(f"members for a {type(self._stack[-1]).__name__}")
        self._count_made_bytes(_MEMBER * len(items))
        self._check_keys(items)
        self._stack[-1].update(items)

    def _frozen(self, items: list[Any]) -> None:
        self._count_made_bytes(_SET + _MEMBER * len(items))
        self._check_keys(items)
        self._stack.append(frozenset(items))

    def _global(self, module: Any, name: Any) -> None:  # noqa: ANN401
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is no text")
        items = self._find(module, name)
        self._named.add(type(items))
        self._stack.append(items)

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not callable(function) or type(arguments) is not tuple:
            raise TypeError(f"a {type(function).__name__} is called")
        self._count_made_bytes(_SET + sum(map(_length, arguments)))
        # Constructors hash their members: these need the same checks as SETITEMS and ADDITEMS.
        if function in (set, frozenset) or (
            isinstance(function, type) and issubclass(function, dict)
        ):
            keys = _keys(function, *arguments)
            self._count_made_bytes(_MEMBER * len(keys))
            self._check_keys(keys)
        self._stack.append(function(*arguments))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        # Looked up on the type, not on the instance: a pickle cannot plant the method.
        set_state = getattr(type(target), "__setstate__", None)
        if set_state is None:
            raise TypeError(f"the state of a {type(target).__name__}")
        self._count_made_bytes(_OBJECT + 3 * _length(state))
        set_state(target, state)

    def _put(self, index: int) -> None:
        # PUT may name any index: the gap is counted, so that a huge index is refused.
        if index >= len(self._memo):
            self._count_made_bytes(_ENTRY * (index - len(self._memo)))  # those that it leaves out
            self._memo.extend([_NOTHING] * (index + 1 - len(self._memo)))
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        if self._memo[index] is _NOTHING:
            raise IndexError(index)
        self._stack.append(self._memo[index])

    def _pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _push_new(self, value: list[Any] | dict[Any, Any] | set[Any]) -> None:
        self._count_made_bytes(_SET if isinstance(value, set) else _OBJECT)
        self._stack.append(value)

    def _protocol(self) -> None:
        if self._byte() > 5:
            raise ValueError("a protocol that Python does not have")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _number(self, form: struct.Struct) -> Any:  # noqa: ANN401
        return form.unpack(self._take(form.size))[0]

    def _sized(self, form: struct.Struct) -> bytes:
        return self._take(self._number(form))


def _length(value: Any) -> int:  # noqa: ANN401
    """Bytes that a copy of it takes, or what is made of it."""
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM * len(value) if isinstance(value, dict | list | tuple | set | frozenset) else 0


def _keys(kind: type, items: Iterable[Any] = ()) -> list[Any]:
    if not isinstance(items, list | tuple):
        raise TypeError(f"a {kind.__name__} of a {type(items).__name__}")
    return [key for key, _ in items] if issubclass(kind, dict) else list(items)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    if len(data) > limits.INTEGER:
        raise ValueError(f"a number of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


def _decimal(line: bytes) -> int | bool:
    return line == b"01" if line in (b"00", b"01") else int(line.removesuffix(b"L"))


_STOP = pickle.STOP[0]
_NOTHING = object()
_PLAIN_KEYS = (str, bytes, float, complex, bool, type(None), Record)
_INT2, _INT4, _INT8 = map(struct.Struct, ("<H", "<I", "<Q"))
_SIGNED, _FLOAT = struct.Struct("<i"), struct.Struct(">d")
_TABLE: Mapping[bytes, Callable[[Machine], Any]] = {
    pickle.PROTO: Machine._protocol,
    pickle.FRAME: lambda m: m._take(8),
    pickle.MARK: lambda m: m._marks.append(len(m._stack)),
    pickle.POP: Machine._pop,
    pickle.POP_MARK: Machine._since_mark,
    pickle.DUP: lambda m: m._stack.append(m._stack[-1]),
    # values
    pickle.NONE: lambda m: m._stack.append(None),
    pickle.NEWTRUE: lambda m: m._stack.append(True),
    pickle.NEWFALSE: lambda m: m._stack.append(False),
    pickle.INT: lambda m: m._stack.append(_decimal(m._line())),
    pickle.LONG: lambda m: m._stack.append(_decimal(m._line())),
    pickle.FLOAT: lambda m: m._stack.append(float(m._line())),
    pickle.BININT: lambda m: m._stack.append(m._number(_SIGNED)),
    pickle.BININT1: lambda m: m._stack.append(m._byte()),
    pickle.BININT2: lambda m: m._stack.append(m._number(_INT2)),
    pickle.BINFLOAT: lambda m: m._stack.append(m._number(_FLOAT)),
    pickle.LONG1: lambda m: m._stack.append(_integer(m._take(m._byte()))),
    pickle.LONG4: lambda m: m._stack.append(_integer(m._sized(_SIGNED))),
    pickle.UNICODE: lambda m: m._stack.append(str(m._line(), "raw-unicode-escape")),
    pickle.SHORT_BINUNICODE: lambda m: m._stack.append(_text(m._take(m._byte()))),
    pickle.BINUNICODE: lambda m: m._stack.append(_text(m._sized(_INT4))),
    pickle.BINUNICODE8: lambda m: m._stack.append(_text(m._sized(_INT8))),
    pickle.SHORT_BINSTRING: lambda m: m._stack.append(m._take(m._byte()).decode("ascii")),
    pickle.BINSTRING: lambda m: m._stack.append(m._sized(_SIGNED).decode("ascii")),
    pickle.SHORT_BINBYTES: lambda m: m._stack.append(m._take(m._byte())),
    pickle.BINBYTES: lambda m: m._stack.append(m._sized(_INT4)),
    pickle.BINBYTES8: lambda m: m._stack.append(m._sized(_INT8)),
    pickle.BYTEARRAY8: lambda m: m._stack.append(m._sized(_INT8)),
    # containers
    pickle.EMPTY_TUPLE: lambda m: m._stack.append(()),
    pickle.TUPLE1: lambda m: m._tuple_of(1),
    pickle.TUPLE2: lambda m: m._tuple_of(2),
    pickle.TUPLE3: lambda m: m._tuple_of(3),
    pickle.TUPLE: lambda m: m._push_tuple(m._since_mark()),
    pickle.EMPTY_LIST: lambda m: m._push_new([]),
    pickle.LIST: lambda m: m._push_new(m._since_mark()),
    pickle.APPEND: lambda m: m._append([m._stack.pop()]),
    pickle.APPENDS: lambda m: m._append(m._since_mark()),
    pickle.EMPTY_DICT: lambda m: m._push_new({}),
    pickle.DICT: lambda m: m._dict_of(m._since_mark()),
    pickle.SETITEM: lambda m: m._set_items([m._stack.pop(-2), m._stack.pop()]),
    pickle.SETITEMS: lambda m: m._set_items(m._since_mark()),
    pickle.EMPTY_SET: lambda m: m._push_new(set()),
    pickle.ADDITEMS: lambda m: m._add_items(m._since_mark()),
    pickle.FROZENSET: lambda m: m._frozen(m._since_mark()),
    # memo
    pickle.GET: lambda m: m._get(int(m._line())),
    pickle.BINGET: lambda m: m._get(m._byte()),
    pickle.LONG_BINGET: lambda m: m._get(m._number(_INT4)),
    pickle.PUT: lambda m: m._put(int(m._line())),
    pickle.BINPUT: lambda m: m._put(m._byte()),
    pickle.LONG_BINPUT: lambda m: m._put(m._number(_INT4)),
    pickle.MEMOIZE: lambda m: m._memo.append(m._stack[-1]),
    # instances
    pickle.GLOBAL: lambda m: m._global(_text(m._line()), _text(m._line())),
    pickle.STACK_GLOBAL: lambda m: m._global(m._stack.pop(-2), m._stack.pop()),
    pickle.REDUCE: Machine._call,
    pickle.NEWOBJ: Machine._call,
    pickle.BUILD: Machine._build,
    pickle.BINPERSID: lambda m: m._stack.append(m._persistent(m._stack.pop())),
}
"""What each instruction does, of all that Python and torch write by protocols 2 to 5."""
_INSTRUCTIONS = {code[0]: do for code, do in _TABLE.items()}
