"""Limits on the cost of untrusted files: no crash, hang, memory exhaustion or terminal escape.

Without the limits, most tests would end the process or exceed the limits of the fixture `limits`.
"""

import itertools
import json
import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest

from jaxforge.config.reading.load import make_config
from jaxforge.errors import UserError
from jaxforge.storage.untrusted_json import load_object
from tests.helpers import cli
from tests.torch_compat.hostile import (
    FILE,
    MODULE,
    archive_of,
    metadata,
    patched,
    read_all,
    read_archive,
    tensor,
)
from tests.torch_compat.mutations import TEXTS
from torch_compat.checkpoint import checkpoints, hf_state
from torch_compat.checkpoint.inspection import inspect
from torch_compat.checkpoint.name_maps import NAME_MAPS
from torch_compat.checkpoint.state import abstract_target
from torch_compat.formats import pickles, safetensors
from torch_compat.formats.dcp_reader import METADATA, check_cover
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import DTYPES, from_array, zeros
from torch_compat.formats.pickles import Call, Global, New, Pairs
from torch_compat.names.translation import Translation, translate

pytestmark = pytest.mark.usefixtures("limits")

MANY = 1_000_000
NESTED = b")" + b"\x85" * 300_000  # a tuple in a tuple in a tuple
SHARED = b")" + b"2\x86" * 60  # a small tuple whose hash takes 2**60 steps
ORDERED = b"ccollections\nOrderedDict\n"


@pytest.mark.parametrize("tuples", [NESTED, SHARED], ids=["nested", "shared"])
@pytest.mark.parametrize(
    "around",
    [
        b"\x80\x02}%sNs.",
        b"\x80\x02}(%sNu.",
        b"\x80\x02(%sNd.",
        b"\x80\x04\x8f(%s\x90.",
        b"\x80\x04(%s\x91.",
        b"\x80\x02c__builtin__\nset\n](%se\x85R.",
        b"\x80\x02c__builtin__\nfrozenset\n](%se\x85R.",
        b"\x80\x02" + ORDERED + b"](%sN\x86e\x85R.",
        b"\x80\x02" + ORDERED + b")R%sNs.",
    ],
)
def test_nested_tuple_keys_are_refused(around, tuples):
    """Python hashes tuples recursively, without a limit and without a cache."""
    with pytest.raises(UserError, match=r"here: not a readable pickle .*as a key"):
        read_archive(archive_of(around % tuples))


def test_usual_keys_are_read():
    value = {"a": 1, 2: 3, (4, ("b", None)): {5, True, "c"}, b"d": frozenset({1.5}), None: 2j}
    for protocol in range(6):
        data = pickle.dumps(value, protocol)
        assert pickles.load(data, {("builtins", "set"): set, ("builtins", "complex"): complex,
                                   ("__builtin__", "set"): set, ("__builtin__", "complex"): complex,
                                   ("__builtin__", "frozenset"): frozenset,
                                   ("builtins", "frozenset"): frozenset,
                                   ("__builtin__", "bytes"): bytes,
                                   ("_codecs", "encode"): lambda text, _: text.encode("latin1")},
                            "here") == value  # fmt: skip


def test_colliding_keys_are_limited():
    far = [b"\x8a\x09" + (i * (2**61 - 1)).to_bytes(9, "little", signed=True) for i in range(2, 9)]
    tuples = [b"K\0M" + struct.pack("<H", i) + b"\x86" for i in range(2000)]
    complexes = [
        b"ccollections\nx\nG%sG%s\x86R" % (struct.pack(">d", -1000003.0 * i), struct.pack(">d", i))
        for i in range(2000)
    ]
    assert len({hash(complex(-1000003.0 * i, i)) for i in range(2000)}) == 1
    names = {("collections", "x"): complex}
    for keys in (far, tuples, complexes):
        with pytest.raises(UserError, match="not a readable pickle"):
            pickles.load(
                b"\x80\x02}(" + b"".join(key + b"N" for key in keys) + b"u.", names, "here"
            )


