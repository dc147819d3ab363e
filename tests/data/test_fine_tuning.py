"""Conversations from files to batches: prepared, cached, streamed, mixed, evaluated."""

import json
import os
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import datasets
import jax
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxforge.commands import prepare
from jaxforge.config import rules
from jaxforge.config.reading.load import load_config
from jaxforge.data import loader, sources, stream
from jaxforge.data.conversation_shards import ConversationShards
from jaxforge.data.corpus import ingest
from jaxforge.data.corpus.conversations import Conversations, encode_conversations
from jaxforge.data.corpus.manifest import CONVERSATIONS, FIRST, ID, LENGTHS, UNLEARNED, Manifest
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.packing import IGNORE
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model
from jaxforge.parallel.mesh import make_mesh
from jaxforge.training.evaluation import Evaluator
from jaxforge.training.launch import fit as train
from tests.conftest import tiny_config
from tests.data.corpus.chat_files import CHATML, UNMARKED, save_tokenizer
from tests.data.corpus.interruptions import Interrupted, snapshot
from tests.helpers import drawn

SEQ = 96


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(ingest, "BATCH_BYTES", 900)
    monkeypatch.setattr(stream, "BLOCK_TOKENS", 4 * SEQ)
    monkeypatch.setattr(stream, "ANCHOR_SECONDS", 0.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory, CHATML)
    return directory


def record(i):
    turn = [{"role": "user", "content": f"{i} who?"}, {"role": "assistant", "content": f"bot {i}"}]
    return {"messages": turn * (i % 3 + 1)}


RECORDS = [record(i) for i in range(60)]


@pytest.fixture
def files(tmp_path):
    """Two files of records, and one that holds none."""
    for name, part in (("a", RECORDS[:40]), ("b", RECORDS[40:])):
        path = tmp_path / "set" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in part))
    (tmp_path / "set" / "README.md").write_text("no conversation")
    return tmp_path / "set"


def run(files, tokenizer, output, *args):
    words = (files, "--output", output, "--conversations", "--tokenizer", tokenizer, *args)
    return prepare.main([*map(str, words), "--workers", "1"])


def expected(tokenizer, records=RECORDS):
    """The entries of each record, as ids and labels."""
    tokenizer = load_tokenizer(tokenizer)
    chats = Conversations(tokenizer)
    for item in records:
        text = ("train", chats.document(item), True)
        entries = encode_conversations(tokenizer, [text], "uint32")["train"]
        ids = (entries & ID).astype(int)
        yield ids.tolist(), np.where(entries <= ID, ids, IGNORE).tolist()


def config(tokenizer, run="run", accum=1, batch=4, data=None, **sections):
    return tiny_config(
        data={"tokenizer_path": str(tokenizer), "num_workers": 2, **(data or {})},
        train={"batch_size": batch, "grad_accum_steps": accum, "seq_len": SEQ},
        model={"vocab_size": 304, "max_seq_len": SEQ, "n_layers": 1},
        checkpoint={"dir": str(run)},
        **sections,
    )


def batches(job, n, first=0):
    mesh = make_mesh(job, jax.devices()[:1])
    dataset = sources.open_training_data(job)
    read = loader.training_batches(job, mesh, dataset, first, n)
    return [jax.tree.map(np.asarray, batch) for batch in read]


def conversations_of(examples):
    """Return (inputs, labels) of each document of some examples, both as in `expected`."""
    result = []
    rows = (examples[name].reshape(-1, SEQ) for name in ("input_ids", "labels", "segment_ids"))
    for ids, labels, documents in zip(*rows, strict=True):
        for document in range(documents.max() + 1):
            here = documents == document
            result.append((ids[here].tolist(), labels[here].tolist()))
            if result[-1][1][-1] != IGNORE:  # the window's last token is a label only
                result[-1] = ([*result[-1][0], int(labels[-1])], [*result[-1][1], IGNORE])
    return [(ids, labels) for ids, labels in result if any(ids)]  # no padding


def inputs_and_labels(conversations):
    """Return inputs and labels as windows hold them: a position's label is the next token."""
    return [(ids, [*labels[1:], IGNORE]) for ids, labels in conversations]


