import json
import os
import pickle
import re
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from jaxforge.data.corpus.manifest import Manifest
from jaxforge.data.tokens import SyntheticTokens, TokenShards
from jaxforge.errors import UserError
from tests.data.manifest_writer import ShardWriter


def shards(directory, pattern="*.npy", seq_len=4, vocab_size=300, **options):
    return TokenShards(directory, pattern, seq_len, vocab_size=vocab_size, **options)


def write(directory, tokens: Sequence[int], vocab_size=300, dtype="uint16", **options) -> Manifest:
    with ShardWriter(directory, vocab_size=vocab_size, dtype=dtype, **options) as writer:
        writer.add(tokens)
        return writer.finish(eos_id=None, tokenizer="byte", tokenizer_sha256="0")


@pytest.mark.parametrize("seed", range(8))
def test_windows_cover_the_files(tmp_path, seed):
    """Each file gives its first len // (S + 1) windows, back to back, in the order of names."""
    rng = np.random.default_rng(seed)
    seq_len, expected = int(rng.integers(1, 9)), []
    for name in rng.permutation(10):
        dtype = rng.choice(["uint16", "uint32", "int64", ">u2"])
        tokens = rng.integers(0, 300, rng.integers(1, 40)).astype(dtype)
        np.save(tmp_path / f"{name}.npy", tokens)
    for name in range(10):
        tokens = np.load(tmp_path / f"{name}.npy")
        count = len(tokens) // (seq_len + 1)
        expected += list(tokens[: count * (seq_len + 1)].reshape(count, seq_len + 1))
    source = shards(tmp_path, seq_len=seq_len)
    assert len(source) == len(expected)
    for window, values in zip((source[i] for i in range(len(source))), expected, strict=True):
        assert window.dtype == np.int32
        assert (window == values).all()
    for index in (-1, len(source)):
        with pytest.raises(IndexError):
            source[index]


def test_bin_and_npy_read_the_same(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 300, 1234)
    for file_format in ("npy", "bin"):
        write(tmp_path / file_format, tokens, file_format=file_format, shard_tokens=500)
    npy, binary = (shards(tmp_path / suffix, f"*.{suffix}") for suffix in ("npy", "bin"))
    assert len(npy) == len(binary) == 100 + 100 + 46
    assert all((npy[i] == binary[i]).all() for i in range(len(npy)))
    raw = np.fromfile(tmp_path / "bin" / "shard_00000.bin", "<u2")
    assert (raw == tokens[:500]).all()


def test_writer_streams_across_chunks_and_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxforge.data.corpus.writer.CHUNK", 7)
    tokens = np.random.default_rng(1).integers(0, 300, 100)
    with ShardWriter(tmp_path / "a", vocab_size=300, dtype="uint32", shard_tokens=30) as writer:
        for start in range(0, 100, 9):
            writer.add([*tokens[start : start + 9], 299], documents=1)
        manifest = writer.finish(eos_id=299, tokenizer="x", tokenizer_sha256="y")
    paths = sorted((tmp_path / "a").glob("*.npy"))
    written = [np.load(path) for path in paths]
    assert [len(part) for part in written] == [30, 30, 30, 22]
    joined = np.concatenate(written)
    assert (joined[np.arange(112) % 10 != 9][:99] == tokens[:99]).all()
    assert joined[-1] == 299
    assert (manifest.tokens, manifest.documents, manifest.max_token) == (112, 12, 299)
    assert [shard.max_token for shard in manifest.shards] == [int(part.max()) for part in written]
    assert Manifest.read(tmp_path / "a") == manifest == shards(tmp_path / "a").manifest
    assert shards(tmp_path / "a").tokens == 112


