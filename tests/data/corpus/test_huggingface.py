"""Training on a Hugging Face dataset: tokenized once, or streamed."""

import json
import struct
from collections import Counter
from pathlib import Path

import datasets
import jax
import numpy as np
import pytest

from jaxforge.data import loader, sources, stream
from jaxforge.data.corpus import huggingface
from jaxforge.data.corpus.records import TextField
from jaxforge.data.corpus.tokenizer import train_bpe
from jaxforge.data.stream import Anchor
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh
from tests.conftest import tiny_config

SEQ = 32
FILES, DOCUMENTS = 4, 30


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the library's own for each test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(stream, "BLOCK_TOKENS", 5 * (SEQ + 1))
    monkeypatch.setattr(stream, "ANCHOR_SECONDS", 0.0)


def text(file, document):
    return f"file {file} document {document} " * (document % 5 + 1)


@pytest.fixture
def directory(tmp_path):
    """A dataset of JSONL files."""
    for file in range(FILES):
        lines = (json.dumps({"text": text(file, i)}) + "\n" for i in range(DOCUMENTS))
        (tmp_path / "set" / f"{file}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / "set" / f"{file}.jsonl").write_text("".join(lines))
    return tmp_path / "set"


def tokens_of(*files):
    texts = (text(file, i).encode() for file in files for i in range(DOCUMENTS))
    return [token for encoded in texts for token in (*encoded, 256)]


def config(directory, run, accum=1, batch=8, **sections):
    source = {"hf_dataset_name": str(directory), "tokenizer_path": "byte", "num_workers": 2}
    return tiny_config(
        data={**source, **sections.pop("data", {})},
        train={"batch_size": batch, "grad_accum_steps": accum, **sections.pop("train", {})},
        model={"vocab_size": 260},
        checkpoint={"dir": str(run)},
        **sections,
    )


def streaming(directory, run, **sections):
    data = {"hf_streaming": True, **sections.pop("data", {})}
    return config(directory, run, data=data, **sections)


def batches(job, n, first=0, devices=1):
    mesh = make_mesh(job, jax.devices()[:devices])
    dataset = sources.open_training_data(job)
    return [
        jax.tree.map(np.asarray, batch)
        for batch in loader.training_batches(job, mesh, dataset, first, n)
    ]


def same(left, right):
    for a, b in zip(left, right, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def rows(batch_list):
    """Windows in the order of their positions: [n, S + 1]."""
    whole = [np.concatenate([b["input_ids"], b["labels"][..., -1:]], -1) for b in batch_list]
    return np.concatenate(whole).reshape(-1, SEQ + 1)


def test_dataset_is_tokenized_once_and_read_like_shards(directory, tmp_path, monkeypatch):
    job = config(directory, tmp_path / "run", data={"shuffle": False})
    windows = rows(batches(job, 4))
    expected = tokens_of(0, 1, 2, 3)[: windows.size]
    assert windows.reshape(-1).tolist() == expected
    monkeypatch.setattr(huggingface, "run_units", None)  # not needed again
    same(batches(job, 4), batches(job, 4))
    [result] = (tmp_path / "cache" / "jaxforge").iterdir()
    assert sorted(path.name for path in result.iterdir()) == ["tokenizer", "train"]


def test_changed_data_or_tokenizer_is_tokenized_again(directory, tmp_path):
    sets = tmp_path / "cache" / "jaxforge"
    arguments = (str(directory), None, "train", TextField())
    byte = sources.load_tokenizer("byte")
    first = huggingface.cached_shards(*arguments, byte)
    assert huggingface.cached_shards(*arguments, byte) == first
    huggingface.cached_shards(*arguments, train_bpe(["some text"], 258))
    assert len(list(sets.iterdir())) == 2
    (directory / "0.jsonl").write_text('{"text": "other"}\n')
    other = huggingface.cached_shards(*arguments, byte)
    assert bytes(np.load(other / "shard_00000.npy")[:5].astype(np.uint8)) == b"other"
    assert len(list(sets.iterdir())) == 3


def test_evaluation_sets_may_be_hugging_face_datasets(directory, tmp_path):
    tables = [
        {"name": "all", "hf_dataset_name": str(directory), "hf_dataset_split": "train"},
        {"name": "some", "hf_dataset_name": str(directory), "hf_dataset_split": "train[:20]"},
    ]
    job = config(directory, tmp_path / "run", eval={"enabled": True, "datasets": tables})
    sets = sources.open_eval_data(job)
    assert len(sets["all"]) == len(tokens_of(0, 1, 2, 3)) // (SEQ + 1)
    assert 0 < len(sets["some"]) < len(sets["all"]) / 5


def test_mixture_may_have_hugging_face_datasets(directory, tmp_path):
    np.save(tmp_path / "a.npy", np.full(50 * (SEQ + 1), 259, np.uint16))
    directories = [{"path": str(tmp_path)}, {"hf_name": str(directory), "name": "text"}]
    dataset = sources.open_training_data(
        config(None, tmp_path / "run", data={"datasets": directories})
    )
    assert dataset.sizes == {str(tmp_path): 50, "text": len(tokens_of(0, 1, 2, 3)) // (SEQ + 1)}
    batch = dataset.batch([50, 0, 51])
    assert batch["dataset_idx"].tolist() == [1, 0, 1]
    window = [*batch["input_ids"][0], batch["labels"][0, -1]]
    assert window == tokens_of(0)[: SEQ + 1]
    assert (batch["input_ids"][1] == 259).all()


def test_text_needs_a_tokenizer(directory, tmp_path):
    for streams in (False, True):
        data = {"tokenizer_path": "", "hf_streaming": streams}
        with pytest.raises(UserError, match=r"set data\.tokenizer_path"):
            sources.open_training_data(config(directory, tmp_path / "run", data=data))


def test_streams_read_their_files_once_an_epoch(directory, tmp_path, monkeypatch):
    """4 files, 8 rows: rows 0 and 1 are the windows of file 0, epoch after epoch."""
    monkeypatch.setattr(stream, "ANCHOR_SECONDS", 1e9)
    job = streaming(directory, tmp_path / "run", data={"shuffle": False})
    windows = rows(batches(job, 60)).reshape(60, 4, 2 * (SEQ + 1))
    for file in range(4):
        epoch = tokens_of(file)
        whole = len(epoch) // (SEQ + 1) * (SEQ + 1)  # the rest of the epoch is not used
        expected = (epoch[:whole] * 9)[: 60 * 2 * (SEQ + 1)]
        assert len(expected) == 60 * 2 * (SEQ + 1) > 2 * whole
        assert windows[:, file].reshape(-1).tolist() == expected


def test_shuffles_show_each_window_once_an_epoch(tmp_path):
    """16 files in one stream, of one window each."""
    for i in range(16):
        (tmp_path / "set" / f"{i:02d}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / "set" / f"{i:02d}.jsonl").write_text(json.dumps({"text": chr(65 + i) * SEQ}))
    job = streaming(tmp_path / "set", tmp_path / "run", batch=1)
    order = rows(batches(job, 48))[:, 0].tolist()
    epochs = [order[start : start + 16] for start in (0, 16, 32)]
    assert all(sorted(epoch) == list(range(65, 81)) for epoch in epochs)
    assert len({*map(tuple, epochs), tuple(range(65, 81))}) == 4
    assert len({frozenset(epoch[:5]) for epoch in epochs}) > 1  # the files change places, too
    seeded = streaming(tmp_path / "set", tmp_path / "other", batch=1, train={"seed": 5})
    assert rows(batches(seeded, 16))[:, 0].tolist() != epochs[0]


def reads(monkeypatch):
    """The rows that are read from now on, by the names of their files."""
    read, original = Counter(), huggingface.HuggingFace.records

    def records(self):
        for record in original(self):
            read[self.name.rpartition("file ")[2]] += 1
            yield record

    monkeypatch.setattr(huggingface.HuggingFace, "records", records)
    return read


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_at_any_position_continues_stream(directory, tmp_path, shuffle, monkeypatch):
    job = streaming(directory, tmp_path / "run", data={"shuffle": shuffle})
    whole = batches(job, 60)
    for first in (1, 17, 44):
        same(batches(job, 60 - first, first=8 * first), whole[first:])
    other = streaming(directory, tmp_path / "other", data={"shuffle": shuffle})
    same(batches(other, 10, first=8 * 50), whole[50:])  # without anchors


def test_anchors_save_reading(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "ROWS", 5)
    monkeypatch.setattr("jaxforge.data.corpus.ingest.BATCH_PARTS", 5)
    job = streaming(directory, tmp_path / "run")
    whole = batches(job, 40)
    read = reads(monkeypatch)
    same(batches(job, 1, first=8 * 39), whole[39:])
    assert sum(read.values()) < 4 * DOCUMENTS
    read.clear()
    same(batches(streaming(directory, tmp_path / "new"), 1, first=8 * 39), whole[39:])
    assert sum(read.values()) > 4 * DOCUMENTS


def test_stream_does_not_depend_on_mesh_or_accumulation(directory, tmp_path):
    alone = batches(streaming(directory, tmp_path / "run"), 12)
    mesh = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    split = streaming(directory, tmp_path / "run", batch=2, distributed=mesh)
    same(batches(split, 12, devices=8), alone)
    halves = batches(streaming(directory, tmp_path / "run", accum=2, batch=4), 12)
    assert rows(halves).shape == rows(alone).shape


def test_another_batch_size_goes_on_with_each_stream(directory, tmp_path):
    """8 rows, then 16: each stream gives its next windows, none twice, none left out."""
    plain = {"shuffle": False}
    job = streaming(directory, tmp_path / "run", data=plain)
    first = rows(batches(job, 3)).reshape(3, 4, 2 * (SEQ + 1))
    larger = streaming(directory, tmp_path / "run", batch=16, data=plain)
    then = rows(batches(larger, 2, first=24)).reshape(2, 4, 4 * (SEQ + 1))
    for file in range(4):
        tokens = [*first[:, file].reshape(-1), *then[:, file].reshape(-1)]
        assert tokens == tokens_of(file)[: len(tokens)]
    smaller = streaming(directory, tmp_path / "run", batch=2)
    with pytest.raises(UserError, match=r"reads 4 streams .* 2 sequences of a microbatch"):
        batches(smaller, 1, first=24)


def test_host_reads_the_files_of_its_rows_only(directory, tmp_path, monkeypatch):
    """Two hosts of four rows: each takes part in every batch with half of the files."""
    job = streaming(directory, tmp_path / "run")
    whole = rows(batches(job, 30)).reshape(30, 8, SEQ + 1)
    source = sources.open_training_data(job).source
    for host, files in ((0, {"0 of 4", "1 of 4"}), (1, {"2 of 4", "3 of 4"})):
        read = reads(monkeypatch)
        local = range(4 * host, 4 * host + 4)
        streams = source.start(0, 8, local)
        for update in range(30):
            for row in local:
                np.testing.assert_array_equal(streams[8 * update + row], whole[update, row])
        assert set(read) == files


def test_hosts_share_stream(directory, tmp_path):
    """One row of two: the windows of the other are read and dropped, not kept."""
    job = streaming(directory, tmp_path / "run")
    whole = rows(batches(job, 20)).reshape(20, 8, SEQ + 1)
    streams = sources.open_training_data(job).source.start(0, 8, [3])
    for update in range(20):
        np.testing.assert_array_equal(streams[8 * update + 3], whole[update, 3])
    [reader] = streams._readers.values()
    assert len(reader._read) == 0


def test_packed_streams_carry_documents(directory, tmp_path):
    job = streaming(directory, tmp_path / "run", data={"pack_sequences": True})
    [batch] = batches(job, 1)
    ends = batch["input_ids"] == 256
    assert ends.any()
    assert (batch["labels"][ends] == -100).all()


def test_files_too_small_for_a_sequence_are_named(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jsonl").write_text('{"text": "short"}\n')
    with pytest.raises(UserError, match=r"files \[0\] hold less text than the 33 tokens"):
        batches(streaming(tmp_path / "set", tmp_path / "run"), 1)


def test_stream_errors_name_source(directory, tmp_path):
    no_column = streaming(directory, tmp_path / "a", data={"hf_dataset_text_field": "body"})
    with pytest.raises(UserError, match='has no column "body"; it has text'):
        batches(no_column, 1)
    small = streaming(directory, tmp_path / "b")
    small = small.model_copy(update={"model": small.model.model_copy(update={"vocab_size": 200})})
    with pytest.raises(UserError, match="token 256 is outside the vocabulary of 200; set model"):
        batches(small, 1)
    (directory / "0.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    with pytest.raises(UserError, match=r'file 0 of 4:2: no text in "text" \(None\)'):
        batches(streaming(directory, tmp_path / "c"), 1)


def test_offsets_outside_of_a_saved_dataset_raise(tmp_path):
    """A process that reads such values ends by a signal."""
    datasets.Dataset.from_list([{"text": "hello"}] * 40).save_to_disk(tmp_path / "set")
    [path] = (tmp_path / "set").glob("*.arrow")
    content, offsets = path.read_bytes(), struct.pack("<4i", 0, 5, 10, 15)
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, struct.pack("<4i", 0, -1, 10, 15)))
    dataset = huggingface.load_dataset(str(tmp_path / "set"))
    source = huggingface.HuggingFace.on_disk("set", dataset, TextField())
    with pytest.raises(UserError, match=r"cannot read set: .*[Oo]ffset"):
        list(source.records())


def test_saved_datasets_stream_too(tmp_path):
    dataset = datasets.Dataset.from_dict({"text": [text(0, i) for i in range(DOCUMENTS)]})
    dataset.save_to_disk(tmp_path / "set")
    job = streaming(tmp_path / "set", tmp_path / "run", batch=1, data={"shuffle": False})
    windows = rows(batches(job, 20))
    assert windows.reshape(-1).tolist() == tokens_of(0)[: windows.size]


def test_anchors_are_plain_numbers(directory, tmp_path):
    batches(streaming(directory, tmp_path / "run"), 30)
    assert json.loads((tmp_path / "run" / "stream" / "layout.json").read_text()) == {"streams": 4}
    paths = sorted((tmp_path / "run" / "stream").glob("*-0[0-3].jsonl"))
    assert len(paths) == 4
    for path in map(Path, paths):
        anchors = [Anchor(*json.loads(line)) for line in path.read_text().splitlines()]
        assert anchors == sorted(anchors)
        assert len({anchor.window for anchor in anchors}) == len(anchors) > 3
