"""Text to token ids and back: bytes, a Hugging Face tokenizer file, or a BPE trained here."""

import functools
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int

from jaxforge.data.corpus.records import without_surrogates
from jaxforge.data.corpus.untrusted_tokenizer import (
    check_added,
    check_affixes,
    check_growth,
    check_ids,
    check_loads,
    is_risky,
    reraise_panics,
)
from jaxforge.errors import UserError
from jaxforge.storage.atomic_directory import write_bytes, write_json

END_OF_TEXT = "<|endoftext|>"
"""End-of-text token of tokenizers trained by `train_bpe`."""

BPE_VOCAB_SIZE = 32_768
"""Default vocabulary size of a BPE trained on 16 MB of text or more."""

LARGEST_VOCAB = 1 << 24
"""Largest vocabulary to train: the trainer aborts if it cannot reserve memory for all tokens."""

FILE_NAME = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_DIRECTORY = "additional_chat_templates"
"""Directory of templates with other names than "default": `NAME.jinja`."""

TOOL_USE = "tool_use"
"""Name of the template for conversations with tools; its key in `Tokenizer.chat`."""

ADJACENT_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json",
               "generation_config.json")  # fmt: skip
ADD_BOS = "add_bos_token"
_TRIED_TOKENS = 100
_PART_CHARACTERS = 1 << 18  # encoded at a time: an encoding takes 250 bytes per token, its ids 36
BYTE_FILE = b'{"kind": "byte"}\n'
_LETTERS = frozenset(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # one for each byte


class Tokenizer(ABC):
    """Interface of tokenizers for data preparation, generation and evaluation.

    Attributes:
        vocab_size: one more than the largest id.
        eos_id: id of the token that ends a document; None when the tokenizer names none.
        eos_ids: ids at which generation ends: `eos_id` first, then other end tokens of the model.
        bos_id: id of the BOS token; None when the tokenizer names none.
        prefix: ids that the tokenizer puts before a text, usually BOS; empty if it adds none.
        fingerprint: SHA-256 (hex) that identifies the tokenizer without its chat template.
        is_risky: True if encoding may panic or never end: encode large texts in other processes.
        chat: `chat_template`, perhaps `tool_use` (the template for conversations with tools), and
            special tokens by name (`bos_token`); empty without a template.
    """

    vocab_size: int
    eos_id: int | None
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    prefix: tuple[int, ...] = ()
    fingerprint: str
    is_risky: bool = False
    chat: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; nothing is added at its ends unless `special_tokens` are."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, in parallel where that pays."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Int[np.ndarray, "n 2"]]]:
        """Return `encode` of each text with the character range (start, end) of each id.

        Ids that share a character all have its range.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of `ids`, without special tokens, or with them as they are spelled."""

    @abstractmethod
    def byte_lengths(self) -> Int[np.ndarray, "v"] | None:
        """Return the number of UTF-8 bytes of text of each id, int32; 0 for special tokens.

        The sum over the ids of a text is `len(text.encode())`. None if ids have no fixed number of
        bytes.
        """

    def without_bos(self) -> "Tokenizer":
        """Return this tokenizer with an empty `prefix`."""
        return self

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the files for `load_tokenizer(directory)`; the fingerprint stays the same."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0-255, and 256 to end a document."""

    vocab_size = 257
    eos_id = 256
    eos_ids = (eos_id,)
    fingerprint = hashlib.sha256(BYTE_FILE).hexdigest()

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the bytes of `text`; a lone surrogate becomes U+FFFD."""
        return list(without_surrogates(text).encode())

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Int[np.ndarray, "n 2"]]]:
        """Return the bytes of each text, each with the range of its character."""
        return [(self.encode(text), self._token_offsets(text)) for text in texts]

    def _token_offsets(self, text: str) -> Int[np.ndarray, "n 2"]:
        # characters [bytes]: the index of the character that each byte belongs to.
        n_bytes = [len(character.encode()) for character in without_surrogates(text)]
        characters = np.repeat(np.arange(len(text)), n_bytes)
        return np.stack([characters, characters + 1], axis=1)

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of `ids` without EOS; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i != self.eos_id).decode("utf-8", errors="replace")

    def byte_lengths(self) -> Int[np.ndarray, "v"]:
        """Return 1 for each byte and 0 for EOS."""
        return (np.arange(self.vocab_size) != self.eos_id).astype(np.int32)

    def save(self, directory: Path) -> None:
        """Write a `tokenizer.json` that identifies the byte tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        write_bytes(directory / FILE_NAME, BYTE_FILE)


