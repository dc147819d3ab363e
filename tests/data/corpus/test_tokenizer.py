import json
import random

import pytest
import tokenizers

from jaxforge.data.corpus.tokenizer import LARGEST_VOCAB, ByteTokenizer, HFTokenizer, train_bpe
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.errors import UserError

TEXTS = ["", "plain", "ümläut ẞ", "日本語 🎉 \u202e", "tabs\t\r\n  \x00 end"]
CORPUS = ["the cat sat on the mat\n", "the dog sat on the cat\n"] * 20


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(CORPUS, 300)


def random_text(seed):
    rng = random.Random(seed)
    points = (
        rng.choice((rng.randrange(0x80), rng.randrange(0xE000, 0x110000))) for _ in range(200)
    )
    return "".join(map(chr, points))


@pytest.mark.parametrize("text", [*TEXTS, *map(random_text, range(5))])
def test_any_text_survives_bytes_and_bpe(text, bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_batch([text, "x"]) == [ids, tokenizer.encode("x")]
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eos_id for i in ids)


def test_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([104, 256, 105, 0xC3]) == "hi\ufffd"
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


def test_lone_surrogates_become_replacement_characters(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        expected = tokenizer.encode("a\ufffdb")
        assert tokenizer.encode("a\ud800b") == expected
        assert tokenizer.encode_batch(["a\udfffb"]) == [expected]
        [(ids, offsets)] = tokenizer.encode_with_offsets(["a\ud800b"])
        assert (ids, offsets[-1].tolist()) == (expected, [2, 3])


def test_bpe_merges_and_is_deterministic(bpe):
    assert 262 < bpe.vocab_size < 300  # the texts hold no more pairs
    assert len(bpe.encode("the cat sat")) < 6
    assert bpe.eos_id == 0
    assert bpe.fingerprint == train_bpe(iter(CORPUS), 300).fingerprint
    assert bpe.fingerprint != train_bpe(CORPUS, 262).fingerprint
    assert bpe.decode([bpe.eos_id, *bpe.encode("the")]) == "the"


def test_bpe_vocabulary_must_hold_the_bytes():
    with pytest.raises(UserError, match="256 cannot hold"):
        train_bpe(CORPUS, 256)


def test_saved_tokenizer_equals_original(tmp_path, bpe):
    for name, tokenizer in (("byte", ByteTokenizer()), ("bpe", bpe)):
        tokenizer.save(tmp_path / name)
        loaded = load_tokenizer(tmp_path / name)
        assert type(loaded) is type(tokenizer)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.encode(TEXTS[3]) == tokenizer.encode(TEXTS[3])
        assert (loaded.eos_id, loaded.vocab_size) == (tokenizer.eos_id, tokenizer.vocab_size)
    assert load_tokenizer(str(tmp_path / "bpe" / "tokenizer.json")).eos_id == 0
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, None),
        ({"tokenizer_config": {"eos_token": "a"}, "config": {"eos_token_id": 7}}, "a"),
        ({"tokenizer_config": {"eos_token": {"content": "b"}}}, "b"),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "c"}}, "c"),
        ({"config": {"eos_token_id": 7}}, 7),
        ({"generation_config": {"eos_token_id": [9, 8]}}, 9),
    ],
)
def test_eos_is_read_from_files(tmp_path, bpe, files, eos):
    HFTokenizer(bpe._file, None).save(tmp_path)
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    ids = dict(tokenizers.Tokenizer.from_str(bpe._file.decode()).get_vocab())
    assert load_tokenizer(tmp_path).eos_id == ids.get(eos, eos)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"generation_config": {"eos_token_id": [9, 8]}}, (9, 8)),
        ({"tokenizer_config": {"eos_token": "a"}, "config": {"eos_token_id": [8, 7]}}, ("a", 8, 7)),
        (
            {"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9, True, 8]}},
            (7, 9, 8),
        ),
    ],
)
def test_several_eos_ids_are_loaded_and_saved(tmp_path, bpe, files, ids):
    HFTokenizer(bpe._file, None).save(tmp_path)
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    vocab = tokenizers.Tokenizer.from_str(bpe._file.decode()).get_vocab()
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_ids == tuple(vocab.get(item, item) for item in ids)
    loaded.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").eos_ids == loaded.eos_ids


def test_truncation_in_the_file_is_ignored(bpe):
    inner = tokenizers.Tokenizer.from_str(bpe._file.decode())
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    tokenizer = HFTokenizer(inner.to_str().encode(), None)
    assert tokenizer.encode("the dog sat") == bpe.encode("the dog sat")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Provide a Hub cache without network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B"])
def test_hub_model_loads_from_cache(hub, bpe, name):
    model, commit = hub / f"models--{name.replace('/', '--')}", "0" * 40
    bpe.save(model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    assert load_tokenizer(name).fingerprint == bpe.fingerprint
    assert load_tokenizer(name).eos_id == bpe.eos_id


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "LocalEntryNotFoundError",
            r"the Hugging Face Hub cannot be reached, nor .* its cache.*`hf download org/model "
            r"tokenizer\.json tokenizer_config\.json --local-dir DIR`",
        ),
        ("OfflineModeIsEnabled", "the Hugging Face Hub cannot be reached, nor .* its cache"),
        ("GatedRepoError", r"wants you to log in \(`hf auth login`\)"),
        ("HFValidationError", r"does not give it \(what it says\)"),
    ],
)
def test_unavailable_hub_model_raises(monkeypatch, error, message):
    hub = pytest.importorskip("huggingface_hub")
    kind = getattr(pytest.importorskip("huggingface_hub.errors"), error)

    def refuse(*_, **__):
        raised = kind.__new__(kind)
        raised.args = ("what it says\nat length",)
        raise raised

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match=rf"no tokenizer at 'org/model': no such file.*{message}"):
        load_tokenizer("org/model")


def test_missing_tokenizer_error_names_source(tmp_path, hub):
    with pytest.raises(UserError, match=rf"no tokenizer at 'gpt2'.* its cache, {hub}"):
        load_tokenizer("gpt2")
    with pytest.raises(UserError, match=r"no tokenizer at 'nowhere/tokenizer\.json'.*No such file"):
        load_tokenizer("nowhere/tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json: No such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UserError, match="SentencePiece"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot use .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_damaged_adjacent_files_raise(tmp_path, bpe):
    bpe.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "<nowhere>"}')
    with pytest.raises(UserError, match="no EOS '<nowhere>'"):
        load_tokenizer(tmp_path)
    config.write_text('{"eos_tok')
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_oversized_vocabulary_is_refused():
    """The trainer would reserve memory for all of it, and abort the process."""
    with pytest.raises(
        UserError, match="1,000,000,000 is too large to be trained: give 16,777,216"
    ):
        train_bpe(["text"], 10**9)
    assert train_bpe(["text"], LARGEST_VOCAB).vocab_size < 300
