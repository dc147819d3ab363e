"""Reader and writer of `torch.save` archives, compared with torch."""

import collections
import io
import itertools
import zipfile

import numpy as np
import pytest

from jaxforge.errors import UserError
from tests.torch_compat.tensors import assert_reads, assert_same, of_torch, random_array
from torch_compat.formats import torch_zip
from torch_compat.formats.lazy import DTYPES, LazyTensor
from torch_compat.formats.torch_zip import Archive

torch = pytest.importorskip("torch")

SHAPES = [(), (0,), (1,), (5,), (3, 7), (2, 0, 4), (2, 3, 4, 5)]


def written(value):
    out = io.BytesIO()

    def put(data, at):
        out.seek(at)
        out.write(data)

    assert torch_zip.write_archive(value, put) == len(out.getvalue())
    return out.getvalue()


class InMemory:
    """File in memory that records the ranges of its reads."""

    def __init__(self, data):
        self.data, self.size, self.reads = data, len(data), []

    def __call__(self, start, length):
        assert 0 <= start <= start + length <= self.size
        self.reads.append((start, length))
        return np.frombuffer(self.data, np.uint8)[start : start + length]


def read(data, where="here"):
    return Archive(InMemory(data), 0, len(data), where).object()


def torch_saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("name", DTYPES)
def test_torch_reads_written_arrays(name):
    arrays = {str(shape): random_array(name, shape) for shape in SHAPES}
    result = torch.load(io.BytesIO(written(arrays)), weights_only=True)
    assert result.keys() == arrays.keys()
    for key, array in arrays.items():
        assert str(result[key].dtype) == f"torch.{name}"
        assert_same(of_torch(result[key]), array)
        assert result[key].is_contiguous()
    native = read(written(arrays))
    for key, array in arrays.items():
        assert_reads(native[key], array)


def test_torch_reads_written_containers():
    value = {
        "a": [1, 2.5, None, True, "é", (b"\xff", ())],
        "b": {"tensors": [np.arange(3), (np.float32(2) * np.ones((2, 2), np.float32),)]},
        "big": 2**80,
    }
    result = torch.load(io.BytesIO(written(value)), weights_only=True)
    assert result["a"] == value["a"]
    assert result["big"] == value["big"]
    first, (second,) = result["b"]["tensors"]
    assert_same(of_torch(first), np.arange(3))
    assert_same(of_torch(second), np.full((2, 2), 2, np.float32))


def test_strided_arrays_are_written():
    base = random_array("bfloat16", (6, 4))
    for array in (base.T, base[::2, 1:3], np.broadcast_to(base[0], (3, 4))):
        result = torch.load(io.BytesIO(written(array)), weights_only=True)
        assert_same(of_torch(result), np.ascontiguousarray(array))


def test_records_are_aligned_and_checksummed():
    arrays = {"x" * n: random_array("uint8", (n,)) for n in (1, 3, 64, 65, 200)}
    data = written(arrays)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        entries = archive.infolist()
    assert [e.filename for e in entries[:2]] == ["archive/data.pkl", "archive/byteorder"]
    for i, (entry, following) in enumerate(itertools.pairwise([*entries, None])):
        start = entry.header_offset + 30 + len(entry.filename)
        start += int.from_bytes(data[entry.header_offset + 28 : entry.header_offset + 30], "little")
        assert start % 64 == 0
        if following is not None:
            assert following.header_offset == start + entry.file_size, i


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[2:, 3:],
        lambda base: base[::2, ::3],
        lambda base: base[1:2].expand(4, 12),
        lambda base: base[4, 7],
        lambda base: base[5:],
        lambda base: torch.nn.Parameter(base),
        lambda base: torch.nn.Parameter(base[1:].t(), requires_grad=False),
        lambda base: base.to(torch.float8_e4m3fn).t(),
        lambda base: base.to(torch.uint16)[1:, 2:],
        lambda base: base > 30,
    ],
    ids=["transposed", "offset", "stepped", "expanded", "number", "empty", "parameter",
         "parameter of a view", "float8", "uint16", "bool"],
)  # fmt: skip
def test_views_saved_by_torch_are_read(make):
    tensor = make(torch.arange(60.0).reshape(5, 12))
    assert_reads(read(torch_saved(tensor)), of_torch(tensor))


