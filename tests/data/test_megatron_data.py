"""Token files of Megatron-LM, nanoGPT and llm.c, read without conversion.

`golden/megatron/documents` was written by `IndexedDatasetBuilder` of Megatron-Core 0.16.1: 25
documents, a third of several sequences. The JSON files are what its `IndexedDataset` reads.
"""

import itertools
import json
import logging
import pickle
import shutil
import struct
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxforge.data import loader, sources
from jaxforge.data.fingerprint import fingerprints
from jaxforge.data.foreign_layouts import MegatronIndex
from jaxforge.data.tokens import TokenShards
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh
from jaxforge.tools.plan.checks import missing_data_warnings
from tests.conftest import tiny_config

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "documents"
TYPES = ("uint16", "int32")


def golden_documents(name):
    return json.loads((GOLDEN / f"{name}_documents.json").read_text())


def write_megatron(prefix, documents, dtype="<u2", code=8, *, modes=b""):
    """Write documents, each a list of sequences, by the documented format."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    size = np.dtype(dtype).itemsize
    pointers = [size * sum(lengths[:i]) for i in range(len(lengths))]
    firsts = [0, *itertools.accumulate(len(document) for document in documents)]
    tokens = np.array([token for sequence in sequences for token in sequence], dtype)
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts))
    index += np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    index += np.array(firsts, "<i8").tobytes() + modes
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return tokens


def config_of(path, *, vocab_size=100_000, seq_len=8, **data):
    return tiny_config(
        model={"vocab_size": vocab_size},
        train={"seq_len": seq_len, "batch_size": 4},
        data={"dataset_path": str(path), **data},
    )


def open_shards(path, pattern="*.npy", seq_len=8, vocab_size=100_000, **options):
    return TokenShards(path, pattern, seq_len, vocab_size=vocab_size, **options)


def expected_windows(documents, width):
    """Return the windows of concatenated documents, and the document number of each token."""
    tokens = np.concatenate([np.array(document, np.int32) for document in documents])
    owner = np.concatenate([np.full(len(each), i) for i, each in enumerate(documents)])
    n = len(tokens) // width
    return tokens[: n * width].reshape(n, width), owner[: n * width].reshape(n, width)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("selects", ["prefix", "directory", "*.idx", "*.bin"])
def test_windows_are_those_of_megatron_files(tmp_path, name, selects):
    prefix = GOLDEN / f"{name}_text_document"
    if selects == "prefix":
        source = open_shards(prefix)
    else:
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{prefix}{suffix}", tmp_path)
        source = open_shards(tmp_path, "*.npy" if selects == "directory" else selects)
    windows, _ = expected_windows(golden_documents(name), 9)
    np.testing.assert_array_equal(source.batch(range(len(source))), windows)
    assert source.files[0].dtype == np.dtype(name)
    assert source.files[0].index.documents == 25


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_file_instead_of_prefix_is_explained(suffix):
    with pytest.raises(UserError, match=r"is a file; name the prefix .*: .*int32_text_document$"):
        open_shards(GOLDEN / f"int32_text_document{suffix}")


def test_files_of_directory_are_read_by_name():
    """Windows do not extend over two files."""
    source = open_shards(GOLDEN)
    windows = [expected_windows(golden_documents(name), 9)[0] for name in ("int32", "uint16")]
    np.testing.assert_array_equal(source.batch(range(len(source))), np.concatenate(windows))


@pytest.mark.parametrize("name", TYPES)
def test_packing_separates_documents_of_index(name):
    config = config_of(GOLDEN / f"{name}_text_document", pack_sequences=True)
    dataset = sources.open_training_data(config)
    batch = dataset.batch(range(len(dataset)))
    windows, owner = expected_windows(golden_documents(name), 9)
    np.testing.assert_array_equal(batch["input_ids"], windows[:, :-1])
    crosses = owner[:, 1:] != owner[:, :-1]
    np.testing.assert_array_equal(batch["labels"], np.where(crosses, -100, windows[:, 1:]))
    counted = np.cumsum(crosses, axis=1) - crosses
    np.testing.assert_array_equal(batch["segment_ids"], counted)
    assert crosses.any(axis=1).sum() > 10


def test_index_and_eos_separate_the_same_documents(tmp_path):
    """With `--append-eod`, each document ends with EOS, also at the borders of windows."""
    rng = np.random.default_rng(0)
    documents = [[[*rng.integers(1, 99, rng.integers(0, 12)).tolist(), 0]] for _ in range(200)]
    write_megatron(tmp_path / "a", documents)
    by_index = sources.open_training_data(config_of(tmp_path / "a", pack_sequences=True))
    by_eos = sources.open_training_data(
        config_of(tmp_path / "a", pack_sequences=True, eos_token_id=0)
    )
    indices = range(len(by_index))
    first, second = by_index.batch(indices), by_eos.batch(indices)
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)


def test_empty_documents_and_sequences_are_allowed(tmp_path):
    documents = [[[1, 2], [], [3]], [[]], [[4, 5, 6]], [[], [7]], [[]]]
    write_megatron(tmp_path / "a", documents)
    index = MegatronIndex(tmp_path / "a.idx")
    assert (index.tokens, index.documents) == (7, 5)
    assert index.document_starts(0, 7).tolist() == [0, 3, 3, 6]
    assert index.document_starts(1, 6).tolist() == [3, 3]
    assert index.document_starts(6, 7).tolist() == [6]
    assert index.document_starts(4, 6).tolist() == []
    assert pickle.loads(pickle.dumps(index)).document_starts(0, 1).tolist() == [0]


def test_modes_of_multimodal_index_are_ignored(tmp_path):
    write_megatron(tmp_path / "a", [[[1, 2, 3]], [[4]]], modes=b"\0\1")
    assert MegatronIndex(tmp_path / "a.idx").tokens == 4


def test_prefixes_mix(tmp_path):
    write_megatron(tmp_path / "a", [[list(range(100))]])
    write_megatron(tmp_path / "b", [[list(range(100, 200))]], "<i4", 4)
    table = [{"path": str(tmp_path / name), "name": name} for name in "ab"]
    config = tiny_config(data={"datasets": table, "pack_sequences": True}, train={"seq_len": 8})
    mixture = sources.open_training_data(config)
    assert mixture.sizes == {"a": 11, "b": 11}
    batch = mixture.batch([0, 11])
    assert batch["input_ids"].tolist() == [list(range(8)), list(range(100, 108))]
    assert batch["dataset_idx"].tolist() == [0, 1]
    assert not list(missing_data_warnings(config))


def damage(tmp_path, at, data):
    index = bytearray((GOLDEN / "uint16_text_document.idx").read_bytes())
    index[at : at + len(data)] = data
    shutil.copy(GOLDEN / "uint16_text_document.bin", tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(index)
    return tmp_path / "a"


LENGTHS, POINTERS, DOCUMENTS = 34, 34 + 43 * 4, 34 + 43 * 12


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"TNTIDX\0\0", r'a\.idx does not begin with "MMIDIDX"'),
        (9, b"\2", r"has version 2, and this jaxforge reads version 1"),
        (17, b"\5", r"type 5 \(int64\); uint16 and int32 are supported"),
        (17, b"\x4d", r"type 77 \(unknown\)"),
        (18, b"\x2c", r"has 758 bytes, not the 770 of 44 sequences and 25 documents"),
        (18, b"\xff" * 8, r"has 758 bytes, not the "),
        (LENGTHS + 4, b"\x07", r"is damaged: sequence 2 has \d tokens from byte"),
        (LENGTHS, b"\xff" * 4, r"is damaged: sequence 0 has -1 tokens"),
        (POINTERS + 80, b"\1", r"is damaged: sequence 10 has"),
        (
            DOCUMENTS + 24,
            b"\x02",
            r"document 3 begins before its predecessor, at sequence 2",
        ),
        (DOCUMENTS, b"\1", r"do not extend from sequence 0 to 43"),
        (DOCUMENTS + 25 * 8, b"\x2c", r"do not extend from sequence 0 to 43"),
    ],
)
def test_damaged_index_is_refused(tmp_path, at, data, message):
    with pytest.raises(UserError, match=message):
        open_shards(damage(tmp_path, at, data))


@pytest.mark.parametrize("size", [0, 5, 20, 700])
def test_truncated_index_is_refused(tmp_path, size):
    prefix = damage(tmp_path, 0, b"")
    index = tmp_path / "a.idx"
    index.write_bytes(index.read_bytes()[:size])
    with pytest.raises(UserError, match=r"a\.idx .*copy it again"):
        open_shards(prefix)


def test_tokens_must_match_index(tmp_path):
    prefix = damage(tmp_path, 0, b"")
    tokens = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(tokens[:-2])
    with pytest.raises(UserError, match=r"a\.bin is cut short: .* 844 bytes where a\.idx says 846"):
        open_shards(prefix)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match=r"a\.idx has no a\.bin next to it"):
        open_shards(prefix)
    (tmp_path / "a.bin").write_bytes(tokens)
    with pytest.raises(UserError, match=r"token_dtype is 'uint32', but .*a\.idx says uint16"):
        open_shards(prefix, token_dtype="uint32")
    write_megatron(tmp_path / "none", [])
    with pytest.raises(UserError, match=r"none\.bin is empty \(0 tokens\)"):
        open_shards(tmp_path / "none")


def test_token_outside_vocabulary_is_refused(tmp_path):
    """Only the first million tokens are read at the start."""
    tokens = np.zeros(1_200_000, np.int64)
    tokens[1_100_000] = 99_999
    write_megatron(tmp_path / "a", [[tokens.tolist()]], "<i4", 4)
    source = open_shards(tmp_path / "a", vocab_size=99_999)
    with pytest.raises(UserError, match=r"token 99999 at place 1100000 .* outside the vocabulary"):
        source.batch([1_100_000 // 9])
    with pytest.raises(UserError, match=r"token 59[0-9]{3} is outside the vocabulary of 500"):
        open_shards(GOLDEN / "uint16_text_document", vocab_size=500)


def test_fingerprint_contains_documents(tmp_path):
    identities = []
    for documents in ([[[1] * 50], [[2] * 50]], [[[1] * 50, [2] * 50]]):
        write_megatron(tmp_path / "a", documents)
        config = config_of(tmp_path / "a")
        identities.append(fingerprints(config.data, sources.open_training_data(config), {}))
    assert identities[0] != identities[1]


def test_foreign_index_does_not_change_bare_file(tmp_path):
    """A .bin file that the pattern names is bare if its .idx is not Megatron's."""
    np.arange(90, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(b"something else")
    source = open_shards(tmp_path, "*.bin", token_dtype="uint16")
    np.testing.assert_array_equal(source.batch([9])[0], np.arange(81, 90))


def test_nanogpt_directory_has_both_splits(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    caplog.set_level(logging.INFO, "jaxforge")
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")  # 200 bytes: also 50 of uint32
    np.arange(500, 590, dtype="<u2").tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(b"")
    config = config_of(tmp_path).model_copy(
        update={
            "eval": tiny_config(
                eval={"datasets": {"dataset_path": str(tmp_path)}, "enabled": True}
            ).eval
        }
    )
    training = sources.open_training_data(config)
    (evaluation,) = sources.open_eval_data(config).values()
    assert training[2]["input_ids"].tolist() == list(range(18, 26))
    assert evaluation[1]["input_ids"].tolist() == list(range(509, 517))
    assert "reading 1 file(s) train.bin of nanoGPT" in caplog.text


def llm_c(path, tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


def test_llm_c_directory_has_both_splits(tmp_path):
    for number in (2, 1):
        llm_c(tmp_path / f"fineweb_train_{number:06}.bin", range(100 * number, 100 * number + 90))
    llm_c(tmp_path / "fineweb_val_000000.bin", range(500, 590))
    source = open_shards(tmp_path)
    assert [file.path.name[-5] for file in source.files] == ["1", "2"]
    assert source[10].tolist() == list(range(200, 209))
    assert open_shards(tmp_path, split="val")[0].tolist() == list(range(500, 509))


def test_training_batches_cover_megatron_files():
    config = config_of(GOLDEN / "int32_text_document", shuffle=True, num_workers=2)
    dataset = sources.open_training_data(config)
    batches = loader.training_batches(
        config, make_mesh(config, jax.devices()[:1]), dataset, 0, len(dataset) // 4
    )
    rows = np.concatenate([np.asarray(batch["input_ids"])[0] for batch in batches])
    windows, _ = expected_windows(golden_documents("int32"), 9)
    read = {tuple(row) for row in rows.tolist()}
    assert len(read) == len(rows)
    assert read <= {tuple(row) for row in windows[:, :-1].tolist()}
