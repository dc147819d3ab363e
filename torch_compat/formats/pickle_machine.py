"""A pickle virtual machine that creates only data.

Python's own unpickler lets a few bytes hang a process, crash it or fill its memory: it hashes
objects that are nested a million times or shared 2**60-fold, and copies long objects without limit.
This machine restricts keys to small objects and counts the memory of all objects (`limits`).

A pickle is a sequence of one-byte instructions with arguments, which operate on three stores:

    stack  objects under construction; the last one is the result
    marks  stack heights; LIST, TUPLE, DICT, APPENDS, SETITEMS pop everything above the last mark
    memo   objects by number, through which a pickle refers to an object again
"""

import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch_compat.formats import limits

# Upper estimates of CPython's memory in bytes. `_count_bytes` compares their sum with the bytes
# read so far, so that a small file cannot create large objects.
_OBJECT, _ITEM = 64, 16  # an object; a reference in a container, with the growth of a list
_SET = 232
_MEMBER = 128  # a member of a set or dict, whose table has up to eight slots per member
_MEMO_ENTRY = 8


class Record:
    """Stand-in for an instance of any class; the pickled state becomes attributes."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401
        if isinstance(state, dict):
            self.__dict__.update({k: v for k, v in state.items() if isinstance(k, str)})
        else:
            self.state = state


class PickleMachine:
    """Interpreter of one pickle.

    Args:
        data: the pickle. A memory-mapped view takes no memory.
        find_class: (module, name) -> stand-in for that class or function.
        load_persistent: persistent id -> stand-in for the object.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        find_class: Callable[[str, str], Any],
        load_persistent: Callable[[Any], Any],
    ) -> None:
        self._data, self._position = memoryview(data), 0
        self._find_class, self._load_persistent = find_class, load_persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        # Types of the stand-ins that `find_class` returned. Their hash takes constant time.
        self._stand_in_types: set[type] = set()
        self._nbytes = 0  # estimated size of all objects so far
        self._colliding_keys_left = limits.COLLIDING

    def run(self) -> Any:  # noqa: ANN401 (a pickle holds anything)
        """Execute the pickle and return its object.

        Raises:
            Exception: the data are not a valid pickle or exceed a limit. Any type is possible.
        """
        data = self._data
        while (code := data[self._position]) != _STOP:
            self._position += 1
            # No instruction imports a module. GLOBAL and STACK_GLOBAL ask `find_class`, which knows
            # the few names that checkpoints need. REDUCE and NEWOBJ call an object of the stack,
            # and all callables there come from `find_class`.
            if code not in _INSTRUCTIONS:
                raise ValueError(f"an instruction {bytes([code])!r}, which no checkpoint needs")
            _INSTRUCTIONS[code](self)
        if self._position + 1 < len(data):
            raise ValueError(f"{len(data) - self._position - 1} bytes after its end")
        return self._stack.pop()

    def _read(self, length: int) -> bytes:
        start, self._position = self._position, self._position + length
        if length < 0 or self._position > len(self._data):
            raise ValueError("it ends in the middle")
        return bytes(self._data[start : self._position])

    def _read_line(self) -> bytes:
        ahead = bytes(self._data[self._position : self._position + limits.LINE])
        # `index` raises ValueError for a line beyond the limit.
        return self._read(ahead.index(b"\n") + 1)[:-1]

    def _count_bytes(self, nbytes: int) -> None:
        self._nbytes += nbytes
        # The allowance grows with the bytes read and not with the file size: a long tail does not
        # buy memory for a bomb at the beginning.
        if self._nbytes > limits.PICKLED + limits.MADE_PER_BYTE * self._position:
            raise ValueError(f"its first {self._position} bytes would become far more")

    def _pop_to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _push_tuple(self, items: list[Any]) -> None:
        self._count_bytes(_OBJECT + _ITEM * len(items))
        self._stack.append(tuple(items))

    def _pop_into_tuple(self, length: int) -> None:
        # A negative slice of a short stack would be shorter without an error.
        if len(self._stack) < length:
            raise IndexError("the stack is empty")
        items = self._stack[-length:]
        del self._stack[-length:]
        self._push_tuple(items)

    def _check_keys(self, keys: Iterable[Any]) -> None:
        for key in keys:
            # An attacker can compute tuples and complex numbers of equal hash, and n colliding keys
            # cost n² comparisons, so the number of such keys is limited. Hashes of str and bytes
            # are randomized in each process.
            if isinstance(key, tuple | complex) and type(key) not in self._stand_in_types:
                self._colliding_keys_left -= 1
                if self._colliding_keys_left < 0:
                    raise ValueError(f"more than {limits.COLLIDING} keys are tuples or complex")
            self._check_key(key, 3)

    def _check_key(self, key: Any, depth: int) -> None:  # noqa: ANN401
        """Check that a key can be hashed in constant time."""
        if isinstance(key, _PLAIN_KEYS) or type(key) in self._stand_in_types:
            return
        # CPython hashes an integer to its value modulo 2^61 - 1: smaller ones can't be made to
        # collide.
        if isinstance(key, int) and abs(key) < 2**60:
            return
        # Bounded width and depth, since a tuple that shares its parts may have 2^60 leaves to hash.
        if type(key) is not tuple or len(key) > 8 or not depth:
            raise ValueError(f"a {type(key).__name__} as a key, or one too large")
        for item in key:
            self._check_key(item, depth - 1)

    def _extend_list(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError(f"items for a {type(self._stack[-1]).__name__}")
        self._count_bytes(_ITEM * len(items))
        self._stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError(f"keys for a {type(target).__name__}")
        self._count_bytes(_OBJECT * (len(items) // 2))
        self._check_keys(items[::2])
        target.update(zip(items[::2], items[1::2], strict=True))

    def _push_dict(self, items: list[Any]) -> None:
        self._push_container({})
        self._set_items(items)

    def _add_members(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not set:
            raise TypeError(f"members for a {type(self._stack[-1]).__name__}")
        self._count_bytes(_MEMBER * len(items))
        self._check_keys(items)
        self._stack[-1].update(items)

    def _push_frozenset(self, items: list[Any]) -> None:
        self._count_bytes(_SET + _MEMBER * len(items))
        self._check_keys(items)
        self._stack.append(frozenset(items))

    def _push_global(self, module: Any, name: Any) -> None:  # noqa: ANN401
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is not text")
        stand_in = self._find_class(module, name)
        self._stand_in_types.add(type(stand_in))
        self._stack.append(stand_in)

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not callable(function) or type(arguments) is not tuple:
            raise TypeError(f"a {type(function).__name__} is called")
        self._count_bytes(_SET + sum(map(_copied_bytes, arguments)))
        # set, frozenset and dict hash their members, which need the checks of SETITEMS and ADDITEMS
        # before the call.
        if function in (set, frozenset) or (
            isinstance(function, type) and issubclass(function, dict)
        ):
            keys = _members(function, *arguments)
            self._count_bytes(_MEMBER * len(keys))
            self._check_keys(keys)
        self._stack.append(function(*arguments))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        # BUILD never sets attributes by itself: only stand-ins with `__setstate__` accept state.
        # The method is that of the type, since a pickle could add one to the instance.
        set_state = getattr(type(target), "__setstate__", None)
        if set_state is None:
            raise TypeError(f"the state of a {type(target).__name__}")
        self._count_bytes(_OBJECT + 3 * _copied_bytes(state))
        set_state(target, state)

    def _put(self, index: int) -> None:
        # PUT may name any index. The entries that it skips are counted, so that a huge index fails
        # before the list grows.
        if index >= len(self._memo):
            self._count_bytes(_MEMO_ENTRY * (index - len(self._memo)))
            self._memo.extend([_UNSET] * (index + 1 - len(self._memo)))
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        if self._memo[index] is _UNSET:
            raise IndexError(index)
        self._stack.append(self._memo[index])

    def _pop(self) -> None:
        # POP right after MARK removes the mark, as in CPython's `_pickle`.
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _push_container(self, value: list[Any] | dict[Any, Any] | set[Any]) -> None:
        # LIST pushes a list with items. Its references need no count: each took at least one byte
        # of the pickle, so they are in proportion to its size.
        self._count_bytes(_SET if isinstance(value, set) else _OBJECT)
        self._stack.append(value)

    def _check_protocol(self) -> None:
        if self._read_byte() > 5:
            raise ValueError("a protocol that Python does not have")

    def _read_byte(self) -> int:
        self._position += 1
        return self._data[self._position - 1]

    def _read_number(self, form: struct.Struct) -> Any:  # noqa: ANN401
        return form.unpack(self._read(form.size))[0]

    def _read_sized(self, form: struct.Struct) -> bytes:
        return self._read(self._read_number(form))


def _copied_bytes(value: Any) -> int:  # noqa: ANN401
    """Return the bytes that a function may allocate when it copies its argument."""
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM * len(value) if isinstance(value, dict | list | tuple | set | frozenset) else 0


def _members(kind: type, items: Iterable[Any] = ()) -> list[Any]:
    if not isinstance(items, list | tuple):
        raise TypeError(f"a {kind.__name__} of a {type(items).__name__}")
    return [key for key, _ in items] if issubclass(kind, dict) else list(items)


def _text(data: bytes) -> str:
    # CPython pickles lone surrogates in this encoding.
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    if len(data) > limits.INTEGER:
        raise ValueError(f"a number of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


def _decimal(line: bytes) -> int | bool:
    # Text protocols write booleans as 00 and 01, and long integers with a final L.
    return line == b"01" if line in (b"00", b"01") else int(line.removesuffix(b"L"))


_STOP = pickle.STOP[0]
_UNSET = object()
_PLAIN_KEYS = (str, bytes, float, complex, bool, type(None), Record)
_INT2, _INT4, _INT8 = map(struct.Struct, ("<H", "<I", "<Q"))
_SIGNED, _FLOAT = struct.Struct("<i"), struct.Struct(">d")
_TABLE: Mapping[bytes, Callable[[PickleMachine], Any]] = {
    pickle.PROTO: PickleMachine._check_protocol,
    pickle.FRAME: lambda m: m._read(8),
    pickle.MARK: lambda m: m._marks.append(len(m._stack)),
    pickle.POP: PickleMachine._pop,
    pickle.POP_MARK: PickleMachine._pop_to_mark,
    pickle.DUP: lambda m: m._stack.append(m._stack[-1]),
    # values
    pickle.NONE: lambda m: m._stack.append(None),
    pickle.NEWTRUE: lambda m: m._stack.append(True),
    pickle.NEWFALSE: lambda m: m._stack.append(False),
    pickle.INT: lambda m: m._stack.append(_decimal(m._read_line())),
    pickle.LONG: lambda m: m._stack.append(_decimal(m._read_line())),
    pickle.FLOAT: lambda m: m._stack.append(float(m._read_line())),
    pickle.BININT: lambda m: m._stack.append(m._read_number(_SIGNED)),
    pickle.BININT1: lambda m: m._stack.append(m._read_byte()),
    pickle.BININT2: lambda m: m._stack.append(m._read_number(_INT2)),
    pickle.BINFLOAT: lambda m: m._stack.append(m._read_number(_FLOAT)),
    pickle.LONG1: lambda m: m._stack.append(_integer(m._read(m._read_byte()))),
    pickle.LONG4: lambda m: m._stack.append(_integer(m._read_sized(_SIGNED))),
    pickle.UNICODE: lambda m: m._stack.append(str(m._read_line(), "raw-unicode-escape")),
    pickle.SHORT_BINUNICODE: lambda m: m._stack.append(_text(m._read(m._read_byte()))),
    pickle.BINUNICODE: lambda m: m._stack.append(_text(m._read_sized(_INT4))),
    pickle.BINUNICODE8: lambda m: m._stack.append(_text(m._read_sized(_INT8))),
    pickle.SHORT_BINSTRING: lambda m: m._stack.append(m._read(m._read_byte()).decode("ascii")),
    pickle.BINSTRING: lambda m: m._stack.append(m._read_sized(_SIGNED).decode("ascii")),
    pickle.SHORT_BINBYTES: lambda m: m._stack.append(m._read(m._read_byte())),
    pickle.BINBYTES: lambda m: m._stack.append(m._read_sized(_INT4)),
    pickle.BINBYTES8: lambda m: m._stack.append(m._read_sized(_INT8)),
    pickle.BYTEARRAY8: lambda m: m._stack.append(m._read_sized(_INT8)),
    # containers
    pickle.EMPTY_TUPLE: lambda m: m._stack.append(()),
    pickle.TUPLE1: lambda m: m._pop_into_tuple(1),
    pickle.TUPLE2: lambda m: m._pop_into_tuple(2),
    pickle.TUPLE3: lambda m: m._pop_into_tuple(3),
    pickle.TUPLE: lambda m: m._push_tuple(m._pop_to_mark()),
    pickle.EMPTY_LIST: lambda m: m._push_container([]),
    pickle.LIST: lambda m: m._push_container(m._pop_to_mark()),
    pickle.APPEND: lambda m: m._extend_list([m._stack.pop()]),
    pickle.APPENDS: lambda m: m._extend_list(m._pop_to_mark()),
    pickle.EMPTY_DICT: lambda m: m._push_container({}),
    pickle.DICT: lambda m: m._push_dict(m._pop_to_mark()),
    pickle.SETITEM: lambda m: m._set_items([m._stack.pop(-2), m._stack.pop()]),
    pickle.SETITEMS: lambda m: m._set_items(m._pop_to_mark()),
    pickle.EMPTY_SET: lambda m: m._push_container(set()),
    pickle.ADDITEMS: lambda m: m._add_members(m._pop_to_mark()),
    pickle.FROZENSET: lambda m: m._push_frozenset(m._pop_to_mark()),
    # memo
    pickle.GET: lambda m: m._get(int(m._read_line())),
    pickle.BINGET: lambda m: m._get(m._read_byte()),
    pickle.LONG_BINGET: lambda m: m._get(m._read_number(_INT4)),
    pickle.PUT: lambda m: m._put(int(m._read_line())),
    pickle.BINPUT: lambda m: m._put(m._read_byte()),
    pickle.LONG_BINPUT: lambda m: m._put(m._read_number(_INT4)),
    pickle.MEMOIZE: lambda m: m._memo.append(m._stack[-1]),
    # instances
    pickle.GLOBAL: lambda m: m._push_global(_text(m._read_line()), _text(m._read_line())),
    pickle.STACK_GLOBAL: lambda m: m._push_global(m._stack.pop(-2), m._stack.pop()),
    pickle.REDUCE: PickleMachine._call,
    pickle.NEWOBJ: PickleMachine._call,
    pickle.BUILD: PickleMachine._build,
    pickle.BINPERSID: lambda m: m._stack.append(m._load_persistent(m._stack.pop())),
}
"""Instructions that Python and torch write with protocols 2 to 5, and their effects."""
_INSTRUCTIONS = {code[0]: execute for code, execute in _TABLE.items()}
