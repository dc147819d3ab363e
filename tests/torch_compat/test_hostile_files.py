"""Untrusted checkpoints: no code runs, no path leads outside, and damage raises an error."""

import io
import os
import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest

from jaxforge.errors import UserError
from tests.torch_compat.hostile import (
    FILE,
    MODULE,
    archive_of,
    intact_state,
    metadata,
    patched,
    read_all,
    read_archive,
    tensor,
)
from tests.torch_compat.tensors import assert_same, opened, read_everything
from torch_compat.checkpoint import checkpoints
from torch_compat.checkpoint.inspection import inspect
from torch_compat.formats import pickles
from torch_compat.formats.dcp_reader import METADATA
from torch_compat.formats.lazy import DTYPES
from torch_compat.formats.pickles import Call, Global, New, Pairs, Persistent, UnsafePickleError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of torch, about saving in one process
    pytest.mark.usefixtures("limits"),
]


def edit(path, change):
    result = pickle.loads((path / METADATA).read_bytes())
    change(result)
    (path / METADATA).write_bytes(pickle.dumps(result))


def plant(path, key, archive):
    """Replace the item of a key by another archive."""
    data = path / FILE
    start = data.stat().st_size
    data.write_bytes(data.read_bytes() + archive)

    def change(result):
        for index, item in result.storage_data.items():
            if index.fqn == key:
                item.offset, item.length = start, len(archive)

    edit(path, change)


