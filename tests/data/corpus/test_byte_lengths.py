"""Bytes of each token: over the tokens of a text they sum to the bytes of the text."""

import json
import random

import pytest
import tokenizers

from jaxforge.data.corpus.tokenizer import ByteTokenizer, HFTokenizer, train_bpe

CORPUS = ["the cat sat on the mat\n", "Ümlaute, 日本語, 🎉: the dog sat on the cat\n"] * 20
SPECIAL = tokenizers.AddedToken("<|pad|>", special=True)
PLAIN = tokenizers.AddedToken("→ß", special=False)


def bpe():
    inner = tokenizers.Tokenizer.from_str(train_bpe(CORPUS, 400)._file.decode())
    inner.add_special_tokens([SPECIAL])
    inner.add_tokens([PLAIN])
    return HFTokenizer(inner.to_str().encode(), "<|endoftext|>")


def in_a_sequence():
    file = json.loads(bpe()._file)
    file["decoder"] = {"type": "Sequence", "decoders": [file["decoder"], {"type": "Fuse"}]}
    return HFTokenizer(json.dumps(file).encode(), "<|endoftext|>")


def random_text(seed):
    rng = random.Random(seed)
    points = (rng.choice((rng.randrange(128), rng.randrange(0xE000, 0x110000))) for _ in range(99))
    return "".join(map(chr, points))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), bpe(), in_a_sequence()], ids=type)
def test_byte_lengths_sum_to_the_text(tokenizer):
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,)
    for text in [*CORPUS[:2], "a→ßb", "", *map(random_text, range(20))]:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert lengths[tokenizer.eos_id] == 0


def test_special_tokens_have_no_bytes():
    tokenizer = bpe()
    ids = tokenizer.encode("the<|pad|>cat<|endoftext|>")
    assert tokenizer.byte_lengths()[ids].sum() == len("thecat")


def test_other_tokenizers_have_no_fixed_lengths():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert HFTokenizer(inner.to_str().encode(), None).byte_lengths() is None
    inner.decoder = tokenizers.decoders.WordPiece()
    assert HFTokenizer(inner.to_str().encode(), None).byte_lengths() is None
