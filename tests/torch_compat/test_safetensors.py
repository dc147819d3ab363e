"""Reader and writer of safetensors, compared with the reference library."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from jaxforge.errors import UserError
from tests.torch_compat.tensors import assert_reads, assert_same, of_torch, random_array, to_torch
from torch_compat.formats import safetensors
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES, from_array

pytest.importorskip("torch")
reference = pytest.importorskip("safetensors.torch")
safe_open = pytest.importorskip("safetensors").safe_open

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4)]
FILE = safetensors.INDEX.removesuffix(".index.json")


def arrays(*names):
    """Return tensors of these dtypes and all shapes; odd sizes leave the next ones unaligned."""
    return {
        f"{name}.{shape}": random_array(name, shape, seed)
        for seed, name in enumerate(names or DTYPES)
        for shape in SHAPES
    }


def opened(path):
    return safetensors.open_directory(Directory(path))


def write(path, tensors, largest=10**9, block=64):
    lazy = {name: from_array(array) for name, array in tensors.items()}
    units, index = safetensors.units(lazy, path, largest, block)
    for unit in units:
        unit.write()
    if index is not None:
        (path / safetensors.INDEX).write_text(json.dumps(index))
    return sorted({unit.name.rpartition(".")[0] for unit in units})


def save(path, tensors):
    """Write tensors with the reference library."""
    path.parent.mkdir(exist_ok=True)
    reference.save_file({name: to_torch(array) for name, array in tensors.items()}, path)


@pytest.mark.parametrize("name", DTYPES)
def test_library_reads_written_files(tmp_path, name):
    expected = arrays(name)
    assert write(tmp_path, expected) == [FILE]
    result = reference.load_file(tmp_path / FILE)
    assert result.keys() == expected.keys()
    for key, array in expected.items():
        assert_same(of_torch(result[key]), array)


@pytest.mark.parametrize("name", DTYPES)
def test_files_of_library_are_read(tmp_path, name):
    expected = arrays(name)
    save(tmp_path / FILE, expected)
    result = opened(tmp_path)
    assert result.keys() == expected.keys()
    for key, array in expected.items():
        assert_reads(result[key], array)


def test_dtypes_share_a_file(tmp_path):
    expected = arrays()
    write(tmp_path, expected, block=13)
    with safe_open(tmp_path / FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # required by transformers
        assert set(file.keys()) == set(expected)
        for key, array in expected.items():
            assert_same(of_torch(file.get_tensor(key)), array)
            if array.ndim == 2:
                assert_same(of_torch(file.get_slice(key)[1:3, 2:4]), array[1:3, 2:4])
    for key, tensor in opened(tmp_path).items():
        assert_reads(tensor, expected[key])


def test_scalars_round_trip(tmp_path):
    write(tmp_path, {"n": np.array(3.5, np.float32), "i": np.array(7)})
    result = reference.load_file(tmp_path / FILE)
    assert (result["n"].item(), result["i"].item()) == (3.5, 7)
    assert (result["n"].shape, result["i"].shape) == ((), ())


def test_views_are_written_as_values(tmp_path):
    base = random_array("bfloat16", (6, 8))
    lazy = from_array(base)
    views = {"t": lazy.transposed(), "rows": lazy.rows([5, 0, 0]), "cut": lazy.resized(2)}
    (unit,), _ = safetensors.units(views, tmp_path, 10**9, 20)
    unit.write()
    result = reference.load_file(tmp_path / FILE)
    for key, expected in (("t", base.T), ("rows", base[[5, 0, 0]]), ("cut", base[:2])):
        assert_same(of_torch(result[key]), np.ascontiguousarray(expected))


def test_shards_have_index_and_size_limit(tmp_path):
    expected = {f"w{i}": random_array("float32", (10, 10), i) for i in range(7)}
    names = write(tmp_path, expected, largest=900)
    assert names == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    index = json.loads((tmp_path / safetensors.INDEX).read_text())
    assert index["metadata"]["total_size"] == 2800
    result = {}
    for name in names:
        part = reference.load_file(tmp_path / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == part.keys()
        assert sum(tensor.nbytes for tensor in part.values()) <= 900
        result |= part
    for key, array in expected.items():
        assert_same(of_torch(result[key]), array)
        assert_reads(opened(tmp_path)[key], array)


def test_parts_may_be_written_in_any_order(tmp_path, monkeypatch):
    expected = {f"w{i}": random_array("float32", (10, i), i) for i in range(4)}
    monkeypatch.setattr(safetensors, "UNIT", 50)
    units, _ = safetensors.units(
        {n: from_array(a) for n, a in expected.items()}, tmp_path, 10**9, 64
    )
    assert len(units) > 2
    assert sum(unit.nbytes for unit in units) == sum(a.nbytes for a in expected.values())
    for unit in [*reversed(units), units[1]]:  # one unit is repeated after a kill
        unit.write()
    result = reference.load_file(tmp_path / FILE)
    for key, array in expected.items():
        assert_same(of_torch(result[key]), array)


def test_oversized_tensor_has_own_file(tmp_path):
    expected = {"a": np.zeros(5), "b": np.zeros(100), "c": np.zeros(5)}
    assert len(write(tmp_path, expected, largest=100)) == 3
    assert opened(tmp_path).keys() == expected.keys()


def test_files_without_index_are_merged(tmp_path):
    save(tmp_path / "one.safetensors", {"a": np.arange(3)})
    save(tmp_path / "two.safetensors", {"b": np.arange(4)})
    assert opened(tmp_path).keys() == {"a", "b"}


def test_files_outside_index_are_ignored(tmp_path):
    write(tmp_path, {"a": np.arange(3), "b": np.arange(3)}, largest=1)
    save(tmp_path / "old.safetensors", {"a": np.arange(9)})
    assert opened(tmp_path)["a"].shape == (3,)


def test_huggingface_cache_links_are_followed(tmp_path):
    """models--org--name/snapshots/<revision>/ holds links into ../../blobs."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    save(blobs / "feed", {"w": np.arange(5)})
    (snapshot / FILE).symlink_to(os.path.relpath(blobs / "feed", snapshot))
    assert_reads(opened(snapshot)["w"], np.arange(5))
    save(tmp_path / "elsewhere" / "x", {"w": np.arange(5)})
    (snapshot / FILE).unlink()
    (snapshot / FILE).symlink_to(tmp_path / "elsewhere" / "x")
    with pytest.raises(UserError, match="is a link out of the checkpoint"):
        opened(snapshot)


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


