"""Damage of token files is found as they are read, and names file and place."""

import base64
import dataclasses
import logging
import zlib

import numpy as np
import pytest

from jaxforge.data.conversation_shards import ConversationShards
from jaxforge.data.corpus.manifest import Manifest, Shard
from jaxforge.data.tokens import TokenShards
from jaxforge.errors import UserError
from tests.data.manifest_writer import ShardWriter

TOKENS = np.random.default_rng(0).integers(0, 300, 100_000)
WINDOW = 100
CRC32 = zlib.crc32


@pytest.fixture(autouse=True)
def small_writes(monkeypatch):
    """Blocks are hashed over several writes."""
    monkeypatch.setattr("jaxforge.data.corpus.writer.CHUNK", 1)


def write(directory, **options) -> Manifest:
    with ShardWriter(directory, vocab_size=300, dtype="uint16", **options) as writer:
        for part in np.split(TOKENS, [1, 999, 33_000, 50_000]):
            writer.add(part)
        return writer.finish(eos_id=None, tokenizer="byte", tokenizer_sha256="0")


def open_shards(directory, pattern="*.npy", vocab_size=300, **options) -> TokenShards:
    return TokenShards(directory, pattern, WINDOW - 1, vocab_size=vocab_size, **options)


def flip(path, location: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[location] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("file_format", ["npy", "bin"])
def test_manifest_has_crc32_per_64_kib(tmp_path, file_format):
    manifest = write(tmp_path / "a", file_format=file_format, shard_tokens=60_000)
    parts = TOKENS[:60_000], TOKENS[60_000:]
    for shard, part in zip(manifest.shards, parts, strict=True):
        data = part.astype("<u2").tobytes()
        blocks = [data[at : at + 65_536] for at in range(0, len(data), 65_536)]
        result = np.frombuffer(base64.b64decode(shard.crc32), "<u4").tolist()
        assert result == [zlib.crc32(block) for block in blocks]


@pytest.mark.parametrize("bit", [0, 14])
def test_bit_flip_raises_only_in_its_block(tmp_path, bit):
    write(tmp_path / "a")
    path = tmp_path / "a" / "shard_00000.npy"
    flip(path, 128 + 2 * 40_000 + bit // 8, bit % 8)
    source = open_shards(tmp_path / "a")
    assert (source[0] == TOKENS[:WINDOW]).all()
    for _ in range(2):
        with pytest.raises(UserError, match=r"bytes 65,664 to 131,199 \(tokens 32,768 to 65,535\)"):
            source[400]
    with pytest.raises(UserError, match=r"shard_00000\.npy is damaged: bytes 65,664"):
        open_shards(tmp_path / "a", verify="start")


def test_each_block_is_hashed_once(tmp_path, monkeypatch):
    write(tmp_path / "a")
    source, hashed = open_shards(tmp_path / "a"), []
    monkeypatch.setattr(
        "jaxforge.data.corpus.manifest.zlib.crc32",
        lambda data: hashed.append(len(data)) or CRC32(data),
    )
    for index in np.random.default_rng(1).permutation(1000):
        assert (source[int(index)] == TOKENS[index * WINDOW :][:WINDOW]).all()
    assert sorted(hashed) == [100_000 % 32_768, 32_768, 32_768, 32_768]


def test_swapped_bytes_of_a_header_raise(tmp_path):
    write(tmp_path / "a")
    path = tmp_path / "a" / "shard_00000.npy"
    path.write_bytes(path.read_bytes().replace(b"'<u2'", b"'>u2'", 1))
    with pytest.raises(UserError, match=r"100,000 tokens of >u2 where manifest\.json says .* <u2"):
        open_shards(tmp_path / "a")


def test_replaced_shard_raises(tmp_path):
    write(tmp_path / "a")
    np.save(tmp_path / "a" / "shard_00000.npy", TOKENS[::-1].astype("<u2"))
    with pytest.raises(UserError, match="is damaged: bytes 128 to"):
        open_shards(tmp_path / "a")[0]


def without_hashes(directory) -> None:
    manifest = Manifest.read(directory)
    assert manifest is not None
    bare = tuple(Shard(shard.file, shard.tokens, shard.max_token) for shard in manifest.shards)
    dataclasses.replace(manifest, shards=bare).write(directory)


def test_token_beyond_vocabulary_raises_without_hashes(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    write(tmp_path / "a")
    without_hashes(tmp_path / "a")
    assert (open_shards(tmp_path / "a")[7] == TOKENS[700:800]).all()
    flip(tmp_path / "a" / "shard_00000.npy", 128 + 2 * 40_000 + 1, 6)
    source, wrong = open_shards(tmp_path / "a", verify="start"), TOKENS[40_000] + 0x4000
    assert "shard_00000.npy has no hashes" in caplog.text
    with pytest.raises(UserError, match=rf"token {wrong} at place 40000 \(byte 80128\) is outside"):
        source.batch([3, 400, 4])


def test_scanned_token_beyond_vocabulary_raises_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxforge.data.tokens.CHUNK", 1000)
    tokens = TOKENS.astype(np.uint16)
    tokens[[50_001, 70_000]] = 999
    np.save(tmp_path / "a.npy", tokens)
    with pytest.raises(
        UserError, match=r"a\.npy: token 999 is out.*; it is first at place 50001 \(byte 100130\)"
    ):
        open_shards(tmp_path)


def conversations(directory) -> None:
    rng = np.random.default_rng(3)
    with ShardWriter(directory, vocab_size=300, dtype="uint32", conversations=True) as writer:
        for length in rng.integers(2, 60, 400):
            entries = rng.integers(0, 300, length).astype(np.uint32)
            entries[0] |= 1 << 30
            writer.add(entries, documents=1)
        writer.finish(eos_id=None, tokenizer="byte", tokenizer_sha256="0")


def test_bit_flips_in_conversations_raise(tmp_path):
    directory = tmp_path / "a"
    conversations(directory)
    options = {"vocab_size": 300, "overlong": "truncate"}
    whole = ConversationShards(directory, "*.npy", 99, **options)
    assert (whole.batch(range(len(whole))) & 0x1FFFFFFF).max() < 300
    flip(directory / "shard_00000.npy", 128 + 3, 5)  # the first entry is not learned
    with pytest.raises(UserError, match="is damaged: bytes 128 to"):
        ConversationShards(directory, "*.npy", 99, **options).batch(range(len(whole)))
    flip(directory / "shard_00000.npy", 128 + 3, 5)
    without_hashes(directory)
    flip(directory / "shard_00000.npy", 128 + 4 * 1234 + 2, 4)
    with pytest.raises(UserError, match=r"at place 1234 \(byte 5064\) is outside"):
        ConversationShards(directory, "*.npy", 99, **options).batch(range(len(whole)))
    lengths = np.fromfile(directory / "lengths.uint32", "<u4")
    lengths[[1, 2]] += np.array([1, -1]).astype("<u4")  # the sum is the same
    lengths.tofile(directory / "lengths.uint32")
    with pytest.raises(UserError, match=r"lengths\.uint32 is damaged"):
        ConversationShards(directory, "*.npy", 99, **options)


def llm_c_file(path, tokens: np.ndarray, magic: int, version: int, dtype: str) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")]
)
def test_header_of_llm_c_is_skipped(tmp_path, caplog, monkeypatch, magic, version, dtype):
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    for name in "ab":
        llm_c_file(tmp_path / f"{name}.bin", TOKENS[:1000], magic, version, dtype)
    source = open_shards(tmp_path, "*.bin", vocab_size=70_000)
    assert len(source) == 20
    assert (source[3] == TOKENS[300:400]).all()
    assert (source[13] == TOKENS[300:400]).all()
    assert not caplog.messages  # nothing is guessed
    with pytest.raises(UserError, match=r"token_dtype is 'int32', but the header of .*a\.bin says"):
        open_shards(tmp_path, "*.bin", token_dtype="int32")


def test_mismatched_llm_c_header_raises(tmp_path):
    path = tmp_path / "a.bin"
    llm_c_file(path, TOKENS[:1000], 20240520, 1, "<u2")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"3022 bytes where its header of llm\.c says 3024"):
        open_shards(tmp_path, "*.bin")
    llm_c_file(path, TOKENS[:1000], 20240520, 2, "<u2")
    with pytest.raises(UserError, match=r"header of llm\.c of version 2"):
        open_shards(tmp_path, "*.bin")
