"""BOS where the tokenizer adds it: ids against those of transformers, and shards."""

import json

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import processors

from jaxforge.commands import prepare
from jaxforge.data.corpus.conversations import Conversations, encode_conversations
from jaxforge.data.corpus.manifest import FIRST, ID, UNLEARNED, Manifest
from jaxforge.data.corpus.tokenizer import with_prefix
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.inference.conversation import Dialogue
from jaxforge.tasks.prompts import Prompt, encode

BOS, EOS, CLS = 0, 1, 2
TEXTS = ["hello world", " indented", "ünïcödé 🙂", "two\nlines\n"]


def template(single, pair="$A $B:1"):
    special = [("<s>", BOS), ("</s>", EOS), ("<cls>", CLS)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


POST_PROCESSORS = {
    "none": None,
    "byte-level": processors.ByteLevel(trim_offsets=False),
    "bos": template("<s> $A"),
    "bos and eos": template("<s> $A </s>"),
    "eos": template("$A </s>"),
    "two": template("<cls> <s> $A"),
    "sequence": processors.Sequence([processors.ByteLevel(trim_offsets=False), template("<s> $A")]),
    "bert": processors.BertProcessing(("</s>", EOS), ("<cls>", CLS)),
}


def save(directory, post_processor, **settings):
    """A byte-level BPE with a post-processor, in the files of a Hugging Face model."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "</s>", "<cls>"], show_progress=False,
        initial_alphabet=byte_level.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(["hello world"] * 3, trainer)
    if post_processor is not None:
        bpe.post_processor = post_processor
    directory.mkdir()
    bpe.save(str(directory / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**tokens, **settings}))
    return directory


def prompt_ids(tokenizer, text):
    return encode(tokenizer, Prompt(text, "--prompt"), 10**6, 1, vocab_size=10**6)


@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_prompt_prefix_matches_transformers(tmp_path, name):
    directory = save(tmp_path / "t", POST_PROCESSORS[name])
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    loaded = load_tokenizer(directory)
    for text in TEXTS:
        with_ends = reference(text)["input_ids"]
        assert loaded.encode(text, special_tokens=True) == with_ends
        ended = with_ends[-1] == EOS  # which nothing would be generated after
        assert prompt_ids(loaded, text) == (with_ends[:-1] if ended else with_ends)
        assert loaded.encode(text) == reference(text, add_special_tokens=False)["input_ids"]


def test_add_bos_token_matches_transformers(tmp_path):
    plain = save(tmp_path / "plain", POST_PROCESSORS["byte-level"])
    reference = transformers.AutoTokenizer.from_pretrained(plain, add_bos_token=True)
    loaded = load_tokenizer(save(tmp_path / "t", POST_PROCESSORS["byte-level"], add_bos_token=True))
    twice = load_tokenizer(save(tmp_path / "u", POST_PROCESSORS["bos"], add_bos_token=True))
    for text in TEXTS:
        assert reference(text)["input_ids"][0] == BOS
        assert prompt_ids(loaded, text) == reference(text)["input_ids"]
        assert prompt_ids(twice, text) == reference(text)["input_ids"]


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}])
def test_saved_copies_add_the_same(tmp_path, settings):
    post_processor = POST_PROCESSORS["byte-level" if settings else "sequence"]
    tokenizer = load_tokenizer(save(tmp_path / "t", post_processor, **settings))
    tokenizer.save(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    assert (copy.prefix, copy.bos_id, copy.fingerprint) == ((BOS,), BOS, tokenizer.fingerprint)
    bare = tokenizer.without_bos()
    bare.save(tmp_path / "bare")
    for item in (bare, load_tokenizer(tmp_path / "bare")):
        assert item.prefix == ()
        assert prompt_ids(item, "hello") == tokenizer.encode("hello")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "bare")
    assert reference("hello")["input_ids"] == tokenizer.encode("hello")


def test_bos_is_never_written_twice(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path / "t", POST_PROCESSORS["bos"]))
    assert prompt_ids(tokenizer, "<s>hello") == prompt_ids(tokenizer, "hello")
    assert prompt_ids(tokenizer, "") == [BOS]
    assert with_prefix(tokenizer, []) == [BOS]


def prepared(tmp_path, *options, file="a.jsonl"):
    output = tmp_path / "out"
    command = [tmp_path / file, "--output", output, "--tokenizer", tmp_path / "t", "--overwrite"]
    prepare.main([*map(str, command), "--workers", "1", *options])
    return output


def tokens(directory):
    return np.load(directory / "shard_00000.npy").tolist()


def test_documents_begin_with_bos_and_end_with_eos(tmp_path, monkeypatch, capsys):
    reference = transformers.AutoTokenizer.from_pretrained(
        save(tmp_path / "t", POST_PROCESSORS["bos and eos"])
    )
    texts = ["hello\n" * 9, "<s>world", "", "ünï\n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    monkeypatch.setattr("jaxforge.data.corpus.documents.PART_BYTES", 20)  # the first in pieces
    expected = [i for t in ("hello\n" * 9, "world", "ünï\n") for i in reference(t)["input_ids"]]
    output = prepared(tmp_path)
    assert tokens(output / "train") == expected
    manifest = Manifest.read(output / "train")
    assert (manifest.bos_ids, manifest.eos_id, manifest.documents) == ((BOS,), EOS, 3)
    assert "EOS 1, BOS 0" in capsys.readouterr().out

    output = prepared(tmp_path, "--no-bos")
    assert tokens(output / "train")[:4] == expected[1:5]
    assert Manifest.read(output / "train").bos_ids == ()
    assert load_tokenizer(output / "tokenizer").prefix == ()


def test_eos_is_never_written_twice(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxforge.data.corpus.documents.PART_BYTES", 6)  # EOS alone in a part
    save(tmp_path / "t", POST_PROCESSORS["bos"])
    tokenizer = load_tokenizer(tmp_path / "t")
    texts = ["hello</s>", "hello\n</s>", "a</s>b", "</s>", "a</s>\n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    output = prepared(tmp_path)
    expected = [[*prompt_ids(tokenizer, t.removesuffix("</s>")), EOS] for t in texts]
    assert tokens(output / "train") == [i for ids in expected for i in ids]
    assert Manifest.read(output / "train").documents == 5
    for text, ids in zip(texts, expected, strict=True):
        record = {"prompt": "", "completion": text}
        document = Conversations(tokenizer).document(record)
        entries = encode_conversations(tokenizer, [("train", document, True, True)], "uint32")
        assert (entries["train"] & ID).tolist() == ids
        assert not entries["train"][-1] & UNLEARNED


@pytest.mark.parametrize("held_out", ["--validation-fraction=0.5", "--validation-tokens=12"])
def test_both_parts_of_split_document_begin_with_bos(tmp_path, held_out):
    save(tmp_path / "t", POST_PROCESSORS["bos"])
    (tmp_path / "a.txt").write_text("hello\nworld\n" * 10)
    output = prepared(tmp_path, held_out, file="a.txt")
    train, validation = (tokens(output / split) for split in ("train", "validation"))
    for part in (train, validation):
        assert (part[0], part[-1], part.count(BOS), part.count(EOS)) == (BOS, EOS, 1, 1)
    text = load_tokenizer(tmp_path / "t").decode
    in_order = (validation, train) if "tokens" in held_out else (train, validation)
    assert "".join(map(text, in_order)) == "hello\nworld\n" * 10


def test_conversations_begin_with_bos_once(tmp_path):
    said = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    directory = save(tmp_path / "t", POST_PROCESSORS["bos"], chat_template=said)
    tokenizer = load_tokenizer(directory)
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    records = [{"messages": messages}, {"prompt": "hello", "completion": " world"}]
    chat, plain = (
        encode_conversations(
            tokenizer, [("train", Conversations(tokenizer).document(r), True, True)], "uint32"
        )["train"]
        for r in records
    )
    assert (chat & ID).tolist() == reference.apply_chat_template(messages, return_dict=False)
    assert (plain & ID).tolist() == [*reference("hello world")["input_ids"], EOS]
    assert plain[0] == BOS | FIRST | UNLEARNED
    assert Dialogue(tokenizer, 100, 10**6).ask("hello")[0].count(BOS) == 1
    plain_text = load_tokenizer(save(tmp_path / "u", POST_PROCESSORS["bos"]))
    assert Dialogue(plain_text, 100, 10**6).ask("hello")[0] == reference("hello")["input_ids"]