def test_few_files_stay_open_and_pickles_are_small(tmp_path):
    for i in range(299):
        np.save(tmp_path / f"{i:03}.npy", np.full(5, i, np.uint16))
    source = shards(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    assert [int(source[i][0]) for i in range(299)] == list(range(299))
    assert len(os.listdir("/proc/self/fd")) - before <= 256
    copy = pickle.loads(pickle.dumps(source))
    assert (copy[149] == source[149]).all()
    np.save(tmp_path / "big.npy", np.zeros(1 << 20, np.uint16))
    big = shards(tmp_path, "big.npy")
    assert big[7].sum() == 0
    assert len(pickle.dumps(big)) < 2000


def test_grain_reads_token_shards(tmp_path):
    grain = pytest.importorskip("grain")
    np.save(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    batches = list(grain.MapDataset.source(shards(tmp_path)).batch(5).to_iter_dataset())
    assert (np.concatenate(batches).ravel() == np.arange(50)).all()


def test_file_removed_or_truncated_later_raises(tmp_path):
    for name in "abc":
        np.save(tmp_path / f"{name}.npy", np.arange(50, dtype=np.uint16))
    source = shards(tmp_path)
    (tmp_path / "b.npy").unlink()
    os.truncate(tmp_path / "c.npy", 130)
    assert source[0].tolist() == [0, 1, 2, 3, 4]
    for window, name in ((10, "b"), (20, "c")):
        with pytest.raises(UserError, match=rf"{name}\.npy was whole when the run started and"):
            source[window]


def test_synthetic_windows_depend_on_seed_and_index_only():
    source = SyntheticTokens(11, 64, seed=3)
    again = pickle.loads(pickle.dumps(source))
    assert (source[12] == again[12]).all()
    assert source[0].dtype == np.int32
    assert source[0].shape == (65,)
    assert not (source[0] == source[1]).all()
    assert not (source[0] == SyntheticTokens(11, 64, seed=4)[0]).all()
    assert set(np.concatenate([source[i] for i in range(50)]).tolist()) == set(range(11))
    assert (source[len(source) - 1] < 11).all()
    assert (SyntheticTokens(11, 64, seed=-1)[0] < 11).all()
    wide = SyntheticTokens(2**31, 64, seed=0)
    assert len({token for i in range(20) for token in wide[i].tolist()}) == 20 * 65  # no overlap


def test_missing_directory_or_pattern_raises(tmp_path):
    with pytest.raises(UserError, match=r"data\.dataset_path: .*nowhere does not exist"):
        shards(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, not a directory"):
        shards(tmp_path / "file")
    with pytest.raises(UserError, match=r"data\.file_pattern = '\*\.npy'.*holds file\)"):
        shards(tmp_path)
    with pytest.raises(UserError, match=r"eval\.file_pattern"):
        shards(tmp_path, keys=("eval.dataset_path", "eval.file_pattern"))
    with pytest.raises(UserError, match=r"neither \.npy nor \.bin"):
        shards(tmp_path, "*")
    write(tmp_path / "train", range(100))
    with pytest.raises(UserError, match=r"train holds shards; set data\.dataset_path"):
        shards(tmp_path)


def npy_header(text):
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode()


ODD_HEADERS = [
    "(" * 3000,  # unknown to the tokenizer of Python
    "-" * 3000 + "1",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (1,), 'x': " + "[" * 500 + "]" * 500 + "}",
    "{'descr': [('a', '<u2', -1)], 'fortran_order': False, 'shape': (1,)}",
    "{'descr': ('<u2', (1 << 40,)), 'fortran_order': False, 'shape': (1,)}",
    "{'descr': 'O' * 9, 'fortran_order': False, 'shape': (1,)}",
    "{[]: 1}",
]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b""), r"a\.npy is empty \(0 bytes\)"),
        (lambda path: np.save(path, np.zeros(0, np.uint16)), r"empty \(0 tokens\)"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"cut short: it has 327 .* 328"),
        (lambda path: path.write_bytes(path.read_bytes()[:40]), r"not a \.npy file, or cut short"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "is too long"),
        (lambda path: path.write_bytes(b"hello world"), r"not a \.npy file"),
        *(
            (lambda path, text=text: path.write_bytes(npy_header(text)), r"not a \.npy file")
            for text in ODD_HEADERS
        ),
        (lambda path: np.save(path, np.zeros(100)), r"float64 of shape \(100,\)"),
        (lambda path: np.save(path, np.zeros((10, 10), np.uint16)), r"uint16 of shape \(10, 10\)"),
        (lambda path: np.save(path, np.array([{}]), allow_pickle=True), "holds object"),
        (lambda path: np.save(path, np.full(100, 300, np.uint16)), r"301 or more"),
        (
            lambda path: np.save(path, np.full(100, -1, np.int16)),
            r"token -1 is negative.* at place 0 ",
        ),
    ],
)
def test_damaged_npy_files_raise(tmp_path, spoil, message):
    np.save(tmp_path / "a.npy", np.zeros(100, np.uint16))
    np.save(tmp_path / "b.npy", np.zeros(100, np.uint16))
    spoil(tmp_path / "a.npy")
    with pytest.raises(UserError, match=message) as error:
        shards(tmp_path)
    assert str(tmp_path / "a.npy") in str(error.value)