PATH = b"cpathlib\nPosixPath\nq\0X\2\0\0\0abq\1"
MEMBERS = b"".join(b"M" + struct.pack("<H", i) for i in range(50_000))  # 4 MB of a set
LONG = b"X" + struct.pack("<I", MANY) + b"a" * MANY


@pytest.mark.parametrize(
    "data",
    [
        PATH + b"0h\0h\1h\1\x86Rq\1" * 40,
        b"ctorch\nSize\nq\0](" + b"K\0" * MANY + b"eq\1](" + b"h\0h\1\x85R" * 50_000 + b"e",
        b"c_codecs\nencode\nq\0" + LONG + b"q\1](" + b"h\0h\1\x85R" * 50_000 + b"e",
        b"c__builtin__\nset\nq\0](" + MEMBERS + b"eq\1](" + b"h\0h\1\x85R" * 12 + b"e",
        b"(" + b"\x8f" * 5_000_000 + b"l",
        b"(" + b"}" * 20_000_000 + b"l",
        b"(" + b"\x85" * 20 + b"Nt" + b"\x94" * 50 + b"Nr\xff\xff\xff\x7f",
        b"\x8b\0\0\x10\0" + b"\x7f" * (1 << 20),
    ],
    ids=["paths", "copies", "texts", "members", "sets", "dicts", "memo", "number"],
)
def test_pickle_memory_is_limited_by_bytes_read(broken, data):
    (broken / METADATA).write_bytes(b"\x80\x02" + data + b".")
    with pytest.raises(
        UserError, match=r"not a readable pickle|names (_codecs\.encode|__builtin__\.set)"
    ):
        read_all(broken)
    with pytest.raises(UserError, match=r"not a readable pickle|names pathlib\.PosixPath"):
        read_archive(archive_of(b"\x80\x02" + data + b"."))


STORAGE = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu%stQ"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n("


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (STORAGE % b"X\2\0\0\x0012", "not a tensor storage"),
        (REBUILD + STORAGE % b"K\1" + b"K\0X\2\0\0\x0011K\1\x85tR", "a size that is not a tuple"),
        (REBUILD + STORAGE % b"K\1" + b"K\0K\1\x85X\2\0\0\x0011tR", "a size that is not a tuple"),
    ],
)
def test_text_as_size_is_refused(data, message):
    """Otherwise a long text would become a tuple of its characters."""
    with pytest.raises(UserError, match=rf"not a readable pickle .*{message}"):
        read_archive(archive_of(b"\x80\x02" + data + b"."))


def test_pickle_cannot_set_attributes_of_globals():
    """Python's reader would set attributes of a function for the whole process."""
    for name in (b"torch._utils\n_rebuild_tensor_v2", b"torch\nSize", b"collections\nOrderedDict"):
        for state in (b"N}X\x01\0\0\0aNs\x86", b"}X\x01\0\0\0aNs"):
            with pytest.raises(UserError, match=r"not a readable pickle \(.*\)"):
                read_archive(archive_of(b"\x80\x02c" + name + b"\n" + state + b"b."))


@pytest.mark.parametrize("name", [METADATA, FILE, "train_state.pt"])
def test_pipe_is_refused(broken, name):
    (broken / name).unlink()
    os.mkfifo(broken / name)
    with pytest.raises(UserError, match="not a regular file"):
        read_all(broken)


def test_chunk_cover_check_is_linear():
    """Rows in one half, columns in the other: half of the chunks overlap along each dimension."""
    n = 20_000
    rows = [(slice(i, i + 1), slice(0, n)) for i in range(n)]
    columns = [(slice(n, 2 * n), slice(i, i + 1)) for i in range(n)]
    check_cover("here", (2 * n, n), rows + columns)
    with pytest.raises(
        UserError, match=r"here: the chunks at \[0:1, 0:20000\] and \[0:1, .*overlap"
    ):
        check_cover("here", (2 * n, n), [*rows[:7], *rows[8:], rows[0], *columns])
    with pytest.raises(UserError, match=r"that at \[7, 0\] is in none"):
        check_cover("here", (2 * n, n), [*rows[:7], *rows[8:], *columns])


