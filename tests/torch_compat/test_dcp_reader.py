"""Reader of DCP checkpoints: layouts that PyTorch writes, and damage."""

import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest

from jaxforge.errors import UserError
from tests.machine import PATIENCE
from tests.torch_compat.tensors import (
    assert_reads,
    assert_same,
    of_torch,
    opened,
    random_array,
    read_everything,
    to_torch,
)
from torch_compat.formats.dcp_reader import METADATA, is_dcp
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES
from torch_compat.formats.torch_zip import Archive

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about saving in one process
WRITER = Path(__file__).with_name("write_layouts.py")


@pytest.fixture(scope="session")
def layouts(tmp_path_factory):
    """Files of four processes: a directory per layout, and `<layout>.npz`."""
    out = tmp_path_factory.mktemp("layouts")
    done = subprocess.run(
        [sys.executable, WRITER, out], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return out


def save(state, path):
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def saved(path, **tensors):
    return opened(save(tensors, path)).tensors


def edited(path, change):
    """Change the metadata of a checkpoint."""
    result = pickle.loads((path / METADATA).read_bytes())
    change(result)
    (path / METADATA).write_bytes(pickle.dumps(result))


def test_kempnerforge_shards_equal_gathered_tensors(golden):
    expected = np.load(golden("dcp_fsdp2_bf16") / "expected_full.npz")
    result = opened(golden("dcp_fsdp2_bf16") / "step_3").tensors
    assert result.keys() == set(expected)
    for name, tensor in result.items():
        kind = "float32" if name.endswith(".step") else "bfloat16"
        assert tensor.dtype == DTYPES[kind]
        assert_same(np.asarray(tensor.all(), np.float32), expected[name])


@pytest.mark.parametrize(
    "layout", [pytest.param("nested", marks=pytest.mark.slow), "flat", "strided", "replicated"]
)
def test_sharded_layouts_equal_full_tensors(layouts, layout):
    expected = np.load(layouts / f"{layout}.npz")
    result = opened(layouts / layout).tensors
    assert result.keys() == set(expected)
    for name, tensor in result.items():
        assert_reads(tensor, expected[name].astype(tensor.dtype), parts=12)


def test_layouts_have_intended_chunks(layouts):
    def chunks(layout, name):
        result = pickle.loads((layouts / layout / METADATA).read_bytes())
        return [(c.offsets[0], c.sizes[0]) for c in result.state_dict_metadata[name].chunks]

    assert chunks("nested", "model.up.weight") == [(0, 13), (13, 13), (26, 13), (39, 11)]
    assert chunks("nested", "model.down.weight") == [(0, 2), (2, 2), (4, 2), (6, 0)]
    assert chunks("strided", "column.weight") == [(0, 3), (5, 3), (3, 2), (8, 2)]
    assert chunks("replicated", "everywhere") == [(0, 3)]


def test_slice_across_chunks_is_joined(layouts):
    expected = np.load(layouts / "nested.npz")["model.up.weight"]
    tensor = opened(layouts / "nested").tensors["model.up.weight"]
    for rows in (slice(12, 14), slice(13, 26), slice(5, 45), slice(26, 26), slice(38, 50)):
        index = (rows, slice(2, 5))
        assert_same(tensor.read(index), expected[index])


def test_objects_of_optimizers_and_ranks_are_read(layouts):
    nested, flat = opened(layouts / "nested").objects, opened(layouts / "flat").objects
    assert nested("optimizer.param_groups.0.betas") == (0.9, 0.999)
    assert flat("optimizer.param_groups.up.bias.betas") == (0.9, 0.999)
    ranks = opened(layouts / "replicated").objects
    assert [ranks(f"dataloader.dp_rank_{i}.batches") for i in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_read(tmp_path, name):
    arrays = {
        "matrix": random_array(name, (5, 7)), "one": random_array(name, ()),
        "none": random_array(name, (0, 3)), "cube": random_array(name, (2, 3, 4)),
    }  # fmt: skip
    result = saved(tmp_path / "d", **{key: to_torch(array) for key, array in arrays.items()})
    assert result.keys() == arrays.keys()
    for key, array in arrays.items():
        assert_reads(result[key], array)


def test_strided_tensors_equal_torch(tmp_path):
    base = torch.arange(60.0).reshape(5, 12)
    tensors = {
        "transposed": base.t(),
        "offset": base[2:, 3:],
        "stepped": base[::2, ::3],
        "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "row": base[3],
        "number": base[4, 7],
    }
    result = saved(tmp_path / "d", **tensors)
    for key, tensor in tensors.items():
        assert_reads(result[key], of_torch(tensor))


def test_nested_objects_round_trip(tmp_path):
    plain = {
        "none": None, "yes": True, "int": 2**70, "float": 1.5, "text": "é", "bytes": b"\0\xff",
        "tuple": (1, (2.5, "x"), []), "list": [1, [2]], "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "gpu": torch.device("cuda", 1),
    }  # fmt: skip
    tensors = {"layers": [{"w": torch.ones(2)}, {"w": torch.zeros(2), "n": 3}]}
    state = {**tensors, "plain": plain, "pair": (torch.arange(3), "beside a tensor")}
    result = opened(save(state, tmp_path / "d"))
    assert result.tensors.keys() == {"layers.0.w", "layers.1.w"}
    assert_same(result.tensors["layers.0.w"].all(), np.ones(2, np.float32))
    assert_same(result.tensors["layers.1.w"].all(), np.zeros(2, np.float32))
    assert result.objects("layers.1.n") == 3
    known = {"dtype": DTYPES["bfloat16"], "device": "cpu", "gpu": "cuda:1"}
    for key, value in {**plain, **known}.items():
        assert result.objects(f"plain.{key}") == value, key
    tensor, text = result.objects("pair")
    assert_same(tensor.all(), np.arange(3))
    assert text == "beside a tensor"


def test_module_state_dict_in_object_is_read(tmp_path):
    """The state dict is an OrderedDict with an attribute."""
    torch.save({"ema": torch.nn.Linear(3, 2).state_dict()}, tmp_path / "train_state.pt")
    file = Directory(tmp_path).open("train_state.pt")
    ema = Archive(file, 0, file.size, "it").object()["ema"]
    assert ema["weight"].shape == (2, 3)


def test_checkpoint_at_url_is_read(layouts):
    memory = fsspec.filesystem("memory")
    memory.put(str(layouts / "nested"), "/ckpt/nested", recursive=True)
    try:
        expected = np.load(layouts / "nested.npz")
        result = opened("memory://ckpt/nested")
        for name, tensor in result.tensors.items():
            assert_reads(tensor, expected[name])
        assert result.objects("optimizer.param_groups.0.lr") == 0.01
        memory.rm("/ckpt/nested/__1_0.distcp")
        with pytest.raises(UserError, match=r"__1_0.distcp cannot be read"):
            opened("memory://ckpt/nested").tensors["model.up.weight"].all()
    finally:
        memory.rm("/ckpt", recursive=True)


def test_files_beyond_descriptor_limit_are_read(tmp_path):
    tensors = {str(i): torch.full((3,), float(i)) for i in range(80)}
    writer = dcp.FileSystemWriter(tmp_path / "d", single_file_per_rank=False)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    assert len(list((tmp_path / "d").glob("*.distcp"))) == 80
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(name) for name in map(str, (p.name for p in Path("/dev/fd").iterdir())))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 30, hard))
    try:
        result = opened(tmp_path / "d").tensors
        for key, tensor in tensors.items():
            assert_same(result[key].read((slice(0, 3),)), of_torch(tensor))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def stages(path, *parts):
    for i, part in enumerate(parts):
        save(part, path / f"pp{i}")
    return path


