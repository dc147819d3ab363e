"""Reader and writer of OCDBT databases, compared with tensorstore."""

import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from jaxforge.errors import UserError
from tests.torch_compat.tensors import assert_same, random_array
from torch_compat.checkpoint import orbax_store
from torch_compat.formats import ocdbt, ocdbt_writer
from torch_compat.formats.lazy import DTYPES, from_array, full_index, index_shape

ARRAYS = {
    **{f"of.{name}": random_array(name, (4, 6), seed) for seed, name in enumerate(DTYPES)},
    "number": np.asarray(7, np.int32),
    "stacked": random_array("float32", (3, 5, 7), 1),
    "empty": np.zeros((0, 3), np.float32),
}
INDICES = [
    (slice(0, 3), slice(0, 5), slice(0, 7)),
    (slice(1, 2), slice(0, 5), slice(0, 7)),
    (slice(0, 3), slice(2, 4), slice(1, 6)),
    (slice(2, 3), slice(4, 5), slice(0, 7)),
    (slice(1, 1), slice(0, 5), slice(0, 7)),
]


def saved(directory, arrays, chunks=(), **options):
    """Save arrays with Orbax; `chunks` are the dimensions that are split."""
    save_args = {
        name: ocp.SaveArgs(shard_axes=chunks if array.ndim > 2 else ())
        for name, array in arrays.items()
    }
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, **options)
    handler.save(directory, args=ocp.args.PyTreeSave(arrays, save_args=save_args))
    handler.finalize(directory)
    return directory


def written(directory, array, **metadata):
    """Write an array "a" with tensorstore."""
    metadata = {"shape": array.shape, "chunks": [2, 4], "compressor": None, **metadata}
    dtype = metadata.pop("dtype", array.dtype.newbyteorder("<").str)
    spec = {**ocdbt.spec(directory, "a"), "metadata": {**metadata, "dtype": dtype}}
    ts.open(spec, create=True).result().write(array).result()
    return directory


@pytest.fixture
def mapped_only(monkeypatch):
    """Let every read by tensorstore fail the test."""
    monkeypatch.setattr(ocdbt, "open_with_tensorstore", lambda store, name: pytest.fail(name))


def test_saved_arrays_are_memory_mapped(tmp_path, mapped_only):
    arrays = {name: array for name, array in ARRAYS.items() if array.size}
    result = ocdbt.open_arrays(saved(tmp_path / "state", arrays, chunks=(0, 1)))
    assert result.keys() == arrays.keys()
    for name, array in arrays.items():
        assert_same(result[name].all(), array)
    for index in INDICES:
        assert_same(result["stacked"].read(index), arrays["stacked"][index])
    view = result["of.float32"].all()
    assert not view.flags.writeable
    assert view.base is not None  # not a copy


@pytest.mark.parametrize("chunk", [(1, 5, 7), (1, 2, 7), (2, 3, 4), (3, 5, 7)])
def test_chunk_shape_does_not_change_array(tmp_path, mapped_only, chunk):
    array = ARRAYS["stacked"]
    result = ocdbt.open_arrays(written(tmp_path, array, chunks=chunk))["a"]
    for index in [full_index(array.shape), *INDICES]:
        assert_same(result.read(index), array[index])


@pytest.mark.parametrize(
    ("unlike", "array"),
    [
        ({"compressor": {"id": "zstd", "level": 1}}, random_array("float32", (5, 6))),
        ({"order": "F"}, random_array("float32", (5, 6))),
        ({"dtype": ">f4"}, random_array("float32", (5, 6))),
        ({"dimension_separator": "/"}, random_array("float32", (5, 6))),
        ({}, np.zeros((5, 6), np.float32)),  # tensorstore omits such chunks
        ({}, np.pad(random_array("float32", (2, 4)), ((0, 3), (0, 2)))),
    ],
)
def test_other_layouts_are_read_by_tensorstore(tmp_path, monkeypatch, unlike, array):
    opened, open_array = [], ocdbt.open_with_tensorstore

    def record(store, name):
        opened.append(name)
        return open_array(store, name)

    monkeypatch.setattr(ocdbt, "open_with_tensorstore", record)
    result = ocdbt.open_arrays(written(tmp_path, array, fill_value=0, **unlike))["a"]
    assert opened == ["a"]
    assert np.array_equal(result.all(), array)