A = {"a": entry()}


def test_undamaged_file_is_read(tmp_path):
    (tmp_path / FILE).write_bytes(raw(A, bytes(8)))
    assert_reads(opened(tmp_path)["a"], np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "too short"),
        (bytes(7), "too short"),
        (bytes(8), "its header is damaged"),
        (raw(A, bytes(8), length=10**6), "its header would be 1000000 bytes"),
        (raw(A, bytes(8), length=2**64 - 1), "its header would be"),
        (raw(b"PK\x03\x04 " * 20), "its header is damaged"),
        (raw(b'{"a": '), "its header is damaged"),
        (raw(b"\xff\xfe{}"), "its header is damaged"),
        (raw([]), "its header is damaged"),
        (raw(7), "its header is damaged"),
        (raw(b"[" * 100_000), "its header is damaged"),
        (raw({"a": 7}), "its header is damaged"),
        (raw({"a": {}}), "its header is damaged"),
        (raw({"a": {"dtype": "F32", "shape": [2]}}), "its header is damaged"),
        (raw({"a": entry(shape=None)}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(shape=["2"])}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(shape=[2.0])}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(shape=[-2])}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(shape=[-2, -1])}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(shape=[1] * 99 + [2])}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(shape=[0, 2**62], offsets=[0, 0])}), "its header is damaged"),
        (raw({"a": entry(offsets=[0])}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(offsets=["0", "8"])}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(offsets=[0.0, 8.0])}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(offsets=None)}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(dtype=["F32"])}, bytes(8)), "its header is damaged"),
        (raw({"a": entry(dtype="F4")}, bytes(8)), "a has dtype F4, which is not supp"),
        (raw({"a": entry(dtype="f32")}, bytes(8)), "a has dtype f32, which is not supp"),
        (raw({"a": entry(shape=[3])}, bytes(8)), r"a is F32\[3\] in 8 bytes"),
        (raw({"a": entry(shape=[2**40])}, bytes(8)), r"a is F32\[1099511627776\] in 8 bytes"),
        (raw({"a": entry(offsets=[4, 12])}, bytes(12)), "a begins at byte 4, where 0 was"),
        (raw({"a": entry(offsets=[-8, 0])}, bytes(8)), "its header is damaged"),
        (raw({**A, "b": entry(offsets=[4, 12])}, bytes(12)), "b begins at byte 4, where 8 was"),
        (raw({**A, "b": entry(offsets=[0, 8])}, bytes(16)), "b begins at byte 0, where 8 was"),
        (raw({**A, "b": entry(offsets=[12, 20])}, bytes(20)), "b begins at byte 12, where 8 was"),
        (raw(A, bytes(7)), r"\d+ bytes, where its header asks for \d+: truncated"),
        (raw(A, bytes(9)), r"\d+ bytes, where its header asks for \d+: truncated"),
        (raw(A), r"\d+ bytes, where its header asks for \d+: truncated"),
        (raw({"__metadata__": 7, **A}, bytes(4)), "truncated"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_damaged_file_raises(tmp_path, content, says):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{tmp_path}/{FILE}: .*{says}"):
        opened(tmp_path)


def test_truncated_file_is_refused(tmp_path):
    save(tmp_path / FILE, arrays("float32", "bool"))
    whole = (tmp_path / FILE).read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / FILE).write_bytes(whole[:length])
        with pytest.raises(UserError, match=FILE):
            opened(tmp_path)