def test_chunk_cover_check_matches_counting():
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
        cuts = [sorted({0, n, int(rng.integers(n + 1))}) for n in shape]
        chunks = list(itertools.product(*([slice(a, b) for a, b in itertools.pairwise(c)]
                                          for c in cuts)))  # fmt: skip
        if rng.random() < 0.6:
            at, axis = int(rng.integers(len(chunks))), int(rng.integers(len(shape)))
            bounds = sorted(rng.integers(0, shape[axis] + 1, 2).tolist())
            changed = list(chunks[at])
            changed[axis] = slice(*bounds)
            chunks[at] = tuple(changed)
        covered = np.zeros(shape, int)
        for chunk in chunks:
            covered[chunk] += 1
        outcomes.add(bool((covered == 1).all()))
        if (covered == 1).all():
            check_cover("here", shape, chunks)
            continue
        with pytest.raises(UserError, match=r"overlap|is in none"):
            check_cover("here", shape, chunks)
    assert outcomes == {True, False}


def test_repeated_chunk_list_is_refused(broken):
    empty = New(Global(MODULE, "ChunkStorageMetadata"), {"offsets": (0,), "sizes": (0,)})
    about = New(Global(MODULE, "TensorStorageMetadata"), {
        "properties": New(Global(MODULE, "TensorProperties"), (Global("torch", "float32"),)),
        "size": (0,), "chunks": 0x7E57AB1E,
    })  # fmt: skip
    value = New(Global(MODULE, "Metadata"), {
        "state_dict_metadata": Pairs([(str(i), about) for i in range(20_000)]), "storage_data": {},
    })  # fmt: skip
    chunks = b"0](" + b"j\0\0\1\0" * 20_000 + b"er\1\0\1\0"
    once = pickles.dump(empty, 4)[2:-1] + b"r\0\0\1\0" + chunks
    here = b"J" + struct.pack("<i", 0x7E57AB1E)
    data = pickles.dump(value, 4).replace(here, once, 1).replace(here, b"j\1\0\1\0")
    (broken / METADATA).write_bytes(data)
    with pytest.raises(UserError, match="more chunks than it can hold"):
        read_all(broken)


def test_sparse_file_takes_no_memory(broken):
    """A sparse file is refused because of the bytes after the end of its pickle."""
    data = pickles.dump(metadata(), 4)
    (broken / METADATA).write_bytes(data)
    os.truncate(broken / METADATA, 1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=f"{(1 << 30) - len(data)} bytes after its end"):
            read_all(broken)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_pickle_memory_is_independent_of_file_size(broken):
    """A sparse file may be much larger than its data."""
    (broken / METADATA).write_bytes(b"\x80\x04" + b"]" * (1 << 20))
    os.truncate(broken / METADATA, 1 << 29)
    with pytest.raises(UserError, match=r"its first \d+ bytes would become far more"):
        read_all(broken)


@pytest.mark.parametrize("size", [(2**33,), (2**20, 2**13)])
def test_expanded_tensor_size_is_limited(size):
    with pytest.raises(UserError, match="repeats the same 96 bytes"):
        read_archive(archive_of(pickles.dump(tensor(size=size, stride=(0,) * len(size)))))


@pytest.mark.parametrize("key", [t for t in TEXTS if t not in ("x", "%s%n", "", "../x", "[/red]")])
def test_invalid_tensor_name_is_refused(broken, tmp_path, key):
    if not key.isprintable() or len(key) > 1024:
        (broken / METADATA).write_bytes(pickles.dump(metadata(key=key, fqn=key), 4))
        with pytest.raises(UserError) as caught:
            read_all(broken)
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()
        write_hf(tmp_path / "hf", {key: from_array(np.zeros(4, np.float32))})
        with pytest.raises(UserError, match="not a name"):
            inspect(checkpoints.find(tmp_path / "hf"))


