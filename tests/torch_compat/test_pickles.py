"""Reader and writer of pickles, compared with Python's."""

import argparse
import collections
import io
import math
import pickle
import struct

import pytest

from jaxforge.errors import UserError
from torch_compat.formats import pickles
from torch_compat.formats.pickle_machine import Record
from torch_compat.formats.pickles import Call, Global, New, Pairs, Persistent, UnsafePickleError

PLAIN = [
    None, True, False, 0, 1, -1, 255, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**63, -(2**200),
    0.0, 1.5, -1e-300, math.inf, -math.inf, "", "text", "é\n\0𝄞", "\udc80", "x" * 70_000, b"",
    b"\0\x80\xff", bytes(range(256)) * 300, (), (1,), (1, 2, 3, 4), [], [1, "a", None], {},
    {"a": 1, 2: "b", (3, 4): [5], None: {"deep": ({"er": (b"\xfe",)},)}},
    ["same", "same", ("same", {"same": "same"})],
]  # fmt: skip
NAMES = {("ours", "Record"): Record, ("ours", "pair"): lambda a, b: (a, b), ("ours", "two"): 2}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:20])
def test_python_reads_dumped_values(value, protocol):
    result = pickle.loads(pickles.dump(value, protocol))
    assert result == value
    assert repr(result) == repr(value)  # 1, 1.0 and True are equal


@pytest.mark.parametrize("protocol", [2, 4])
def test_load_reads_own_and_python_pickles(protocol):
    names = {
        ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
        ("__builtin__", "bytes"): lambda: b"",
    }
    for value in PLAIN:
        assert pickles.load(pickles.dump(value, protocol), names, "here") == value
        assert pickles.load(pickle.dumps(value, protocol), names, "here") == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_negative_zero_and_nan_round_trip(protocol):
    minus = pickle.loads(pickles.dump([-0.0, math.nan], protocol))
    assert math.copysign(1, minus[0]) == -1
    assert math.isnan(minus[1])


@pytest.mark.parametrize("protocol", [2, 4])
def test_python_builds_described_instances(protocol):
    ordered = Global("collections", "OrderedDict")
    described = [
        ordered,
        Call(ordered, ([("a", 1), ("b", 2)],)),
        New(Global("argparse", "Namespace"), {"x": 1, "y": (2,)}),
        New(Call(Global("argparse", "Namespace"), ()), {"z": "z"}),
        Pairs([(Call(Global("builtins", "frozenset"), ([1, 2],)), "value")]),
    ]
    assert pickle.loads(pickles.dump(described, protocol)) == [
        collections.OrderedDict,
        collections.OrderedDict(a=1, b=2),
        argparse.Namespace(x=1, y=(2,)),
        argparse.Namespace(z="z"),
        {frozenset({1, 2}): "value"},
    ]


@pytest.mark.parametrize("protocol", [2, 4])
def test_persistent_ids_are_dumped(protocol):
    class Reader(pickle.Unpickler):
        def persistent_load(self, pid):
            return ("loaded", pid)

    data = pickles.dump([Persistent(("storage", 1)), "x"], protocol)
    assert Reader(io.BytesIO(data)).load() == [("loaded", ("storage", 1)), "x"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_repeated_names_are_memoized(protocol):
    names = [Global("package.module", f"Class{i % 3}") for i in range(999)]
    keys = [f"a.long.parameter.name.{i % 3}" for i in range(999)]
    data = pickles.dump([*map(list, ((n,) for n in names)), *keys], protocol)
    assert data.count(b"Class0") == data.count(b"name.0") == 1


def test_unpicklable_value_raises_type_error():
    with pytest.raises(TypeError, match="cannot pickle a set"):
        pickles.dump({"a": {1}})


@pytest.mark.parametrize("protocol", [2, 4])
def test_names_outside_table_are_refused(protocol):
    good = Call(Global("ours", "pair"), (1, [2]))
    assert pickles.load(pickles.dump(good, protocol), NAMES, "here") == (1, [2])
    for module, name in (("ours", "other"), ("other", "pair"), ("builtins", "eval")):
        data = pickles.dump({"deep": [Global(module, name)]}, protocol)
        with pytest.raises(
            UnsafePickleError, match=rf"^here: the pickle names {module}\.{name}, .* refused"
        ):
            pickles.load(data, NAMES, "here")


def test_dotted_name_is_refused():
    """Protocol 4 allows dots in names."""
    data = pickles.dump(Global("ours", "Record.__init__.__globals__"), 4)
    with pytest.raises(UnsafePickleError, match=r"Record\.__init__\.__globals__"):
        pickles.load(data, NAMES, "here")


def test_unexpected_persistent_id_is_refused():
    with pytest.raises(UnsafePickleError, match="here: the pickle refers to objects outside it"):
        pickles.load(pickles.dump(Persistent(("a",))), NAMES, "here")


def test_record_holds_pickled_state():
    data = pickles.dump(New(Global("ours", "Record"), {"a": 1, "b": [2]}))
    record = pickles.load(data, NAMES, "here")
    assert (record.a, record.b) == (1, [2])
    assert pickles.load(pickles.dump(New(Global("ours", "Record"), (1, 2))), NAMES, "x").state == (
        1, 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        b"\x80\x04",
        b"\x80\x63N.",
        pickle.dumps([1, 2, "text"])[:-4],
        b"\x80\x02K\x01K\x02R.",  # a call of a number
        b"\x80\x02]K\x01b.",  # the state of a list
        b"\x80\x02h\x07.",  # a missing entry of the memo
        b"\x80\x02}]K\x01s.",  # a list as a key
        b"\x80\x04\x8e" + b"\xff" * 8 + b"x.",  # a text of 2**64 bytes
        b"\x80\x02\x82\x01.",  # the registry of extensions
        b"\x80\x02X\x01\0\0\0\xff.",  # no UTF-8
    ],
    ids=repr,
)
def test_non_pickle_raises_user_error(data):
    with pytest.raises(UserError, match=r"^here: not a readable pickle"):
        pickles.load(data, NAMES, "here")


@pytest.mark.parametrize("index", [2**23, 2**28, 2**32 - 1])
def test_memo_size_is_limited(index):
    """All entries before a high index would be allocated."""
    binary = b"\x80\x02Nr" + struct.pack("<I", index) + b"."
    text = b"\x80\x02Np" + str(index).encode() + b"\n."
    for data in (binary, text):
        with pytest.raises(UserError, match="far more"):
            pickles.load(data, NAMES, "here")