def test_pipeline_stages_are_merged(tmp_path):
    tied = torch.randn(4, 3)
    stages(
        tmp_path,
        {"tok": tied, "layers": {"0": torch.ones(2)}, "lr": 0.1},
        {"layers": {"1": torch.zeros(2)}, "lr": 0.1},
        {"head": torch.arange(6.0), "tok": tied.clone()},
    )
    result = opened(tmp_path)
    assert result.tensors.keys() == {"tok", "layers.0", "layers.1", "head"}
    assert_reads(result.tensors["tok"], of_torch(tied))
    assert_reads(result.tensors["layers.1"], np.zeros(2, np.float32))
    assert result.objects("lr") == 0.1


def test_differing_tied_weights_raise(tmp_path):
    tied = torch.zeros(4, 3)
    other = tied.clone()
    other[2, 1] = 1e-30
    stages(tmp_path, {"tok": tied}, {"tok": other})
    with pytest.raises(UserError, match=r"tok is in two pipeline stages and differs.*pp0.*pp1"):
        opened(tmp_path)


def test_equal_nan_tied_weights_are_merged(tmp_path):
    stages(tmp_path, {"tok": torch.full((2,), torch.nan)}, {"tok": torch.full((2,), torch.nan)})
    assert np.isnan(opened(tmp_path).tensors["tok"].all()).all()