def test_markup_in_tensor_name_is_printed_verbatim(tmp_path, capsys):
    write_hf(tmp_path, {"[/red]x[bold]": from_array(np.zeros(4, np.float32))})
    assert cli(["inspect", str(tmp_path)]) == 0
    assert "[/red]x[bold]" in capsys.readouterr().out


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 128, "intermediate_size": 128, "max_position_embeddings": 128,
}  # fmt: skip


def write_safetensors(path, tensors):
    (path.parent / "model.safetensors").unlink(missing_ok=True)
    units, _ = safetensors.units(tensors, path.parent, 1 << 30, 1 << 20)
    for unit in units:
        unit.write()
    return (path.parent / "model.safetensors").rename(path)


def write_hf(path, tensors, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    write_safetensors(path / "model.safetensors", tensors)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**8},
        {"num_hidden_layers": True},
        {"hidden_size": 10**30},
        {"hidden_size": -64},
        {"vocab_size": 10**400},
        {"head_dim": "x"},
        {"num_key_value_heads": "4"},
        {"rms_norm_eps": 10**400},
        {"rms_norm_eps": "a"},
        {"rms_norm_eps": -1e-5},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": {}},
        {"rope_theta": float("inf")},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": [1]}},
        {"rope_scaling": {"rope_theta": "x"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": [1], "low_freq_factor": 1,
                          "high_freq_factor": 4}},
        {"model_type": "mistral", "sliding_window": "a"},
        {"model_type": "qwen2", "max_window_layers": [1], "use_sliding_window": True},
        {"model_type": "qwen2", "layer_types": 5, "use_sliding_window": True},
        {"model_type": "qwen2", "max_window_layers": 10**9, "num_hidden_layers": 10**9,
         "use_sliding_window": True},
        {"model_type": "qwen3_moe", "num_experts": 10_000, "num_hidden_layers": 10_000},
        {"model_type": "qwen3_moe", "mlp_only_layers": [-1]},
        {"model_type": "qwen3_moe", "mlp_only_layers": {}},
        {"model_type": "glm4_moe", "routed_scaling_factor": float("inf")},
        {"model_type": "glm4_moe", "n_group": 0},
        {"model_type": "glm4_moe", "first_k_dense_replace": -1},
        {"model_type": "glm4_moe", "moe_intermediate_size": 10**30},
        {"model_type": "\ud800"},
        {"model_type": "\x1b[31m"},
        {"model_type": ["llama"]},
        {"tie_word_embeddings": [1]},
        {"hidden_act": "\x1b" * 10**6},
    ],
    ids=lambda config: str(config)[-60:],
)  # fmt: skip
def test_impossible_config_is_refused(tmp_path, config):
    write_hf(tmp_path, {"model.norm.weight": from_array(np.zeros(64, np.float32))}, **config)
    with pytest.raises(UserError, match=r"config\.json") as caught:
        checkpoints.find(tmp_path).config(None)
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["config.json", safetensors.INDEX, "model.safetensors"])
@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":[' + b"[]," * 9_000_000 + b"[]]}", b"[]", b"7",
     b'{"weight_map": []}', b'{"weight_map": {"a": 7}}', b'{"a": [1]}', b'{"a": {"dtype": []}}'],
    ids=lambda text: text[:30].decode(),
)  # fmt: skip
def test_oversized_json_is_refused(tmp_path, name, text):
    write_hf(tmp_path, {"model.norm.weight": from_array(np.zeros(64, np.float32))})
    head = struct.pack("<Q", len(text)) if name.endswith(".safetensors") else b""
    (tmp_path / name).write_bytes(head + text)
    with pytest.raises(UserError, match=name):
        inspect(checkpoints.find(tmp_path))