def test_index_of_several_nodes_is_read_by_tensorstore(tmp_path):
    spec = ocdbt.spec(tmp_path, "a")
    small = {**spec, "kvstore": {**spec["kvstore"], "config": {"max_decoded_node_bytes": 300}}}
    array = random_array("float32", (20, 20))
    about = {"shape": array.shape, "chunks": [2, 4], "compressor": None, "dtype": "<f4"}
    ts.open({**small, "metadata": about}, create=True).result().write(array).result()
    assert ocdbt.tensor_locations(tmp_path) == {}
    assert_same(ocdbt.open_arrays(tmp_path)["a"].all(), array)


def test_missing_chunk_raises(tmp_path):
    store = saved(tmp_path / "state", {"x": random_array("float32", (64, 64))})
    data, offset, length = ocdbt.tensor_locations(store)["x"]["0.0"]
    (store / data).write_bytes((store / data).read_bytes()[: offset + length - 1])
    with pytest.raises(UserError, match=r"x: .* is truncated"):
        ocdbt.open_arrays(store)["x"].all()
    (store / data).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        ocdbt.open_arrays(store)["x"].all()


def test_special_characters_in_path_are_literal(tmp_path):
    store = saved(tmp_path / "state", {"x": random_array("float32", (8, 8))})
    for name in ("[1]", "a%20b", "c#d", "e?f", "50%"):
        shutil.copytree(store, tmp_path / name)
        assert ocdbt.open_arrays(tmp_path / name).keys() == {"x"}


@pytest.mark.parametrize("most", [16, 40, 1 << 20])
def test_written_database_is_read_by_tensorstore(tmp_path, mapped_only, most):
    """Files have several chunks; the last one of an array may be partial."""
    locations = {}
    for number, (name, array) in enumerate(ARRAYS.items()):
        chunks = list(orbax_store.split_chunks(name, from_array(array), most))
        orbax_store.write_chunk_file(tmp_path / "d" / str(number), chunks)
        for i, chunk in enumerate(chunks):
            locations[chunk.key] = f"d/{number}", i * chunk.nbytes, chunk.nbytes
        shape = index_shape(orbax_store.split_blocks(from_array(array), most)[0])
        locations[f"{name}/.zarray"] = ocdbt_writer.description(array.shape, shape, array.dtype)
    locations["short/.zarray"] = ocdbt_writer.description((2,), (2,), np.dtype(np.int32))
    locations["short/0"] = np.arange(2, dtype=np.int32).tobytes()
    ocdbt_writer.write_index(tmp_path, locations)
    expected = {**ARRAYS, "short": np.arange(2, dtype=np.int32)}
    result = ocdbt.open_arrays(tmp_path)
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        assert_same(result[name].all(), array)
        general = ts.open(ocdbt.spec(tmp_path, name)).result()
        assert_same(general.read().result(), array)


def test_index_of_many_keys_is_readable(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "large").write_bytes(bytes(range(200)) * 10)
    for number in range(300):
        (tmp_path / "d" / str(number)).write_bytes(str(number).encode())
    names = {f"of.{n}/0": (f"d/{n}", 0, len(str(n))) for n in range(300)}
    ocdbt_writer.write_index(tmp_path, {**names, "x/0": ("d/large", 1000, 1000), "": b"inline"})
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    assert len(store.list().result()) == 302
    assert store["of.217/0"] == b"217"
    assert store["x/0"] == bytes(range(200)) * 5
    assert store[""] == b"inline"


def test_crc32c_matches_reference():
    assert ocdbt_writer.crc32c(b"123456789") == 0xE3069283