def test_torch_objects_keep_structure():
    base = torch.arange(6.0)
    value = {
        "ordered": collections.OrderedDict(a=1, b=[2, {"c": (3, None)}]),
        "module": torch.nn.BatchNorm1d(3).state_dict(),  # an OrderedDict with attributes
        "shared": [base, base[2:], base],
        "shape": torch.Size([2, 3]), "dtype": torch.float8_e5m2, "device": torch.device("cuda:2"),
        "rng": np.random.RandomState(0).get_state(), "set": {1, 2}, "empty": b"", "i": 2j,
    }  # fmt: skip
    result = read(torch_saved(value))
    assert result["ordered"] == {"a": 1, "b": [2, {"c": (3, None)}]}
    assert_reads(result["module"]["weight"], np.ones(3, np.float32))
    assert_reads(result["module"]["num_batches_tracked"], np.array(0))
    for tensor, expected in zip(result["shared"], value["shared"], strict=True):
        assert_reads(tensor, expected.numpy())
    known = (result["shape"], result["dtype"], result["device"])
    assert known == ((2, 3), DTYPES["float8_e5m2"], "cuda:2")
    assert result["rng"][0] == "MT19937"
    assert (result["set"], result["empty"], result["i"]) == ({1, 2}, b"", 2j)


def test_slice_reads_only_its_bytes():
    array = random_array("float32", (1000, 100))
    data = torch_saved({"x": torch.from_numpy(array)})
    file = InMemory(data)
    tensor = Archive(file, 0, len(data), "here").object()["x"]
    assert isinstance(tensor, LazyTensor)
    assert sum(length for _, length in file.reads) < 5_000
    file.reads.clear()
    part = tensor.read((slice(500, 502), slice(10, 20)))
    assert_same(part, array[500:502, 10:20])
    assert file.reads == [(file.reads[0][0], 4 * 110)]


def test_concatenated_archives_are_read():
    arrays = [random_array("float32", (4, 5), seed) for seed in range(3)]
    data, locations = b"", []
    for i, array in enumerate(arrays):
        data += b"?" * (13 * i + 1)
        saved = torch_saved(torch.from_numpy(array))
        locations.append((len(data), len(saved)))
        data += saved
    file = InMemory(data + b"after")
    for array, (start, length) in zip(arrays, locations, strict=True):
        assert_reads(Archive(file, start, length, "here").object(), array)


def with_record(data, name, content):
    """Return the archive with a record replaced, or removed for None."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            if entry.filename.partition("/")[2] != name:
                new.writestr(entry.filename, old.read(entry))
        if content is not None:
            new.writestr(f"archive/{name}", content)
    return out.getvalue()


def test_big_endian_archive_is_refused():
    data = torch_saved(torch.arange(3))
    with pytest.raises(UserError, match="here: its numbers are big-endian"):
        read(with_record(data, "byteorder", b"big"))


def test_archive_without_byteorder_is_read():
    data = with_record(torch_saved(torch.arange(3)), "byteorder", None)
    assert_reads(read(data), np.arange(3))


def test_missing_record_raises():
    data = torch_saved(torch.arange(3))
    for name in ("data.pkl", "data/0"):
        with pytest.raises(UserError, match=f"here: the archive has no record {name}"):
            read(with_record(data, name, None))


def test_legacy_torch_format_is_refused():
    file = io.BytesIO()
    torch.save({"a": 1}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"here: no torch\.save archive there"):
        read(file.getvalue())