class Runs:
    """Object whose pickle calls a function when it is loaded."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


EXPLOITS = {
    "posix.mkdir": lambda path: Runs(os.mkdir, path),
    "builtins.eval": lambda path: Runs(eval, f"__import__('os').mkdir({path!r})"),
}


def in_metadata(path, exploit):
    (path / METADATA).write_bytes(pickle.dumps(exploit))


def deep_in_metadata(path, exploit):
    edit(path, lambda result: setattr(result, "planner_data", {"x": [exploit]}))


def as_a_path(path, exploit):
    edit(path, lambda result: setattr(result.storage_meta, "checkpoint_id", exploit))


def in_a_tensor(path, exploit):
    plant(path, "model.matrix", archive_of(pickle.dumps(exploit, 2)))


def in_an_object(path, exploit):
    plant(path, "optimizer.param_groups.0.lr", archive_of(pickle.dumps([exploit], 2)))


def in_train_state(path, exploit):
    (path / "train_state.pt").write_bytes(archive_of(pickle.dumps({"step": exploit}, 4)))


@pytest.mark.parametrize("name", EXPLOITS)
@pytest.mark.parametrize(
    "plant_it",
    [in_metadata, deep_in_metadata, as_a_path, in_a_tensor, in_an_object, in_train_state],
)
def test_pickle_exploit_does_not_run(broken, tmp_path, name, plant_it):
    mark = tmp_path / "executed"
    exploit = EXPLOITS[name](str(mark))
    pickle.loads(pickle.dumps(exploit))
    assert mark.exists()  # Python's own reader executes it
    mark.rmdir()
    plant_it(broken, exploit)
    named = name.replace("builtins", "(builtins|__builtin__)")
    with pytest.raises(UnsafePickleError, match=rf"^{broken}.*names {named}, .*nothing was run"):
        read_all(broken)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.eval", "builtins.exec", "functools.partial", "subprocess.Popen",
     "torch.load", "torch.hub.load", "torch.storage._load_from_bytes", "numpy.load",
     "types.CodeType", "pickle.loads", "operator.attrgetter", "jaxforge.errors.UserError",
     "copyreg._reconstructor",
     "torch.distributed.checkpoint.metadata.os", "torch._utils._rebuild_wrapper_subclass"],
)  # fmt: skip
def test_unknown_global_is_refused(broken, name):
    module, _, function = name.rpartition(".")
    for protocol in (2, 4):
        data = pickles.dump({"a": Global(module, function)}, protocol)
        (broken / METADATA).write_bytes(data)
        with pytest.raises(UnsafePickleError, match=rf"names {name}, which no checkpoint needs"):
            read_all(broken)
        with pytest.raises(UnsafePickleError, match=rf"names {name}, which no checkpoint needs"):
            read_archive(archive_of(data))


def test_getattr_is_limited_to_memory_formats(broken):
    """Python 3.11.0 to 3.11.3 pickle members of an enumeration with `getattr`."""
    enumeration = Global("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    by_name = Call(Global("builtins", "getattr"), (enumeration, "TORCH_CONTIGUOUS_FORMAT"))
    harmless = pickles.dump({"format": by_name}, 4)
    (broken / METADATA).write_bytes(harmless)
    with pytest.raises(UserError, match="holds no DCP metadata"):
        read_all(broken)
    for owner in (Global("torch", "Size"), Global("torch", "float32"), "text", {}):
        call = Call(Global("builtins", "getattr"), (owner, "__class__"))
        (broken / METADATA).write_bytes(pickles.dump({"a": call}, 4))
        with pytest.raises(UnsafePickleError, match=r"builtins\.getattr .*nothing was run"):
            read_all(broken)


def test_persistent_id_in_metadata_is_refused(broken):
    (broken / METADATA).write_bytes(pickles.dump(Persistent(("storage", "x")), 4))
    with pytest.raises(UnsafePickleError, match="refers to objects outside it"):
        read_all(broken)


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("into", [METADATA, "train_state.pt"])
def test_pickle_cannot_change_dtypes(broken, name, into):
    """NumPy would allow a pickle to change the size of bfloat16 for the whole process."""
    for state in ((3, ">", None, None, None, -1, -1, 0), {"numpy": 1}, (None, {"numpy": 1})):
        change = pickles.dump(Global("torch", name))[:-1] + pickles.dump(state)[2:-1] + b"b."
        (broken / into).write_bytes(change if into == METADATA else archive_of(change))
        with pytest.raises(UserError, match="not a readable pickle"):
            read_all(broken)
    assert DTYPES["bfloat16"].itemsize == 2
    assert np.arange(3).astype(DTYPES["bfloat16"]).tobytes() == bytes.fromhex("0000803f0040")


@pytest.mark.parametrize(
    "path",
    ["../secret.distcp", "sub/../../secret.distcp", "./../secret.distcp", "{outside}", "/dev/zero",
     "..", ".", "", "/", "link.distcp", "linked/secret.distcp", "a\0b", "nowhere.distcp"],
)  # fmt: skip
@pytest.mark.parametrize("url", ["", "file://"])
def test_path_outside_checkpoint_is_refused(broken, path, url):
    outside = broken.parent / "secret.distcp"
    shutil.copy(broken / FILE, outside)
    (broken / "sub").mkdir()
    (broken / "link.distcp").symlink_to(outside)
    (broken / "linked").symlink_to(broken.parent)

    def lead_out(result):
        for item in result.storage_data.values():
            item.relative_path = path.format(outside=outside)

    edit(broken, lead_out)
    with pytest.raises(UserError, match=r"leads out|is a link out|cannot be read"):
        read_all(f"{url}{broken}")


def test_path_within_checkpoint_is_read(broken):
    (broken / "sub").mkdir()
    (broken / FILE).rename(broken / "sub" / "data")
    (broken / "link").symlink_to("sub/data")
    for path in ("sub/data", "link", "sub/../link"):

        def change(result, path=path):
            for item in result.storage_data.values():
                item.relative_path = path

        edit(broken, change)
        assert_same(
            read_everything(broken)[0]["model.matrix"], intact_state()["model"]["matrix"].numpy()
        )


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, 100), (0, -1), (0, 10**15), (10**15, 1), (10**30, 10**30), (-(10**30), 10), (0, 0),
     (0, 21), (100, 10**30), (1.5, 10), ("0", 10), (None, 10), (True, False), ([], 1)],
)  # fmt: skip
def test_range_beyond_file_is_refused(broken, offset, length):
    def change(result):
        for item in result.storage_data.values():
            item.offset, item.length = offset, length

    edit(broken, change)
    with pytest.raises(UserError):
        read_all(broken)


def test_undamaged_geometry_is_read():
    result = read_archive(archive_of(pickles.dump(tensor(offset=18))))
    assert_same(result.all(), np.zeros((2, 3), np.float32))


@pytest.mark.parametrize(
    "damaged",
    [
        tensor(offset=19),
        tensor(offset=-1),
        tensor(offset=2**62),
        tensor(offset=1.0),
        tensor(offset=None),
        tensor(size=(9, 3)),
        tensor(size=(-2, 3)),
        tensor(size=(2**40, 2**40), stride=(0, 1)),
        tensor(size=(2**70, 3), stride=(0, 1)),
        tensor(size=(0, 2**62), stride=(1, 1)),
        tensor(size=(2, 3, 1)),
        tensor(size=("2", 3)),
        tensor(size=([2], [3]), stride=([3], [1]), offset=[]),
        tensor(size=7),
        tensor(stride=(-3, 1)),
        tensor(stride=(2**61, 1)),
        tensor(stride=(3, 22)),
        tensor(stride=(3.0, 1.0)),
        tensor(size=(1,) * 100, stride=(1,) * 100),
        tensor(storage=Persistent(("storage", Global("torch", "FloatStorage"), "1", "cpu", 24))),
        tensor(storage=Persistent(("storage", Global("torch", "FloatStorage"), "../x", "cpu", 24))),
        tensor(storage=Persistent(("storage", Global("torch", "Size"), "0", "cpu", 24))),
        tensor(storage=Persistent(("storage", Global("torch", "FloatStorage"), 0, "cpu", 24))),
        tensor(storage=Persistent(("module", Global("torch", "FloatStorage"), "0", "cpu", 24))),
        tensor(storage=Persistent(("storage",))),
        tensor(storage=New(Global("numpy", "ndarray"), {"dtype": 1, "record": "0"})),
        tensor(storage=(1, 2)),
        tensor(dtype="float32"),
        tensor(dtype=New(Global("numpy", "dtype"), {"numpy": 4, "itemsize": 4})),
        tensor(dtype=Global("torch", "float64"), offset=9),
        tensor(dtype=tensor()),
    ],
    ids=str,
)
def test_tensor_outside_storage_is_refused(damaged):
    with pytest.raises(UserError, match="here: "):
        read_archive(archive_of(pickles.dump({"a": damaged}))).get("a").all()


def shared(make, depth=60):
    """Return an object with 2**depth leaves in a small pickle."""
    value = make("x", "x")
    for _ in range(depth):
        value = make(value, value)
    return value


def test_shared_objects_are_resolved_once():
    for make in (lambda a, b: [a, b], lambda a, b: (a, b), lambda a, b: {"a": a, "b": b}):
        result = read_archive(archive_of(pickle.dumps(shared(make), 2)))
        assert len(result) == 2
        children = list(result.values() if isinstance(result, dict) else result)
        assert children[0] is children[1]


PLACEHOLDER = 0x7E57AB1E


def bombed(value):
    """Return the pickle of `value` with PLACEHOLDER replaced by a list of 2**60 leaves."""
    lists = b"]"
    for i in range(60):
        number = struct.pack("<I", 500 + i)  # unused entries of the memo
        lists += b"r" + number + b"0](j" + number + b"j" + number + b"e"
    data, here = pickles.dump(value), b"J" + struct.pack("<i", PLACEHOLDER)
    assert data.count(here) == 1
    return data.replace(here, lists)


@pytest.mark.parametrize(
    "value",
    [
        Call(Global("torch.serialization", "_get_layout"), (PLACEHOLDER,)),
        Call(Global(MODULE, "_MEM_FORMAT_ENCODING"), (PLACEHOLDER,)),
        Call(Global("pathlib", "PosixPath"), (PLACEHOLDER,)),
        {"key": PLACEHOLDER},
        metadata(fqn=PLACEHOLDER),
        metadata(offset=PLACEHOLDER),
        metadata(offset=(PLACEHOLDER,)),
        metadata(size=PLACEHOLDER),
        metadata(size=(PLACEHOLDER, 1)),
        metadata(sizes=(PLACEHOLDER, 1)),
        metadata(offsets=(1, PLACEHOLDER)),
        metadata(properties=(PLACEHOLDER,)),
        metadata(path=PLACEHOLDER),
        metadata(start=PLACEHOLDER),
        metadata(chunks=PLACEHOLDER),
        metadata(storage=PLACEHOLDER),
    ],
    ids=lambda value: str(value)[-90:],
)
def test_metadata_bomb_is_refused(broken, value):
    (broken / METADATA).write_bytes(bombed(value))
    with pytest.raises(UserError) as caught:
        read_all(broken)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "value",
    [
        Persistent(("storage", PLACEHOLDER, "0", "cpu", 24)),
        Persistent(("x", 1, PLACEHOLDER, 1, 1)),
        Persistent((PLACEHOLDER,)),
        Call(Global("torch", "device"), (PLACEHOLDER,)),
        Call(Global("torch", "device"), ("cpu", PLACEHOLDER)),
        Call(Global("collections", "OrderedDict"), (PLACEHOLDER,)),
        Call(Global("builtins", "complex"), (PLACEHOLDER,)),
        tensor(size=(PLACEHOLDER,), stride=(1,)),
        tensor(size=PLACEHOLDER),
        tensor(offset=PLACEHOLDER),
        tensor(dtype=PLACEHOLDER),
        tensor(storage=(PLACEHOLDER,)),
    ],
    ids=str,
)
def test_archive_bomb_is_refused(value):
    with pytest.raises(UserError, match="here: ") as caught:
        read_archive(archive_of(bombed(value)))
    assert len(str(caught.value)) < 1000


def test_settings_bomb_is_ignored(broken):
    """The settings of two groups are compared with each other and with the config."""
    groups = [{"lr": 1, "betas": 2, "weight_decay": 3, "eps": 4}] * 2
    dcp.save({"optimizer": {"param_groups": groups}}, checkpoint_id=broken, no_dist=True)
    for i, group in enumerate(groups):
        for key in group:
            plant(broken, f"optimizer.param_groups.{i}.{key}", archive_of(bombed(PLACEHOLDER)))
    assert inspect(checkpoints.find(broken))["settings"] == {}


def test_cyclic_object_is_refused():
    in_list = []
    in_list.append({"a": (1, in_list)})
    in_dict = {}
    in_dict["x"] = [in_dict]
    for value in (in_list, in_dict):
        with pytest.raises(UserError, match="here: the object contains itself"):
            read_archive(archive_of(pickle.dumps(value, 2)))


def nested(depth):
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def test_deeply_nested_object_is_refused(broken):
    with pytest.raises(UserError, match="here: the object is nested too deeply"):
        read_archive(archive_of(nested(200_000)))
    (broken / METADATA).write_bytes(nested(200_000))
    with pytest.raises(UserError, match="holds no DCP metadata"):
        read_all(broken)


def test_compressed_record_is_refused(broken):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as result:
        result.writestr("archive/data.pkl", pickles.dump(tensor()))
        result.writestr("archive/data/0", bytes(64 << 20))
    assert len(out.getvalue()) < 400_000
    plant(broken, "model.matrix", out.getvalue())
    with pytest.raises(UserError, match=rf"model.matrix in {FILE}: record .* is compressed"):
        read_all(broken)


END = -22  # offset of the end record of an archive


@pytest.mark.parametrize(
    ("at", "form", "values"),
    [
        (END + 16, "<I", [2**32 - 1]),  # offset of the directory
        (END + 16, "<I", [0]),
        (END + 12, "<I", [2**32 - 1]),  # size of the directory
        (END + 12, "<I", [0]),
    ],
)
def test_misplaced_zip_directory_is_refused(at, form, values):
    data = archive_of(pickles.dump(tensor()))
    with pytest.raises(UserError, match="here: "):
        read_archive(patched(data, at, form, *values)).all()


@pytest.mark.parametrize(
    ("field", "form", "value"),
    [
        (6, "<H", 99),  # version
        (8, "<H", 1),  # encrypted
        (10, "<H", 8),  # compressed
        (10, "<H", 77),
        (20, "<I", 2**31),  # sizes
        (24, "<I", 2**31),
        (42, "<I", 2**31),  # offset of the local header
        (42, "<I", 2**32 - 1),
    ],
)
def test_false_zip_entry_is_refused(field, form, value):
    data = archive_of(pickles.dump(tensor()))
    last = data.rindex(b"PK\x01\x02")  # entry of data/0
    with pytest.raises(UserError, match="here: "):
        read_archive(patched(data, last + field, form, value)).all()


def test_false_sizes_of_zip_entry_are_refused(broken):
    data = archive_of(pickles.dump(tensor(size=(2**20, 3))))
    last = data.rindex(b"PK\x01\x02")
    data = patched(patched(data, last + 20, "<I", 2**28), last + 24, "<I", 2**28)
    with pytest.raises(UserError, match="here: record data/0: it is truncated"):
        read_archive(data).all()


def test_undamaged_metadata_are_read(broken):
    (broken / METADATA).write_bytes(pickles.dump(metadata(), 4))
    assert opened(broken).tensors["w"].shape == (4, 6)


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        7,
        {"state_dict_metadata": {}},
        Global(MODULE, "Metadata"),
        New(Global(MODULE, "Metadata"), {}),
        New(Global(MODULE, "Metadata"), {"state_dict_metadata": [1]}),
        New(Global(MODULE, "Metadata"), (1, 2)),
        metadata(storage=[]),
        metadata(storage=7),
        metadata(storage={}),
        metadata(storage={"w": 1}),
        metadata(storage=Pairs([(Global(MODULE, "MetadataIndex"), None)])),
        metadata(fqn="other"),
        metadata(fqn=7),
        metadata(fqn=None),
        metadata(offset=[0, 0]),
        metadata(offset="00"),
        metadata(offset=({}, 0)),
        metadata(offset=None),
        metadata(key=7),
        metadata(key=None),
        metadata(key=(1, 2)),
        metadata(size=None),
        metadata(size=(4, 6.0)),
        metadata(size="46"),
        metadata(size=(4, "6")),
        metadata(size=(-4, -6)),
        metadata(size=(0, -6), chunks=[]),
        metadata(size=(0, 2**62), sizes=(0, 2**62)),
        metadata(size=(2**70, 1), sizes=(2**70, 1)),
        metadata(size=(1,) * 70, sizes=(1,) * 70, offsets=(0,) * 70),
        metadata(sizes=(4.0, 6.0)),
        metadata(sizes=None),
        metadata(sizes=(4,)),
        metadata(sizes=(4, None)),
        metadata(offsets=(0, -1)),
        metadata(offsets="00"),
        metadata(chunks=None),
        metadata(chunks=7),
        metadata(chunks=[None]),
        metadata(chunks=[]),
        metadata(properties=None),
        metadata(properties=()),
        metadata(properties=("float32",)),
        metadata(properties=(Global("torch", "Size"),)),
        metadata(properties={"dtype": 1}),
    ],
    ids=lambda value: str(value)[-90:],
)
def test_metadata_of_wrong_types_are_refused(broken, damaged):
    (broken / METADATA).write_bytes(pickles.dump(damaged, 4))
    with pytest.raises(UserError, match=str(broken)):
        read_all(broken)


@pytest.mark.parametrize(
    "state",
    [
        None, [], 7, {"step": "x", "tokens_seen": 1}, {"step": 1}, {"step": [1], "tokens_seen": 1},
        {"step": 1, "tokens_seen": 1, "dataloader": 7},
        {"step": 1, "tokens_seen": 1, "dataloader": {"batches_yielded": "many"}},
        {"step": 1, "tokens_seen": 1, "dataloader": {"sampler": {"num_replicas": {}}}},
        {"step": 1, "tokens_seen": 1, "scheduler": {"last_epoch": [4]}},
        {"step": 1e400, "tokens_seen": 1},
    ],
    ids=str,
)  # fmt: skip
def test_train_state_of_wrong_types_is_refused(broken, state):
    torch.save(state, broken / "train_state.pt")
    with pytest.raises(UserError, match=r"train_state\.pt: not a training state"):
        read_all(broken)


@pytest.mark.parametrize("value", [np.zeros(2, np.float32), np.float32(np.inf), np.float32(np.nan)])
def test_non_numeric_step_is_refused(tmp_path, value):
    step = torch.from_numpy(np.asarray(value))
    dcp.save({"train_state": {"step": step}}, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(UserError, match=r"train_state\.step is not a number"):
        read_all(tmp_path / "d")


@pytest.mark.parametrize("name", [METADATA, FILE, "train_state.pt"])
def test_garbage_is_refused(broken, name):
    rng = np.random.default_rng(0)
    for size in (0, 1, 2, 21, 22, 23, 300, 5000):
        for start in (b"", b"\x80\x04", b"PK\x03\x04"):
            (broken / name).write_bytes(start + rng.bytes(size))
            with pytest.raises(UserError):
                read_all(broken)


def mutations(data, rng, count):
    """Yield copies of data with a changed byte, removed or repeated bytes, or a truncated end."""
    for _ in range(count):
        at = int(rng.integers(len(data)))
        kind = rng.integers(10)
        if kind < 7:
            yield data[:at] + rng.bytes(1) + data[at + 1 :]
        elif kind < 8:
            yield data[:at] + data[at + 1 + int(rng.integers(8)) :]
        elif kind < 9:
            yield data[:at] + data[at - 8 : at] + data[at:]
        else:
            yield data[:at]


@pytest.mark.parametrize(("name", "count"), [(METADATA, 400), (FILE, 400), ("train_state.pt", 150)])
def test_mutated_file_is_refused_or_read(original, broken, name, count):
    data = (original / name).read_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for mutation in mutations(data, rng, count):
        (broken / name).write_bytes(mutation)
        try:
            tensors, _ = read_all(broken)
        except UserError:
            refused += 1
        else:
            assert all(isinstance(array, np.ndarray) for array in tensors.values())
    assert count // 10 < refused < count
    (broken / name).write_bytes(data)
    assert_same(read_all(broken)[0]["model.matrix"], intact_state()["model"]["matrix"].numpy())