def test_cache_links_outside_cache_are_refused(tmp_path):
    """`snapshots/x` with `blobs -> elsewhere` would give access to other files."""
    secret, cache = tmp_path / "secret", tmp_path / "models--a--b"
    write_hf(secret, {"model.norm.weight": from_array(np.zeros(64, np.float32))})
    snapshot = cache / "snapshots" / "x"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (cache / "blobs").symlink_to(secret)
    with pytest.raises(UserError, match="is a link out of the checkpoint"):
        hf_state.read_config(Directory(snapshot))
    (cache / "blobs").unlink()
    secret.rename(cache / "blobs")
    assert hf_state.read_config(Directory(snapshot))[1] == "llama"


@pytest.mark.parametrize(
    "argument",
    ["--ranks=0", "--ranks=-1", "--stages=0", "--max-memory=0",
     f"--max-memory={'9' * 400}GB", "--max-shard-size=0.1"],
)  # fmt: skip
def test_invalid_option_values_are_refused(argument):
    with pytest.raises(UserError, match=argument.partition("=")[0]):
        cli(["convert", "run", "there", "--to=dcp", argument])


LOCAL = [(0, "signature"), (26, "length of the name"), (30, "name")]


@pytest.mark.parametrize(("at", "what"), LOCAL)
def test_local_header_must_match_index(at, what):
    data = archive_of(pickles.dump(tensor()))
    start = data.rindex(b"PK\3\4")
    with pytest.raises(UserError, match="here: record data/0: its header is damaged"):
        read_archive(patched(data, start + at, "<B", data[start + at] ^ 1))


def test_bit_flip_in_small_record_raises():
    data = archive_of(pickles.dump(tensor()))
    pickled, numbers = data.index(b"torch"), data.rindex(bytes(96))
    for at in (pickled, numbers, numbers + 95):
        with pytest.raises(UserError, match="its checksum differs"):
            read_archive(patched(data, at, "<B", data[at] ^ 4)).all()


def test_archive_without_checksums_is_read():
    """`torch.serialization.set_crc32_options(False)` writes zeros."""
    data = bytearray(archive_of(pickles.dump(tensor())))
    for mark, field in ((b"PK\3\4", 14), (b"PK\1\2", 16)):
        at = -1
        while (at := data.find(mark, at + 1)) >= 0:
            data[at + field : at + field + 4] = bytes(4)
    assert read_archive(bytes(data)).all().shape == (2, 3)


@pytest.mark.parametrize(
    "state",
    [
        {"step": -5},
        {"step": 10**400},
        {"step": 2**53 + 2},
        {"step": 1.5},
        {"step": True},
        {"step": "3"},
        {"tokens_seen": -1},
        {"tokens_seen": float("nan")},
        {"dataloader": {"epoch": -1}},
        {"dataloader": {"batches_yielded": -1}},
        {"dataloader": {"sampler": {"num_replicas": 0}}},
        {"dataloader": {"sampler": {"num_replicas": 10**12}}},
        {"scheduler": {"last_epoch": -1}},
    ],
    ids=str,
)
def test_impossible_train_state_is_refused(broken, state):
    torch = pytest.importorskip("torch")
    torch.save({"step": 3, "tokens_seen": 96} | state, broken / "train_state.pt")
    with pytest.raises(UserError, match=r"train_state\.pt: not a training state"):
        read_all(broken)