@pytest.mark.parametrize(("lost", "named"), [(0, "pp0"), (1, "pp1")])
def test_missing_stage_raises(tmp_path, lost, named):
    stages(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)}, {"c": torch.ones(1)})
    shutil.rmtree(tmp_path / f"pp{lost}")
    with pytest.raises(UserError, match=rf"stages are missing or incomplete: {named}$"):
        opened(tmp_path)


def test_incomplete_stage_raises(tmp_path):
    stages(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    (tmp_path / "pp1" / METADATA).unlink()
    with pytest.raises(UserError, match=r"missing or incomplete: pp1$"):
        opened(tmp_path)


def test_directories_that_are_no_stages_are_ignored(tmp_path):
    save({"a": torch.ones(1)}, tmp_path / "pp0")
    for name in ("pp999999999999", "pp²", "pp-1", "pp01", "pptx"):
        (tmp_path / name).mkdir()
    assert opened(tmp_path).tensors.keys() == {"a"}


def test_incomplete_save_is_no_checkpoint(tmp_path):
    save({"a": torch.ones(1)}, tmp_path / "d")
    (tmp_path / "d" / METADATA).rename(tmp_path / "d" / ".metadata.tmp")
    assert not is_dcp(Directory(tmp_path / "d"))
    with pytest.raises(UserError, match=r"no \.metadata in it"):
        opened(tmp_path / "d")


@pytest.fixture
def broken(layouts, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(layouts / "nested", tmp_path / "broken"))


KEY = "model.up.weight"


def lose_a_chunk(result):
    del result.state_dict_metadata[KEY].chunks[1]


def overlap(result):
    chunks = result.state_dict_metadata[KEY].chunks
    chunks[2] = metadata.ChunkStorageMetadata(torch.Size([25, 0]), chunks[2].sizes)


def twice(result):
    chunks = result.state_dict_metadata[KEY].chunks
    chunks.append(chunks[0])


def outside(result):
    chunks = result.state_dict_metadata[KEY].chunks
    chunks[3] = metadata.ChunkStorageMetadata(torch.Size([39, 0]), torch.Size([12, 6]))


def before_the_beginning(result):
    chunks = result.state_dict_metadata[KEY].chunks
    chunks[0] = metadata.ChunkStorageMetadata(torch.Size([-1, 0]), torch.Size([13, 6]))


def other_rank(result):
    chunks = result.state_dict_metadata[KEY].chunks
    chunks[0] = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([13]))


def larger(result):
    result.state_dict_metadata[KEY].size = torch.Size([51, 6])


def other_dtype(result):
    result.state_dict_metadata[KEY].properties.dtype = torch.int32


def unknown_dtype(result):
    result.state_dict_metadata[KEY].properties.dtype = torch.complex128


def no_file(result):
    del result.storage_data[metadata.MetadataIndex(KEY, torch.Size([13, 0]))]


def exchanged(result, other):
    locations, at = result.storage_data, metadata.MetadataIndex(KEY, torch.Size([13, 0]))
    locations[at], locations[other] = locations[other], locations[at]