def whole(dataset):
    return dataset.batch(range(len(dataset)))


@pytest.mark.processes
def test_prepare_writes_shards_that_training_reads(files, tokenizer, tmp_path):
    command = [sys.executable, "-m", "jaxforge.prepare", str(files), "--output",
               str(tmp_path / "out"), "--conversations", "--tokenizer", str(tokenizer)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table, _ = done.stdout.split("\n\n", 1)
    records = list(expected(tokenizer))
    n_learned = sum(label != IGNORE for _, labels in records for label in labels)
    n_tokens = sum(len(ids) for ids, _ in records)
    rows = dict(line.rsplit(maxsplit=1) for line in table.splitlines()[1:4])
    assert rows == {"conversations": "60", "tokens": f"{n_tokens:,}", "… learned": f"{n_learned:,}"}
    settings = tomllib.loads((tmp_path / "out" / "train.toml").read_text("utf-8"))
    assert settings["model"]["vocab_size"] == load_tokenizer(tokenizer).vocab_size
    job = config(tokenizer, data={**settings["data"], "shuffle": False})
    dataset = sources.open_training_data(job)
    examples = whole(dataset)
    assert sorted(conversations_of(examples)) == sorted(inputs_and_labels(records))
    assert (examples["labels"] != IGNORE).sum() == n_learned
    assert len(dataset) * SEQ < 1.15 * n_tokens  # little padding
    chat = load_tokenizer(tmp_path / "out" / "tokenizer").chat
    assert chat["chat_template"] == CHATML


def test_batches_hold_every_conversation_once_an_epoch(files, tokenizer, tmp_path):
    run(files, tokenizer, tmp_path / "out", "--shard-tokens", "500", "--format", "bin")
    data = {"dataset_path": str(tmp_path / "out" / "train"), "file_pattern": "*.bin"}
    job = config(tokenizer, batch=1, data=data)
    n = len(sources.open_training_data(job))
    twice = batches(job, 2 * n)
    records = sorted(inputs_and_labels(expected(tokenizer)))
    for epoch in (twice[:n], twice[n:]):
        assert sorted(chain.from_iterable(map(conversations_of, epoch))) == records
    resumed = batches(job, 3, first=n + 2)
    for item, other in zip(resumed, twice[n + 2 : n + 5], strict=True):
        jax.tree.map(np.testing.assert_array_equal, item, other)


def test_shards_hold_whole_conversations(files, tokenizer, tmp_path):
    run(files, tokenizer, tmp_path / "out", "--shard-tokens", "500")
    directory = tmp_path / "out" / "train"
    manifest = Manifest.read(directory)
    assert (manifest.version, manifest.documents, manifest.dtype) == (CONVERSATIONS, 60, "uint32")
    parts = [np.load(directory / shard.file) for shard in manifest.shards]
    assert len(parts) > 3
    assert all(part[0] & FIRST and 500 <= len(part) < 600 for part in parts[:-1])
    entries = np.concatenate(parts)
    starts = np.flatnonzero(entries & FIRST)
    lengths = np.fromfile(directory / LENGTHS, "<u4")
    assert lengths.tolist() == np.diff(starts, append=len(entries)).tolist()
    records = list(expected(tokenizer))
    assert (entries & ID).tolist() == [i for ids, _ in records for i in ids]
    assert ((entries & UNLEARNED) > 0).tolist() == [
        label == IGNORE for _, labels in records for label in labels
    ]
    second = config(tokenizer, data={"dataset_path": str(directory), "file_pattern": "*2.npy"})
    got = sorted(conversations_of(whole(sources.open_training_data(second))))
    per_shard = [int((part & FIRST > 0).sum()) for part in parts]
    here = slice(sum(per_shard[:2]), sum(per_shard[:3]))
    assert got == sorted(inputs_and_labels(records[here]))


def test_interrupted_runs_give_same_shards(files, tokenizer, tmp_path, monkeypatch):
    options = ("--shard-tokens", "300", "--validation-fraction", "0.2", "--unit-bytes", "1000")
    run(files, tokenizer, tmp_path / "whole", *options)
    encode = ingest.encode_conversations
    for limit in (2, 3):
        done = []

        def limited(*args, done=done, limit=limit):
            if len(done) == limit:
                raise Interrupted
            done.append(args)
            return encode(*args)

        monkeypatch.setattr(ingest, "encode_conversations", limited)
        with pytest.raises(Interrupted):
            run(files, tokenizer, tmp_path / "out", *options)
    monkeypatch.setattr(ingest, "encode_conversations", encode)
    run(files, tokenizer, tmp_path / "out", *options, "--workers", "2")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    splits = [Manifest.read(tmp_path / "out" / name).documents for name in ("train", "validation")]
    assert sum(splits) == 60
    assert splits[1] > 3


def test_another_template_starts_over(files, tmp_path, capsys):
    tokenizer = tmp_path / "tokenizer"
    save_tokenizer(tokenizer, CHATML)
    with (files / "b.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "?"}]}\n')
    with pytest.raises(UserError, match=r"b\.jsonl.*: the assistant says nothing.*--skip-bad"):
        run(files, tokenizer, tmp_path / "out", "--unit-bytes", "3000")
    save_tokenizer(tokenizer, UNMARKED)
    run(files, tokenizer, tmp_path / "out", "--skip-bad", "--unit-bytes", "3000")
    shown = capsys.readouterr()
    assert "starting over: the chat template's sha256 was" in shown.err
    assert "left out as bad  1 records" in shown.out


def test_parquet_and_hugging_face_datasets_give_the_same(files, tokenizer, tmp_path):
    run(files, tokenizer, tmp_path / "jsonl")
    (tmp_path / "table").mkdir()
    rows = [{**item, "id": i, "prompt": "x"} for i, item in enumerate(RECORDS)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "table" / "a.parquet", row_group_size=7)
    run(tmp_path / "table", tokenizer, tmp_path / "parquet")
    hf = ["--hf-dataset", tmp_path / "table", "--output", tmp_path / "hf", "--conversations",
          "--tokenizer", tokenizer]  # fmt: skip
    prepare.main([str(arg) for arg in hf])
    data = {"hf_dataset_name": str(tmp_path / "table"), "hf_dataset_conversations": True}
    cached = sources.open_training_data(config(tokenizer, data=data)).source.directory
    shards = [directory / "shard_00000.npy" for directory in (
        tmp_path / "jsonl" / "train", tmp_path / "parquet" / "train", tmp_path / "hf" / "train",
        cached,
    )]  # fmt: skip
    assert len({shard.read_bytes() for shard in shards}) == 1


def test_changed_template_is_tokenized_again(files, tokenizer, tmp_path):
    save_tokenizer(tmp_path / "other", UNMARKED)
    (files / "README.md").unlink()
    data = {"hf_dataset_name": str(files), "hf_dataset_conversations": True}
    locations = {
        sources.open_training_data(config(directory, data=data)).source.directory
        for directory in (tokenizer, tmp_path / "other", tokenizer)
    }
    assert len(locations) == 2


def streaming(files, tokenizer, run, **data):
    name = {"hf_dataset_name": str(files), "hf_dataset_conversations": True, "hf_streaming": True}
    return config(tokenizer, run, batch=2, data={**name, **data})


@pytest.mark.parametrize("shuffle", [True, False])
def test_streams_read_every_conversation_once_an_epoch(files, tokenizer, tmp_path, shuffle):
    """Two files in two streams, one row of a microbatch each."""
    (files / "README.md").unlink()
    job = streaming(files, tokenizer, tmp_path / "run", shuffle=shuffle)
    got = batches(job, 80)
    for row, part in ((0, RECORDS[:40]), (1, RECORDS[40:])):
        examples = {name: np.stack([b[name][0, row] for b in got]) for name in got[0]}
        seen = conversations_of(examples)
        records = sorted(inputs_and_labels(expected(tokenizer, part)))
        assert sorted(seen[: len(part)]) == records
        assert sorted(seen[len(part) : 2 * len(part)]) == records


def test_streams_resume_anywhere(files, tokenizer, tmp_path):
    (files / "README.md").unlink()
    job = streaming(files, tokenizer, tmp_path / "run")
    every = batches(job, 40)
    anchors = list((tmp_path / "run" / "stream").glob("*.jsonl"))
    assert all(len(path.read_text().splitlines()) > 4 for path in anchors)
    without = streaming(files, tokenizer, tmp_path / "other")
    for resumed, first in ((job, 1), (job, 17), (job, 33), (without, 33)):
        for batch, other in zip(batches(resumed, 3, first=2 * first), every[first:], strict=False):
            jax.tree.map(np.testing.assert_array_equal, batch, other)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("how", ["truncate", "drop"])
def test_overlong_conversations_are_cut_or_dropped_and_reported(
    files, tokenizer, tmp_path, how, streams, caplog
):
    (files / "README.md").unlink()
    long = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4 " * 200}]
    with (files / "b.jsonl").open("a") as file:
        file.write(json.dumps({"messages": long}) + "\n")
    if streams:
        job = streaming(files, tokenizer, tmp_path / "run", overlong=how)
        [*_, last] = batches(job, 40)
        examples = {name: np.stack([b[name] for b in batches(job, 40)]) for name in last}
    else:
        run(files, tokenizer, tmp_path / "out")
        data = {"dataset_path": str(tmp_path / "out" / "train"), "overlong": how}
        examples = whole(sources.open_training_data(config(tokenizer, data=data)))
    [(ids, labels)] = inputs_and_labels(expected(tokenizer, [{"messages": long}]))
    assert len(ids) > SEQ + 1
    cut = (ids[: SEQ + 1], [*labels[:SEQ], IGNORE])
    assert (cut in conversations_of(examples)) == (how == "truncate")
    assert f"longer than the {SEQ + 1} tokens" in caplog.text
    assert {"truncate": "cut there", "drop": "left out"}[how] in caplog.text


def test_mixture_with_text_keeps_texts_unchanged(files, tokenizer, tmp_path):
    run(files, tokenizer, tmp_path / "out")
    (tmp_path / "text").mkdir()
    np.save(tmp_path / "text" / "a.npy", np.arange(9 * (SEQ + 1), dtype=np.uint16) % 290)
    named = [{"path": str(tmp_path / "out" / "train"), "name": "chat"},
               {"path": str(tmp_path / "text"), "name": "text"}]  # fmt: skip
    dataset = sources.open_training_data(config(tokenizer, data={"datasets": named}))
    n = dataset.sizes["chat"]
    batch = dataset.batch([n, 0, n + 1])
    assert batch["segment_ids"][1].max() > 0
    assert (batch["segment_ids"][[0, 2]] == 0).all()
    assert (batch["labels"][0] == np.arange(1, SEQ + 1)).all()
    assert dataset.batch([n]).keys() == batch.keys()


def test_evaluation_sees_each_label_once(files, tokenizer, tmp_path):
    run(files, tokenizer, tmp_path / "out", "--validation-fraction", "0.4")
    directory = tmp_path / "out" / "validation"
    job = config(tokenizer, eval={"enabled": True, "datasets": {"dataset_path": str(directory)}})
    [dataset] = sources.open_eval_data(job).values()
    assert isinstance(dataset.source, ConversationShards)
    read = loader.eval_batches(job, make_mesh(job, jax.devices()[:1]), dataset)
    n_labels = sum(int((batch["labels"] != IGNORE).sum()) for batch in read)
    entries = np.load(directory / "shard_00000.npy")
    assert n_labels == (entries <= ID).sum() > 0


def by_hand(job, params, conversations):
    """-log p of all learned tokens, in float64, from the logits of each conversation by itself."""
    model = build_model(job)
    nats = 0.0
    logits_of = jax.jit(lambda params, ids: model.logits(params, model.hidden(params, ids)))
    for ids, labels in conversations:
        padded = np.zeros((1, SEQ), int)
        padded[0, : len(ids)] = ids
        logits = np.asarray(logits_of(params, padded), np.float64)[0]
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nats -= sum(logp[at, label] for at, label in enumerate(labels) if label != IGNORE)
    return nats


def test_packed_loss_equals_separate_losses(files, tokenizer, tmp_path):
    run(files, tokenizer, tmp_path / "out")
    directory = str(tmp_path / "out" / "train")
    job = config(tokenizer, eval={"enabled": True, "datasets": {"dataset_path": directory}})
    model, mesh = build_model(job), make_mesh(job, jax.devices()[:1])
    params = jax.tree.map(lambda leaf: 8 * leaf, drawn(job))  # far from even
    with jax.set_mesh(mesh):
        datasets = sources.open_eval_data(job)
        sums = Evaluator(job, mesh, model, datasets, load_tokenizer(tokenizer))(params, None)[""]
    conversations = inputs_and_labels(expected(tokenizer))
    assert sums.tokens == sum(i != IGNORE for _, labels in conversations for i in labels)
    assert sums.nats == pytest.approx(by_hand(job, params, conversations), rel=1e-5)
    said = [message["content"] for item in RECORDS for message in item["messages"][1::2]]
    assert sums.n_bytes == sum(len(text) + 1 for text in said)  # and the line's end


def test_valid_tokens_count_learned_labels(files, tokenizer, tmp_path):
    run(files, tokenizer, tmp_path / "out")
    data = {"dataset_path": str(tmp_path / "out" / "train")}
    job = config(tokenizer, tmp_path / "run", batch=1, data=data, distributed={"dp_shard": 8})
    train(job)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [line for line in map(json.loads, lines) if "train/loss" in line]
    read = batches(config(tokenizer, batch=8, data=data), len(logged))
    labels = [int((batch["labels"] != IGNORE).sum()) for batch in read]
    assert [line["train/valid_tokens"] for line in logged] == np.cumsum(labels).tolist()
    assert logged[-1]["train/loss"] < 0.7 * logged[0]["train/loss"]
    chat = load_tokenizer(tmp_path / "run" / "tokenizer").chat
    assert chat["chat_template"] == CHATML


def test_example_config_trains():
    path = Path(__file__).parents[2] / "configs" / "fine_tuning.toml"
    rules.check(load_config(path, ["--train.max_steps=99"]), 8)  # epochs need the data


def damaged(directory, change):
    path = directory / LENGTHS
    if change == "lost":
        path.unlink()
    elif change == "cut":
        os.truncate(path, 40)
    else:
        np.save(directory / "shard_00001.npy", np.full(100, UNLEARNED, np.uint32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lost", r"cannot read .*lengths\.uint32: .*prepare it again"),
        ("cut", r"lengths\.uint32 has 10 conversations .* manifest\.json says 60"),
        ("more", r"shard_00001\.npy is not what manifest\.json beside it says"),
    ],
)
def test_damaged_conversation_shards_raise(files, tokenizer, tmp_path, change, message):
    run(files, tokenizer, tmp_path / "out")
    damaged(tmp_path / "out" / "train", change)
    job = config(tokenizer, data={"dataset_path": str(tmp_path / "out" / "train")})
    with pytest.raises(UserError, match=message):
        sources.open_training_data(job)


def test_too_short_sequence_raises(files, tokenizer, tmp_path):
    run(files, tokenizer, tmp_path / "out")
    data = {"dataset_path": str(tmp_path / "out" / "train"), "overlong": "drop"}
    job = config(tokenizer, data=data)
    job = job.model_copy(update={"train": job.train.model_copy(update={"seq_len": 4})})
    with pytest.raises(
        UserError, match=r"60 of 60 conversations .* left out .*raise train\.seq_len"
    ):
        sources.open_training_data(job)


def test_wrong_arguments_raise(files, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"README\.md is read as plain text, and holds no conver"):
        run(files / "README.md", tokenizer, tmp_path / "out")
    with pytest.raises(UserError, match="--conversations"):
        run(files, "bpe", tmp_path / "out")
    with pytest.raises(UserError, match="--dtype"):
        run(files, tokenizer, tmp_path / "out", "--dtype", "uint16")
    with pytest.raises(UserError, match="no chat template to write conversations with"):
        run(files, "byte", tmp_path / "out")
    (tmp_path / "table").mkdir()
    parquet.write_table(pyarrow.table({"text": ["x"]}), tmp_path / "table" / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: expected columns messages, .*it has text"):
        run(tmp_path / "table", tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