@pytest.mark.parametrize(
    "group",
    [{"eps": -1e-8}, {"eps": 2.0}, {"betas": (0.9, 1.5)}, {"betas": (-0.1, 0.9)}, {"lr": -1.0},
     {"lr": float("nan")}, {"weight_decay": float("inf")}, {"momentum": 1.5}, {"lr": 10**400}],
    ids=str,
)  # fmt: skip
def test_impossible_optimizer_settings_are_refused(tmp_path, group):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = {"optimizer": {"param_groups": [{"lr": 0.1, **group}]}}
    dcp.save(state, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(UserError, match=f"has {next(iter(group))} = .*which none can have"):
        inspect(checkpoints.find(tmp_path / "d"))


def test_oversized_scalar_is_refused(broken):
    about = metadata(key="train_state.step", fqn="train_state.step", size=(2**40,),
                     sizes=(2**40,), offsets=(0,), offset=(0,))  # fmt: skip
    (broken / METADATA).write_bytes(pickles.dump(about, 4))
    (broken / "train_state.pt").unlink()
    with pytest.raises(UserError, match=r"train_state\.step is not a number of steps or tokens"):
        inspect(checkpoints.find(broken))


def test_call_of_dtype_is_refused():
    with pytest.raises(UserError, match="not a readable pickle"):
        read_archive(archive_of(pickles.dump(Call(Global("torch", "float32"), ()))))


def test_deep_json_is_refused():
    """Python's JSON reader accepts a thousand levels, but later recursion does not."""
    assert load_object(b'{"a":' + b"[" * 60 + b"]" * 60 + b"}", "here")
    with pytest.raises(UserError, match="more than 64 deep"):
        load_object(b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", "here")


def test_impossible_file_name_is_refused(tmp_path):
    for name in ("\ud800", "a" * 5000):
        with pytest.raises(UserError, match="cannot be read"):
            Directory(tmp_path).open(name)


def test_single_file_takes_precedence_over_index(tmp_path):
    """transformers takes `model.safetensors` if both exist."""
    filled = {"a": from_array(np.ones(4, np.float32)), "b": from_array(np.ones(2, np.float32))}
    empty = {"a": from_array(np.zeros(4, np.float32)), "b": from_array(np.zeros(2, np.float32))}
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", empty)
    index = {"weight_map": dict.fromkeys(empty, "model-00001-of-00001.safetensors")}
    (tmp_path / safetensors.INDEX).write_text(json.dumps(index))
    assert safetensors.open_directory(Directory(tmp_path))["a"].all()[0] == 0
    write_safetensors(tmp_path / "model.safetensors", filled)
    assert safetensors.open_directory(Directory(tmp_path))["a"].all()[0] == 1
    for other in ({"a": filled["a"]}, filled | {"b": from_array(np.ones((2, 1), np.float32))}):
        write_safetensors(tmp_path / "model.safetensors", other)
        with pytest.raises(UserError, match="hold different tensors, of which transformers"):
            safetensors.open_directory(Directory(tmp_path))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "bool", "float8_e4m3fn"])
def test_non_float_weights_are_refused(dtype):
    declared = abstract_target(make_config({"model": {"dim": 16, "n_layers": 1, "n_heads": 2}}))
    into = Translation(NAME_MAPS["hf-llama"], declared.config.model, False, "here")
    weights = {name: zeros(shape, np.dtype(np.float32)) for name, shape in declared.params.items()}
    theirs = into.dialect.to_dialect(weights, declared.config.model)
    assert translate(theirs, declared.params, into).keys() == declared.params.keys()
    theirs |= {"model.norm.weight": zeros((16,), DTYPES[dtype])}
    with pytest.raises(UserError, match=rf"norm\.weight is {dtype}, which no weight can be"):
        translate(theirs, declared.params, into)


@pytest.mark.parametrize(("largest", "dtype"), [(65520.0, "float16"), (3.4e38, "bfloat16")])
def test_cast_to_infinity_raises(largest, dtype):
    values = np.array([1.0, -largest, np.inf, np.nan], np.float32)
    with pytest.raises(UserError, match=f"w: values up to .* are infinite as {dtype}"):
        from_array(values, "w").cast(DTYPES[dtype]).all()
    retained = from_array(values[[0, 2, 3]], "w").cast(DTYPES[dtype]).all().astype(np.float32)
    assert retained[0] == 1
    assert np.isinf(retained[1])
    assert np.isnan(retained[2])