def test_mutated_header_is_refused_or_read(tmp_path):
    save(tmp_path / FILE, arrays("bfloat16", "int64"))
    whole = (tmp_path / FILE).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        at = int(rng.integers(header))
        (tmp_path / FILE).write_bytes(whole[:at] + rng.bytes(1) + whole[at + 1 :])
        try:
            for tensor in opened(tmp_path).values():
                assert tensor.all().shape == tensor.shape
        except UserError:
            refused += 1
    assert 100 < refused < 400


def test_name_in_two_files_is_refused(tmp_path):
    save(tmp_path / "one.safetensors", {"a": np.arange(3), "b": np.arange(3)})
    save(tmp_path / "two.safetensors", {"c": np.arange(3), "b": np.arange(3)})
    with pytest.raises(UserError, match=rf"^{tmp_path}: b is in two files"):
        opened(tmp_path)


def with_index(path, **weight_map):
    save(path / "one.safetensors", {"a": np.arange(3)})
    (path / safetensors.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_missing_file_of_index_raises(tmp_path):
    with_index(tmp_path, a="one.safetensors", b="two.safetensors")
    with pytest.raises(UserError, match=r"two\.safetensors cannot be read \(No such file"):
        opened(tmp_path)


def test_missing_tensor_of_index_raises(tmp_path):
    with_index(tmp_path, a="one.safetensors", b="one.safetensors")
    with pytest.raises(UserError, match=r"b is in the index and in no file"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "index",
    [b"", b"[]", b"7", b"{}", b'{"weight_map": 7}', b'{"weight_map": ["a"]}',
     b'{"weight_map": {"a": [[]]}}', b'{"weight_map": {"a": 5}}', b"[" * 100_000, b"\xff"],
)  # fmt: skip
def test_damaged_index_is_refused(tmp_path, index):
    save(tmp_path / "one.safetensors", {"a": np.arange(3)})
    (tmp_path / safetensors.INDEX).write_bytes(index)
    with pytest.raises(UserError, match=str(tmp_path)):
        opened(tmp_path)


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "{}/../out.safetensors", "link", "/dev/zero"]
)
def test_index_path_outside_directory_is_refused(tmp_path, name):
    inside = tmp_path / "in"
    save(tmp_path / "out.safetensors", {"b": np.arange(3)})
    inside.mkdir()
    (inside / "link").symlink_to("../out.safetensors")
    with_index(inside, a="one.safetensors", b=name.format(inside))
    with pytest.raises(UserError, match=r"leads out of|is a link out of"):
        opened(inside)


def test_directory_without_tensors_raises(tmp_path):
    (Path(tmp_path) / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no \.safetensors file in it"):
        opened(tmp_path)