def another_item(result):
    exchanged(result, metadata.MetadataIndex("model.down.weight", torch.Size([0, 0])))


def same_bytes(result):
    """Let two chunks of one shape and dtype share bytes, which no other check would notice."""
    locations = result.storage_data
    at, there = (metadata.MetadataIndex(KEY, torch.Size([row, 0])) for row in (13, 26))
    locations[at] = locations[there]


def shifted(result):
    at = result.storage_data[metadata.MetadataIndex(KEY, torch.Size([13, 0]))]
    at.offset, at.length = at.offset + 1, at.length - 1


def beyond_the_file(result):
    result.storage_data[metadata.MetadataIndex(KEY, torch.Size([13, 0]))].offset = 10**9


def an_object(result):
    exchanged(result, metadata.MetadataIndex("optimizer.param_groups.0.lr"))


def of_an_extension(result):
    at = result.storage_data[metadata.MetadataIndex(KEY, torch.Size([13, 0]))]
    at.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lose_a_chunk, "its chunks hold 222 of 300 elements"),
        (overlap, r"the chunks at \[13:26, 0:6\] and \[25:38, 0:6\] overlap"),
        (twice, r"the chunks at \[0:13, 0:6\] and \[0:13, 0:6\] overlap"),
        (outside, r"a chunk at \[39:51, 0:6\] lies outside \[50, 6\]"),
        (before_the_beginning, r"a chunk at \[-1:12, 0:6\] lies outside"),
        (other_rank, r"a chunk at \[0:13\] lies outside"),
        (larger, "its chunks hold 300 of 306 elements"),
        (other_dtype, r"in __\d_0.distcp: a tensor float32\[13, 6\] lies where int32\[13, 6\]"),
        (unknown_dtype, r"torch\.complex128"),
        (no_file, r"no file is named for the chunk at \(13, 0\)"),
        (another_item, r"in __0_0.distcp: a tensor float32\[2, 50\] lies where"),
        (same_bytes, r"model.up.weight lie in the same bytes of __2_0.distcp"),
        (shifted, r"in __1_0.distcp: record data.pkl: the index is damaged"),
        (beyond_the_file, r"in __1_0.distcp: said to lie at bytes 10{9} to"),
        (an_object, r"in __\d_0.distcp: an object lies where a tensor should"),
        (of_an_extension, "was compressed by a storage extension"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_inconsistent_metadata_raise_with_key(broken, change, says):
    edited(broken, change)
    with pytest.raises(UserError, match=says) as caught:
        read_everything(broken)
    if change is not unknown_dtype:  # the error names only the dtype
        assert KEY in str(caught.value)
    assert str(broken) in str(caught.value)


def test_hole_among_empty_chunks_raises(broken):
    def lose(result):
        del result.state_dict_metadata["model.down.weight"].chunks[2]

    edited(broken, lose)
    with pytest.raises(UserError, match=r"model.down.weight: its chunks hold 200 of 300"):
        opened(broken)


def test_truncated_data_file_raises(broken):
    data = broken / "__3_0.distcp"
    data.write_bytes(data.read_bytes()[:20_000])
    with pytest.raises(UserError, match=r"broken: \S+ in __3_0.distcp: .* truncated"):
        read_everything(broken)


def test_exchanged_data_files_raise(broken):
    a, b = broken / "__2_0.distcp", broken / "__3_0.distcp"
    a.rename(broken / "other")
    b.rename(a)
    (broken / "other").rename(b)
    with pytest.raises(UserError, match=r"broken: \S+ in __[23]_0.distcp: "):
        read_everything(broken)


def test_missing_data_file_raises(broken):
    (broken / "__2_0.distcp").unlink()
    with pytest.raises(UserError, match=r"broken: __2_0.distcp cannot be read"):
        read_everything(broken)


def test_read_opens_only_needed_files(broken):
    """The files of the other ranks are deleted."""
    for rank in (0, 2, 3):
        (broken / f"__{rank}_0.distcp").unlink()
    part = opened(broken).tensors[KEY].read((slice(15, 20), slice(0, 6)))
    assert part.shape == (5, 6)
