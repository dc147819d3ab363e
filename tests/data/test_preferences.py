"""Pairs of answers from files to batches."""

import json
import re

import jax
import numpy as np
import pytest

from jaxforge.commands import prepare
from jaxforge.config import check, load_config
from jaxforge.data import loader, sources
from jaxforge.data.conversation_shards import PreferenceShards
from jaxforge.data.corpus.conversations import (
    Conversations,
    Preferences,
    encode_conversations,
    encode_preferences,
)
from jaxforge.data.corpus.manifest import FIRST, ID, LENGTHS, PREFERENCES, UNLEARNED, Manifest
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh
from tests.conftest import tiny_config
from tests.data.corpus.chat_files import CHATML, save_tokenizer


def message(role, content):
    return {"role": role, "content": content}


USER, GOOD, BAD = message("user", "who?"), message("assistant", "me"), message("assistant", "you!")
CHAT = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
TEXT = {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 11 or so"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory, CHATML)
    return load_tokenizer(directory), directory


def entries_of(tokenizer, record):
    text = "train", Preferences(tokenizer).document(record), True, True
    return encode_preferences(tokenizer, [text], "uint32")


@pytest.mark.parametrize(
    "record",
    [
        CHAT,
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "who?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "who?", "chosen": [GOOD], "rejected": [BAD], "score_chosen": 3},
        {"prompt": "who?", "chosen": [GOOD], "rejected": [BAD], "tools": None},
    ],
    ids=["explicit", "implicit", "repeated", "text prompt", "other keys"],
)
def test_forms_of_messages_have_the_same_entries(tokenizer, record):
    tokenizer, _ = tokenizer
    conversations = [
        Conversations(tokenizer).document({"prompt": [USER], "completion": [answer]})
        for answer in (GOOD, BAD)
    ]
    texts = [("train", text, True, True) for text in conversations]
    expected = encode_conversations(tokenizer, texts, "uint32")["train"]
    encoded = entries_of(tokenizer, record)
    np.testing.assert_array_equal(encoded.tokens["train"], expected)
    assert encoded.lengths["train"].tolist() == [len(expected)]
    assert np.count_nonzero(expected & FIRST) == 2


def test_answers_with_eos_get_no_second_one(tokenizer):
    tokenizer, _ = tokenizer
    ended = {**TEXT, "chosen": " 2<|im_end|>", "rejected": " 11 or so<|im_end|>"}
    expected, entries = (entries_of(tokenizer, record).tokens["train"] for record in (TEXT, ended))
    np.testing.assert_array_equal(entries, expected)


def test_null_keys_of_common_messages_do_not_matter(tokenizer):
    tokenizer, _ = tokenizer
    with_null = {**USER, "tool_calls": None}
    expected = entries_of(tokenizer, CHAT)
    entries = entries_of(tokenizer, {"chosen": [with_null, GOOD], "rejected": [USER, BAD]})
    np.testing.assert_array_equal(entries.tokens["train"], expected.tokens["train"])


def test_texts_are_concatenated_and_end_with_eos(tokenizer):
    tokenizer, _ = tokenizer
    entries = entries_of(tokenizer, TEXT).tokens["train"]
    starts = np.flatnonzero(entries & FIRST)
    for part, key in zip(np.split(entries, starts[1:]), ("chosen", "rejected"), strict=True):
        learned = [int(x) for x in part[part & UNLEARNED == 0] & ID]
        assert learned == [*tokenizer.encode(TEXT[key]), tokenizer.eos_id]
        prompt = [int(x) for x in part[part & UNLEARNED != 0] & ID]
        assert prompt == tokenizer.encode(TEXT["prompt"])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, "expected chosen and rejected, with a prompt if they are texts"),
        ({"chosen": "a", "rejected": "b"}, "texts as answers, and no prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "says nothing"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "have no common messages"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "do not differ after them"),
    ],
    ids=str,
)
def test_invalid_record_is_refused(tokenizer, record, message):
    with pytest.raises(ValueError, match=message):
        Preferences(tokenizer[0]).document(record)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tokenizer):
    """Prepared pairs of increasing length, in small shards, and the records."""
    directory = tmp_path_factory.mktemp("pairs")
    records = [
        {"prompt": f"{i}:", "chosen": "yes" * (i % 5 + 1), "rejected": "no" * (i % 7 + 1)}
        for i in range(40)
    ]
    path = directory / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = [
        path, "--output", directory / "out", "--preferences", "--tokenizer", tokenizer[1],
        "--workers", 1, "--shard-tokens", 100, "--validation-fraction", 0.2,
    ]  # fmt: skip
    assert prepare.main([*map(str, arguments)]) == 0
    return directory / "out", records