@pytest.mark.parametrize(("kind", "tokens"), [("<u2", 101), ("<u4", 101), ("<u4", 100)])
def test_bin_type_guess_matches_kempnerforge_and_warns(tmp_path, kind, tokens, caplog):
    for name in "ab":
        np.arange(tokens, dtype=kind).tofile(tmp_path / f"{name}.bin")
    assert shards(tmp_path, "*.bin")[1].tolist() == [5, 6, 7, 8, 9]
    (line,) = caplog.messages
    name = {"<u2": "uint16", "<u4": "uint32"}[kind]
    assert f"a.bin is read as {name}" in line
    assert "data.token_dtype" in line
    caplog.clear()
    shards(tmp_path, "*.bin", token_dtype=name)
    assert not caplog.messages


def test_wrong_bin_type_is_refused(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(100, dtype="<u2").tofile(path)  # 200 bytes: as many uint16 as make whole uint32
    for reported in (None, "uint32"):
        with pytest.raises(UserError, match=r"another type than uint32 .*set data\.token_dtype"):
            shards(tmp_path, "*.bin", token_dtype=reported)
    assert shards(tmp_path, "*.bin", token_dtype="uint16")[1].tolist() == [5, 6, 7, 8, 9]
    for name in ("float32", "nonsense"):
        with pytest.raises(UserError, match="is not an integer type"):
            shards(tmp_path, "*.bin", token_dtype=name)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="199 bytes"):
        shards(tmp_path, "*.bin", token_dtype="uint16")


def test_bin_files_are_checked_against_manifest(tmp_path):
    directory = tmp_path / "a"
    write(directory, range(100), file_format="bin")
    assert len(shards(directory, "*.bin")) == 20
    with pytest.raises(UserError, match=r"'uint32', but .* says 'uint16'"):
        shards(directory, "*.bin", token_dtype="uint32")
    path = directory / "shard_00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"198 bytes where manifest\.json says 200"):
        shards(directory, "*.bin")


def test_short_files_are_skipped_unless_all_are(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4, np.uint16))
    with pytest.raises(UserError, match=r"seq_len \+ 1 = 5 tokens: .*a\.npy, has 4;"):
        shards(tmp_path)
    np.save(tmp_path / "b.npy", np.arange(7, dtype=np.uint16))
    assert [shards(tmp_path)[i].tolist() for i in range(1)] == [[0, 1, 2, 3, 4]]


def test_vocabulary_is_checked_by_manifest_or_by_reading(tmp_path, monkeypatch):
    directory = tmp_path / "a"
    write(directory, range(100))
    with pytest.raises(UserError, match=r"token 99 .*of 99; set model\.vocab_size to 100"):
        shards(directory, vocab_size=99)
    monkeypatch.setattr("jaxforge.data.tokens.token_chunks", pytest.fail)
    assert len(shards(directory, vocab_size=100)) == 20  # nothing was read
    np.save(directory / "shard_00000.npy", np.arange(101, dtype=np.uint16))  # not the manifest's
    with pytest.raises(UserError, match=r"holds 101 tokens .* where manifest\.json says 100 "):
        shards(directory, vocab_size=100)


def test_damaged_or_foreign_manifests_raise(tmp_path):
    write(tmp_path / "a", range(100))
    path = tmp_path / "a" / "manifest.json"
    whole = json.loads(path.read_text())
    for text, message in (
        (path.read_text()[:60], "EOF"),
        ('{"name": "my-extension"}', "Field required"),
        (json.dumps(whole | {"tokens": "many"}), "tokens: Input should be a valid integer"),
        (json.dumps(whole | {"version": 9}), "version is 9"),
        (json.dumps(whole | {"shards": [{}] * 10_000}), "its tables are too small for shards"),
        (json.dumps(whole | {"shards": [{"x": "y" * 30}] * 9}), r"shards.0.file: Field required"),
        ("[" * 100_000, "recursion limit exceeded"),
        ('{"version": ' + "9" * 5000 + "}", "number out of range"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"manifest.json is not a manifest.*{message}"):
            shards(tmp_path / "a")


@pytest.mark.parametrize("pattern", ["", "/data/*.npy", "***.npy"])
def test_invalid_pattern_raises(tmp_path, pattern):
    refusal = f"data.file_pattern = {pattern!r} is not a pattern of files below"
    if pattern == "***.npy" and sys.version_info >= (3, 13):  # pathlib reads it as *.npy there
        refusal = f"no file matches data.file_pattern = {pattern!r}"
    with pytest.raises(UserError, match=re.escape(refusal)):
        TokenShards(tmp_path, pattern, 5, vocab_size=10)
