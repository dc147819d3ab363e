"""Text to token ids and back: bytes, a Hugging Face tokenizer file, or a BPE trained here."""

import functools
import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from jaxtyping import Int

from jaxforge.data.corpus.untrusted_tokenizer import (
    check_ids,
    check_loads,
    is_risky,
    reraise_panics,
)
from jaxforge.errors import UserError
from jaxforge.storage import urls

if TYPE_CHECKING:  # importing it takes longer than all else that a worker of `prepare` imports
    from jaxforge.config.data import DataConfig

END_OF_TEXT = "<|endoftext|>"
"""End-of-text token of tokenizers trained by `train_bpe`."""

BPE_VOCAB_SIZE = 32_768
"""Default vocabulary size of a BPE trained on 16 MB of text or more."""

LARGEST_VOCAB = 1 << 24
"""Largest vocabulary to train: the trainer aborts if it cannot reserve memory for all tokens."""

_FILE_NAME = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
_ADJACENT_FILES = ("tokenizer_config.json", "special_tokens_map.json", "config.json",
               "generation_config.json")  # fmt: skip
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ADD_BOS = "add_bos_token"
_TRIED_TOKENS = 100
_PART_CHARACTERS = 1 << 18  # encoded at a time: an encoding takes 250 bytes per token, its ids 36
_BYTE_FILE = b'{"kind": "byte"}\n'
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
        chat: `chat_template`, and special tokens by name (`bos_token`); empty without a template.
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
    fingerprint = hashlib.sha256(_BYTE_FILE).hexdigest()

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the bytes of `text`; a lone surrogate becomes "?"."""
        return list(text.encode("utf-8", errors="replace"))

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Int[np.ndarray, "n 2"]]]:
        """Return the bytes of each text, each with the range of its character."""
        return [(self.encode(text), self._token_offsets(text)) for text in texts]

    def _token_offsets(self, text: str) -> Int[np.ndarray, "n 2"]:
        n_bytes = [len(character.encode("utf-8", errors="replace")) for character in text]
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
        (directory / _FILE_NAME).write_bytes(_BYTE_FILE)


class HFTokenizer(Tokenizer):
    """Hugging Face fast tokenizer.

    As in transformers, special tokens in a text ("<|endoftext|>") become their ids.

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
        if not is_checked:
            check_loads(file)
        with reraise_panics(ValueError, "not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file)
        # Some files contain the truncation and padding settings of a training run.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab().values()
        self.vocab_size = 1 + max(ids, default=-1)
        check_ids(self.vocab_size - 1, len(ids))
        self.eos_id = self._tokenizer.token_to_id(eos) if isinstance(eos, str) else eos
        if eos is not None and (self.eos_id is None or not 0 <= self.eos_id < self.vocab_size):
            raise ValueError(f"its vocabulary has no EOS {eos!r}")
        first = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids = tuple(dict.fromkeys((*first, *eos_ids)))
        self.bos_id = None if bos is None else self._tokenizer.token_to_id(bos)
        self.prefix = self._added_before_texts()
        self._adds_bos = add_bos and self.bos_id is not None and self.bos_id not in self.prefix
        if self._adds_bos:
            self._add_bos_before_texts()
            self.prefix = self._added_before_texts()
        self.is_risky = is_risky(file)
        # Of the file: the library's serialization changes with its version.
        self.fingerprint = hashlib.sha256(file).hexdigest()

    def _added_before_texts(self) -> tuple[int, ...]:
        """Return the ids that the post-processor puts before a text."""
        if not self._tokenizer.num_special_tokens_to_add(is_pair=False):
            return ()
        # The text must have a token; a text outside the vocabulary may have none.
        for text in ("a", *itertools.islice(self._tokenizer.get_vocab(), _TRIED_TOKENS)):
            with _encoding():
                encoding = self._tokenizer.encode(text)
            if 0 in encoding.special_tokens_mask:
                return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])
        return ()

    def _add_bos_before_texts(self) -> None:
        """Extend the post-processor to put BOS before texts."""
        processors, bos = tokenizers.processors, self._token(self.bos_id)
        template = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, self.bos_id)]
        )
        before = self._tokenizer.post_processor
        self._tokenizer.post_processor = (
            processors.Sequence([before, template]) if before else template
        )

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`; `special_tokens` adds those of the file's post-processor."""
        with _encoding():
            return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, computed on all cores."""
        ids: list[list[int]] = []
        for part in _parts(texts):
            with _encoding():
                encodings = self._tokenizer.encode_batch_fast(part, add_special_tokens=False)
            ids += [encoding.ids for encoding in encodings]
        return ids

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Int[np.ndarray, "n 2"]]]:
        """Return `encode` of each text with the character range of each id, on all cores."""
        with _encoding():
            encodings = self._without_post_processor.encode_batch(
                list(texts), add_special_tokens=False
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
        decoder = json.loads(self._file).get("decoder") or {}
        if "ByteLevel" not in [part.get("type") for part in decoder.get("decoders", [decoder])]:
            return None
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, i in self._tokenizer.get_vocab().items():
            lengths[i] = len(token) if _LETTERS.issuperset(token) else len(token.encode())
        for i, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[i] = 0 if added.special else len(added.content.encode())
        lengths[[i for i in (self.eos_id, *self.prefix) if i is not None]] = 0
        return lengths

    def without_bos(self) -> "HFTokenizer":
        """Return this tokenizer without a post-processor, so that no reader of its file adds BOS.

        The fingerprint differs, because the same text has other ids.
        """
        if not self.prefix:
            return self
        file = self._file
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
        (directory / _FILE_NAME).write_bytes(self._file)
        settings: dict[str, Any] = {**self.chat, "eos_token": self._token(self.eos_id)}
        if self.bos_id is not None:
            settings["bos_token"] = self._token(self.bos_id)
        if self._adds_bos:
            settings[_ADD_BOS] = True
        (directory / _ADJACENT_FILES[0]).write_text(json.dumps(settings) + "\n")
        if len(self.eos_ids) > 1:
            generation = {"eos_token_id": list(self.eos_ids)}
            (directory / _ADJACENT_FILES[3]).write_text(json.dumps(generation) + "\n")

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
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return HFTokenizer(bpe.to_str().encode(), END_OF_TEXT)


def tokenizer_of(config: "DataConfig") -> str | Path | None:
    """Return `data.tokenizer_path`, else the tokenizer stored with the shards."""
    if config.tokenizer_path:
        return config.tokenizer_path
    shards = [source.path for source in config.datasets] or [config.dataset_path]
    beside = [urls.path(path).parent / "tokenizer" for path in shards if path]
    return next((directory for directory in beside if directory.is_dir()), None)


def load_tokenizer(spec: str | Path, *, is_checked: bool = False) -> Tokenizer:
    """Load a tokenizer from this machine or from the Hugging Face Hub.

    Args:
        spec: "byte", a `tokenizer.json`, its directory, or else a model of the Hub, from cache or
            network. EOS comes from the first of tokenizer_config.json, special_tokens_map.json,
            config.json and generation_config.json next to `tokenizer.json`. Generation also ends
            at every id in generation_config.json, or else config.json. BOS is put before texts by
            the post-processor of `tokenizer.json` or "add_bos_token" of tokenizer_config.json.
            The chat template is chat_template.jinja, or else that of tokenizer_config.json.
        is_checked: see `HFTokenizer`.

    Raises:
        UserError: the file or model does not exist, or is not a tokenizer.
    """
    if spec == "byte":
        return ByteTokenizer()
    path = urls.path(spec, "tokenizer")
    if _HUB_NAME.fullmatch(str(spec)) and path.suffix != ".json" and not path.exists():
        path = _download(str(spec))
    path = path / _FILE_NAME if path.is_dir() else path
    try:
        file = path.read_bytes()
    except OSError as error:
        advice = f'give "byte", a {_FILE_NAME}, the directory of one, or a model of the Hub'
        if (path.parent / "tokenizer.model").exists():
            advice = f"tokenizer.model (SentencePiece) must be converted to {_FILE_NAME} first"
        message = f"no tokenizer at {str(spec)!r}: {path}: {error.strerror}; {advice}"
        raise UserError(message) from error
    if file == _BYTE_FILE:
        return ByteTokenizer()
    try:
        eos, bos = _adjacent_eos(path.parent), _adjacent_token(path.parent, "bos_token")
        add_bos = _json(path.parent / _ADJACENT_FILES[0]).get(_ADD_BOS) is True
        # As transformers ends a text.
        eos_ids = _eos_ids_in(path.parent / _ADJACENT_FILES[3])
        eos_ids = eos_ids or _eos_ids_in(path.parent / _ADJACENT_FILES[2])
        chat = _adjacent_chat(path.parent)
        return HFTokenizer(file, eos, chat, bos, eos_ids, add_bos=add_bos, is_checked=is_checked)
    except ValueError as error:
        raise UserError(f"cannot use {path}: {error}") from error


def _download(name: str) -> Path:
    """Return the directory of a model's tokenizer in the Hub's cache; fetch it if it is missing."""
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=[_FILE_NAME, _TEMPLATE, *_ADJACENT_FILES])
        )
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = (
            f"cannot be reached, nor is it in its cache, {constants.HF_HUB_CACHE}; where there is "
            f"a network, `hf download {name} {_FILE_NAME} {_ADJACENT_FILES[0]} --local-dir DIR` "
            "gives a directory to copy here and to name instead"
        )
    except errors.RepositoryNotFoundError:
        why = "has no such model, or wants you to log in (`hf auth login`) and accept its terms"
    except (OSError, ValueError) as error:
        why = f"does not give it ({str(error).splitlines()[0]})"
    raise UserError(
        f"no tokenizer at {name!r}: no such file or directory, and the Hugging Face Hub {why}; "
        f'give "byte", a {_FILE_NAME}, the directory of one, or a model of the Hub'
    )


def _adjacent_eos(directory: Path) -> str | int | None:
    """Return the EOS token or id that the files next to a `tokenizer.json` name."""
    if (token := _adjacent_token(directory, "eos_token")) is not None:
        return token
    for name in _ADJACENT_FILES[2:]:
        if ids := _eos_ids_in(directory / name):
            return ids[0]
    return None


def _eos_ids_in(path: Path) -> list[int]:
    ids = _json(path).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return [id_ for id_ in listed if type(id_) is int]


def _adjacent_token(directory: Path, key: str) -> str | None:
    """Return a special token by its key in the files next to a `tokenizer.json`."""
    for name in _ADJACENT_FILES[:2]:
        token = _json(directory / name).get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _adjacent_chat(directory: Path) -> dict[str, str]:
    """Return `Tokenizer.chat` from the files next to a `tokenizer.json`."""
    settings = _json(directory / _ADJACENT_FILES[1]) | _json(directory / _ADJACENT_FILES[0])
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        if not all(isinstance(named, dict) and named.get("name") for named in template):
            raise UserError(
                f"cannot use {directory}: chat_template of {_ADJACENT_FILES[0]} must be a text, or "
                'a list of objects with "name" and "template"'
            )
        template = {str(named["name"]): named.get("template") for named in template}
    if isinstance(template, dict):
        template = template.get("default")
    if (directory / _TEMPLATE).exists():
        template = (directory / _TEMPLATE).read_text("utf-8")
    if not isinstance(template, str):
        return {}
    tokens = {name: token.get("content") if isinstance(token, dict) else token
              for name, token in settings.items() if name.endswith("_token")}  # fmt: skip
    texts = {name: token for name, token in tokens.items() if isinstance(token, str)}
    return {**texts, "chat_template": template}


def _json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; return {} if the file does not exist."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}