def config(directory, objective="dpo", **sections):
    return tiny_config(
        data={"dataset_path": str(directory), "num_workers": 0, **sections.pop("data", {})},
        train={"objective": objective, "seq_len": 48, "batch_size": 2},
        model={"vocab_size": 304},
        checkpoint={"load_path": "reference"},
        **sections,
    )


def test_written_config_is_one_of_dpo(prepared, tmp_path):
    path = prepared[0] / "train.toml"
    with pytest.raises(UserError, match=r"requires a trained model: set checkpoint\.load_path"):
        check(load_config(path), 1)
    written = load_config(path, [f"--checkpoint.load_path={tmp_path}"])
    assert written.train.objective == "dpo"
    check(written, 1)


def test_summary_counts_pairs(tmp_path, tokenizer, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({**TEXT, "prompt": f"{i}:"}) + "\n" for i in range(30)))
    words = [path, "--output", tmp_path / "out", "--preferences", "--tokenizer", tokenizer[1]]
    assert prepare.main([*map(str, words), "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^pairs +30$", shown, re.MULTILINE)
    path = tmp_path / "out" / "train.toml"
    assert shown.endswith(f"jaxforge train --config {path} --checkpoint.load_path=MODEL\n")
    assert f"set [model] in {path} to the shape of your model MODEL (a run, or" in shown


def test_manifest_counts_both_answers(prepared):
    manifests = [Manifest.read(prepared[0] / split) for split in ("train", "validation")]
    assert all(manifest.version == PREFERENCES for manifest in manifests)
    assert sum(manifest.documents for manifest in manifests) == 2 * len(prepared[1])
    assert len(manifests[0].shards) > 2
    lengths = np.fromfile(prepared[0] / "train" / LENGTHS, "<u4")
    assert len(lengths) == manifests[0].documents


def test_pairs_share_a_sequence(prepared, tokenizer):
    directory, records = prepared
    job = config(directory / "train")
    dataset = sources.open_training_data(job)
    assert isinstance(dataset.source, PreferenceShards)
    mesh = make_mesh(job, jax.devices()[:1])
    read_pairs, decode = set(), tokenizer[0].decode
    for batch in loader.training_batches(job, mesh, dataset, 0, -(-len(dataset) // 2)):
        fields = (np.asarray(batch[n]).reshape(-1, 48) for n in ("input_ids", "segment_ids"))
        for tokens, segments in zip(*fields, strict=True):
            texts = [decode(tokens[segments == n].tolist()) for n in range(segments.max() + 1)]
            read_pairs |= set(zip(texts[::2], texts[1::2], strict=False))
    expected = {
        tuple(f"{record['prompt']}{record[key]}" for key in ("chosen", "rejected"))
        for record in records
    }
    manifest = dataset.source.manifest
    assert len({pair for pair in expected if pair in read_pairs}) == manifest.documents // 2


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_overlong_pairs(prepared, overlong):
    manifest = Manifest.read(prepared[0] / "train")
    lengths = np.fromfile(prepared[0] / "train" / LENGTHS, "<u4").reshape(-1, 2)
    width = 20
    shards = PreferenceShards(
        prepared[0] / "train", "*.npy", width - 1, overlong, manifest=manifest, vocab_size=304,
        token_dtype=None, verify="read", keys=("data.dataset_path", "data.file_pattern"),
        cache=None, split="train",
    )  # fmt: skip
    long = lengths.sum(axis=1) > width
    assert long.any()
    assert not long.all()
    windows = shards.batch(range(len(shards)))
    assert windows.shape[1] == width
    n_documents = np.count_nonzero((windows >= 0) & (windows & FIRST != 0))
    assert n_documents == 2 * (len(lengths) if overlong == "truncate" else int((~long).sum()))
    cut = shards.truncate(lengths[long].astype(int))
    assert (cut.sum(axis=1) == width).all()
    assert ((cut == lengths[long]) | (cut >= width // 2)).all()


def test_objective_and_data_must_fit(prepared, tmp_path):
    with pytest.raises(UserError, match=r'holds pairs of answers.*set train.objective = "dpo"'):
        sources.open_training_data(config(prepared[0] / "train", "next_token"))
    (tmp_path / "a.txt").write_text("some text " * 200)
    prepare.main([str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--workers", "1"])
    with pytest.raises(UserError, match="does not hold pairs of answers"):
        sources.open_training_data(config(tmp_path / "out" / "train"))