class HFTokenizer(Tokenizer):
    """Hugging Face fast tokenizer.

    As in transformers, special tokens in a text ("<|endoftext|>") become their ids. Lone
    surrogates become U+FFFD.

    Args:
        file: content of a `tokenizer.json`.
        eos: the token that ends a document, or its id.
        chat: see `Tokenizer`.
        bos: the BOS token.
        eos_ids: ids at which generation ends, in addition to `eos`.
        add_bos: put `bos` before texts if the file's post-processor does not.
        is_checked: the file was loaded before, so that no child process needs to try it.

    Raises:
        ValueError: `file` is not a tokenizer, or does not know `eos`.
    """

    def __init__(
        self,
        file: bytes,
        eos: str | int | None,
        chat: Mapping[str, str] | None = None,
        bos: str | None = None,
        eos_ids: Sequence[int] = (),
        *,
        add_bos: bool = False,
        is_checked: bool = False,
    ) -> None:
        self._file, self.chat = file, chat or {}
        # In a child process first: some files end the process that loads them.
        if not is_checked:
            check_loads(file)
        with reraise_panics(ValueError, "not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file)
        # Some files contain the truncation and padding settings of a training run.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab().values()
        # Ids may have gaps, and arrays are indexed by id: the number of tokens is too small.
        self.vocab_size = 1 + max(ids, default=-1)
        # What a file may make later texts or arrays grow to is bounded here, once.
        check_ids(self.vocab_size - 1, len(ids))
        check_affixes(self._tokenizer.model)
        parts = {"normalizer": self._tokenizer.normalizer, "decoder": self._tokenizer.decoder}
        for name, part in parts.items():
            if part is not None:
                check_growth(part.__getstate__(), name)
        self.eos_id = self._tokenizer.token_to_id(eos) if isinstance(eos, str) else eos
        if eos is not None and (self.eos_id is None or not 0 <= self.eos_id < self.vocab_size):
            raise ValueError(f"its vocabulary has no EOS {eos!r}")
        first = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids = tuple(dict.fromkeys((*first, *eos_ids)))
        self.bos_id = None if bos is None else self._tokenizer.token_to_id(bos)
        self.prefix = self._added_before_texts()
        # tokenizer_config.json may ask for a BOS that the post-processor adds already: never two.
        self._adds_bos = add_bos and self.bos_id is not None and self.bos_id not in self.prefix
        if self._adds_bos:
            self._add_bos_before_texts()
            self.prefix = self._added_before_texts()
        self.is_risky = is_risky(file)
        # Of the file: the library's serialization changes with its version.
        self.fingerprint = hashlib.sha256(file).hexdigest()

    def _added_before_texts(self) -> tuple[int, ...]:
        """Return the ids that the post-processor puts before a text."""
        count = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if not count:
            return ()
        # The text must have a token; a text outside the vocabulary may have none.
        for text in ("a", *itertools.islice(self._tokenizer.get_vocab(), _TRIED_TOKENS)):
            with _encoding():
                encoding = self._tokenizer.encode(text)
            check_added(encoding.ids, count, self.vocab_size)
            # The mask is 1 for added ids: those before the first 0 precede the text.
            if 0 in encoding.special_tokens_mask:
                return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])
        return ()

    def _add_bos_before_texts(self) -> None:
        """Extend the post-processor to put BOS before texts."""
        processors, bos = tokenizers.processors, self._token(self.bos_id)
        template = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, self.bos_id)]
        )
        # After the processor of the file, so that BOS is the outermost token.
        before = self._tokenizer.post_processor
        self._tokenizer.post_processor = (
            processors.Sequence([before, template]) if before else template
        )

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; `special_tokens` adds those of the file's post-processor."""
        with _encoding():
            return self._tokenizer.encode(
                without_surrogates(text), add_special_tokens=special_tokens
            ).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, computed on all cores."""
        ids: list[list[int]] = []
        for part in _parts(texts):
            with _encoding():
                encodings = self._tokenizer.encode_batch_fast(
                    [without_surrogates(text) for text in part], add_special_tokens=False
                )
            ids += [encoding.ids for encoding in encodings]
        return ids

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Int[np.ndarray, "n 2"]]]:
        """Return `encode` of each text with the character range of each id, on all cores."""
        with _encoding():
            # Not `encode_batch_fast`, which does not track offsets.
            encodings = self._without_post_processor.encode_batch(
                [without_surrogates(text) for text in texts], add_special_tokens=False
            )
        return [(e.ids, np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    @functools.cached_property
    def _without_post_processor(self) -> tokenizers.Tokenizer:
        """Tokenizer without the post-processor, which removes spaces from the offsets."""
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.post_processor = None
        return tokenizer

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of `ids`, without special tokens, or with them as they are spelled."""
        with _encoding():
            return self._tokenizer.decode(list(ids), skip_special_tokens=not special_tokens)

    def byte_lengths(self) -> Int[np.ndarray, "v"] | None:
        """Return the bytes of each id if the decoder is byte-level, else None.

        Byte-level tokens have one letter per byte; added tokens are plain text. The bytes are those
        of the text after Unicode normalisation and prefix spaces, which may differ slightly from
        the file.
        """
        # With other decoders, the bytes of a token depend on its neighbours.
        decoder = json.loads(self._file).get("decoder") or {}
        if "ByteLevel" not in [part.get("type") for part in decoder.get("decoders", [decoder])]:
            return None
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, i in self._tokenizer.get_vocab().items():
            lengths[i] = len(token) if _LETTERS.issuperset(token) else len(token.encode())
        for i, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[i] = 0 if added.special else len(added.content.encode())
        # A file need not mark EOS or BOS as special, but they are never text.
        lengths[[i for i in (self.eos_id, *self.prefix) if i is not None]] = 0
        return lengths

    def without_bos(self) -> "HFTokenizer":
        """Return this tokenizer without a post-processor, so that no reader of its file adds BOS.

        The fingerprint differs, because the same text has other ids.
        """
        if not self.prefix:
            return self
        file = self._file
        # A BOS that this class has added is not in the file.
        if not self._adds_bos:
            document = {**json.loads(file), "post_processor": None}
            file = json.dumps(document, ensure_ascii=False).encode()
        return HFTokenizer(file, self.eos_id, self.chat, self._token(self.bos_id), self.eos_ids)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` unchanged, and the other files that `load_tokenizer` reads.

        These are `tokenizer_config.json` with EOS, BOS and `chat`, and for several `eos_ids`
        `generation_config.json`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        # The bytes as they were read: the fingerprint is their hash.
        write_bytes(directory / FILE_NAME, self._file)
        settings: dict[str, Any] = {**self.chat, "eos_token": self._token(self.eos_id)}
        if tool_use := settings.pop(TOOL_USE, None):
            # The form in which transformers writes several templates.
            settings["chat_template"] = [
                {"name": "default", "template": self.chat["chat_template"]},
                {"name": TOOL_USE, "template": tool_use},
            ]
        if self.bos_id is not None:
            settings["bos_token"] = self._token(self.bos_id)
        if self._adds_bos:
            settings[ADD_BOS] = True
        write_bytes(directory / ADJACENT_FILES[0], json.dumps(settings).encode() + b"\n")
        # tokenizer_config.json has room for a single EOS.
        if len(self.eos_ids) > 1:
            write_json(directory / ADJACENT_FILES[3], {"eos_token_id": list(self.eos_ids)})

    def _token(self, i: int | None) -> str | None:
        return None if i is None else self._tokenizer.id_to_token(i)


def _encoding() -> AbstractContextManager[None]:
    advice = "correct its tokenizer.json, or use another"
    return reraise_panics(UserError, "the tokenizer fails on a text", advice)


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield texts in parts of `_PART_CHARACTERS`, or of a single longer text."""
    part: list[str] = []
    size = 0
    for text in texts:
        if part and size + len(text) > _PART_CHARACTERS:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def with_prefix(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the ids of a text after `Tokenizer.prefix`, unless they begin with it already."""
    prefix = list(tokenizer.prefix)
    return list(ids) if list(ids[: len(prefix)]) == prefix else [*prefix, *ids]


def identity(tokenizer: Tokenizer) -> tuple[str | int, ...]:
    """Return the fingerprint and the prefix, on which the tokens of a document depend."""
    return tokenizer.fingerprint, *tokenizer.prefix


def train_bpe(texts: Iterable[str], vocab_size: int) -> HFTokenizer:
    """Train a byte-level BPE; `END_OF_TEXT`, id 0, ends documents.

    Args:
        texts: texts, read once as a stream.
        vocab_size: number of ids; the result has fewer if the texts have too few pairs to merge.

    Raises:
        UserError: `vocab_size` cannot hold the 256 bytes and EOS, or is beyond `LARGEST_VOCAB`.
    """
    if vocab_size < 257:
        raise UserError(f"a vocabulary of {vocab_size} cannot hold 256 bytes and EOS: give 257+")
    if vocab_size > LARGEST_VOCAB:
        raise UserError(
            f"a vocabulary of {vocab_size:,} is too large to be trained: give {LARGEST_VOCAB:,} at "
            "most; those in use have 30,000 to 260,000"
        )
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    # A prefix space would be part of the decoded text.
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes, also those that these texts lack: any text can be encoded.
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return HFTokenizer(bpe.to_str().encode(), END_OF_TEXT)
