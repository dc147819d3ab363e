"""Text to token ids and back: bytes, a Hugging Face tokenizer file, or a BPE trained here."""

import functools
import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int

from jaxforge.config.data import DataConfig
from jaxforge.data.corpus.untrusted_tokenizer import check_ids, check_loads, is_risky, panics_as
from jaxforge.errors import UserError
from jaxforge.storage import urls

END_OF_TEXT = "<|endoftext|>"
"""End-of-text token of the tokenizers that `train_bpe` makes."""

BPE_VOCAB_SIZE = 32_768
"""Default vocabulary size of a BPE trained on 16 MB of text or more."""

LARGEST_VOCAB = 1 << 24
"""The trainer reserves memory for as many tokens as it is asked for, and aborts for want of it."""

_FILE_NAME = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
_NEIGHBOURS = ("tokenizer_config.json", "special_tokens_map.json", "config.json",
               "generation_config.json")  # fmt: skip
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_ADD_BOS = "add_bos_token"
_TRIED_TOKENS = 100
_BYTE_FILE = b'{"kind": "byte"}\n'
_LETTERS = frozenset(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # one for each byte


class Tokenizer(ABC):
    """Interface of tokenizers for data preparation, generation and evaluation.

    Attributes:
        vocab_size: one more than the largest id.
        eos_id: id of the token that ends a document; None when the tokenizer names none.
        eos_ids: ids at which generation ends: `eos_id` first, then others that a model may end
            with.
        bos_id: id of the token that texts begin with elsewhere; None when the tokenizer names none.
        prefix: ids that the tokenizer puts before a text, usually BOS; empty if it adds none.
        fingerprint: sha256 (hex) that tells this tokenizer from others, whatever its chat template.
        is_risky: encoding may panic or never end, so that large texts belong into other processes.
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
    def encode_with_places(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Int[np.ndarray, "n 2"]]]:
        """Return `encode` of each text and the place of each id: first character, one after last.

        Ids that share a character all stand there.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of `ids`, without special tokens, or with them as they are spelled."""

    @abstractmethod
    def byte_lengths(self) -> Int[np.ndarray, "v"] | None:
        """Return the UTF-8 bytes of text that each id stands for, int32; 0 for special tokens.

        Over the ids of a text they sum to `len(text.encode())`. None where ids have no fixed
        number of bytes.
        """

    def without_bos(self) -> "Tokenizer":
        """Return this tokenizer with an empty `prefix`."""
        return self

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write what `load_tokenizer(directory)` needs; the fingerprint stays the same."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0-255, and 256 to end a document."""

    vocab_size = 257
    eos_id = 256
    eos_ids = (eos_id,)
    fingerprint = hashlib.sha256(_BYTE_FILE).hexdigest()

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Bytes of `text`; a lone surrogate, which has none, counts as "?"."""
        return list(text.encode("utf-8", errors="replace"))

    def encode_with_places(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Int[np.ndarray, "n 2"]]]:
        """Bytes of each text, each at its character."""
        return [(self.encode(text), self._token_offsets(text)) for text in texts]

    def _token_offsets(self, text: str) -> Int[np.ndarray, "n 2"]:
        n_bytes = [len(character.encode("utf-8", errors="replace")) for character in text]
        characters = np.repeat(np.arange(len(text)), n_bytes)
        return np.stack([characters, characters + 1], axis=1)

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of `ids`: EOS has no spelling, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i != self.eos_id).decode("utf-8", errors="replace")

    def byte_lengths(self) -> Int[np.ndarray, "v"]:
        """One for each byte."""
        return (np.arange(self.vocab_size) != self.eos_id).astype(np.int32)

    def save(self, directory: Path) -> None:
        """Writes a `tokenizer.json` that says no more than "bytes"."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _FILE_NAME).write_bytes(_BYTE_FILE)


class HFTokenizer(Tokenizer):
    """Hugging Face fast tokenizer.

    As with transformers, special tokens spelled out in a text ("<|endoftext|>") become their ids.

    Args:
        file: content of a `tokenizer.json`.
        eos: the token that ends a document, or its id.
        chat: as of `Tokenizer`.
        bos: the token that texts begin with elsewhere.
        eos_ids: ids at which generation ends, in addition to that of `eos`.
        add_bos: put `bos` before texts where the file's post-processor does not.
        is_checked: the file has been loaded before, so that no child needs to try.

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
        with panics_as(ValueError, "not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file)
        # Some files carry the cuts and the filling of the run that made them.
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
        # Of the file and not of the library's rewriting of it, which changes with its version.
        self.fingerprint = hashlib.sha256(file).hexdigest()

    def _added_before_texts(self) -> tuple[int, ...]:
        """Return the ids that the post-processor puts before a text."""
        if not self._tokenizer.num_special_tokens_to_add(is_pair=False):
            return ()
        # A text is needed that has a token: one that the vocabulary lacks may have none.
        for text in ("a", *itertools.islice(self._tokenizer.get_vocab(), _TRIED_TOKENS)):
            with _encoding():
                encoding = self._tokenizer.encode(text)
            if 0 in encoding.special_tokens_mask:
                return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])
        return ()

    def _add_bos_before_texts(self) -> None:
        """Extend the post-processor by BOS before texts."""
        processors, bos = tokenizers.processors, self._token(self.bos_id)
        template = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, self.bos_id)]
        )
        before = self._tokenizer.post_processor
        self._tokenizer.post_processor = (
            processors.Sequence([before, template]) if before else template
        )

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Ids of `text`, with `special_tokens` those that the file's post-processor adds, too."""
        with _encoding():
            return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        with _encoding():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_places(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], Int[np.ndarray, "n 2"]]]:
        """`encode` of each text, on all cores, and where in it each id stands."""
        with _encoding():
            encodings = self._whole.encode_batch(list(texts), add_special_tokens=False)
        return [(e.ids, np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    @functools.cached_property
    def _whole(self) -> tokenizers.Tokenizer:
        """Without the post-processor, which leaves spaces out of the places."""
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.post_processor = None
        return tokenizer

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of `ids`, without special tokens, or with them as they are spelled."""
        with _encoding():
            return self._tokenizer.decode(list(ids), skip_special_tokens=not special_tokens)

    def byte_lengths(self) -> Int[np.ndarray, "v"] | None:
        """Bytes of each id, where a byte-level decoder turns tokens into text; else None.

        Such tokens are spelled with one letter a byte, but for those added to the vocabulary, which
        are spelled as they are. Bytes are those of the text that the tokenizer sees: with Unicode
        normalisation, or with a space put in front of each text, not quite those of the file.
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

        The fingerprint differs, as the same text has other ids.
        """
        if not self.prefix:
            return self
        file = self._file
        if not self._adds_bos:
            document = {**json.loads(file), "post_processor": None}
            file = json.dumps(document, ensure_ascii=False).encode()
        return HFTokenizer(file, self.eos_id, self.chat, self._token(self.bos_id), self.eos_ids)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` byte for byte, and the other files that `load_tokenizer` reads.

        That is a `tokenizer_config.json` with EOS, BOS and `chat`; with several `eos_ids`, a
        `generation_config.json`, too.
        """
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _FILE_NAME).write_bytes(self._file)
        settings: dict[str, Any] = {**self.chat, "eos_token": self._token(self.eos_id)}
        if self.bos_id is not None:
            settings["bos_token"] = self._token(self.bos_id)
        if self._adds_bos:
            settings[_ADD_BOS] = True
        (directory / _NEIGHBOURS[0]).write_text(json.dumps(settings) + "\n")
        if len(self.eos_ids) > 1:
            generation = {"eos_token_id": list(self.eos_ids)}
            (directory / _NEIGHBOURS[3]).write_text(json.dumps(generation) + "\n")

    def _token(self, i: int | None) -> str | None:
        return None if i is None else self._tokenizer.id_to_token(i)


def _encoding() -> AbstractContextManager[None]:
    advice = "correct its tokenizer.json, or use another"
    return panics_as(UserError, "the tokenizer fails on a text", advice)


def with_prefix(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the ids of a text after `Tokenizer.prefix`, unless they begin with it already."""
    prefix = list(tokenizer.prefix)
    return list(ids) if list(ids[: len(prefix)]) == prefix else [*prefix, *ids]


def identity(tokenizer: Tokenizer) -> tuple[str | int, ...]:
    """Return what the tokens of a document depend on: the fingerprint, and ids put before it."""
    return tokenizer.fingerprint, *tokenizer.prefix


def train_bpe(texts: Iterable[str], vocab_size: int) -> HFTokenizer:
    """Trains a byte-level BPE; `END_OF_TEXT`, id 0, ends documents.

    Args:
        texts: read once, as a stream.
        vocab_size: ids to end up with; fewer when the texts hold too few pairs to merge.

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


def tokenizer_of(config: DataConfig) -> str | Path | None:
    """Return `data.tokenizer_path`, else the tokenizer stored with the shards."""
    if config.tokenizer_path:
        return config.tokenizer_path
    shards = [source.path for source in config.datasets] or [config.dataset_path]
    beside = [urls.path(path).parent / "tokenizer" for path in shards if path]
    return next((directory for directory in beside if directory.is_dir()), None)


def load_tokenizer(spec: str | Path, *, is_checked: bool = False) -> Tokenizer:
    """Load a tokenizer from this machine or from the Hugging Face Hub.

    Args:
        spec: "byte", a `tokenizer.json`, the directory of one, or, where neither is there, a model
            of the Hub, from its cache or the network. EOS is what the files next to it say:
            tokenizer_config.json, special_tokens_map.json, config.json or generation_config.json,
            in this order; generation also ends at every id that generation_config.json names, or
            else config.json. BOS is put before texts by the post-processor of `tokenizer.json` or
            "add_bos_token" of tokenizer_config.json. The chat template is chat_template.jinja, or
            what the first of them says.
        is_checked: as of `HFTokenizer`.

    Raises:
        UserError: there is no such file or model, or it is not a tokenizer.
    """
    if spec == "byte":
        return ByteTokenizer()
    path = urls.path(spec, "tokenizer")
    if _HUB_NAME.fullmatch(str(spec)) and path.suffix != ".json" and not path.exists():
        path = _of_hub(str(spec))
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
        eos, bos = _eos_beside(path.parent), _token_beside(path.parent, "bos_token")
        add_bos = _json(path.parent / _NEIGHBOURS[0]).get(_ADD_BOS) is True
        # As transformers ends a text.
        eos_ids = _eos_ids_in(path.parent / _NEIGHBOURS[3])
        eos_ids = eos_ids or _eos_ids_in(path.parent / _NEIGHBOURS[2])
        chat = _chat_beside(path.parent)
        return HFTokenizer(file, eos, chat, bos, eos_ids, add_bos=add_bos, is_checked=is_checked)
    except ValueError as error:
        raise UserError(f"cannot use {path}: {error}") from error


def _of_hub(name: str) -> Path:
    """Return the directory of a model's tokenizer in the Hub's cache; fetch it if it is missing."""
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[_FILE_NAME, _TEMPLATE, *_NEIGHBOURS]))
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        why = (
            f"cannot be reached, nor is it in its cache, {constants.HF_HUB_CACHE}; where there is "
            f"a network, `hf download {name} {_FILE_NAME} {_NEIGHBOURS[0]} --local-dir DIR` gives "
            "a directory to copy here and to name instead"
        )
    except errors.RepositoryNotFoundError:
        why = "has no such model, or wants you to log in (`hf auth login`) and accept its terms"
    except (OSError, ValueError) as error:
        why = f"does not give it ({str(error).splitlines()[0]})"
    raise UserError(
        f"no tokenizer at {name!r}: no such file or directory, and the Hugging Face Hub {why}; "
        f'give "byte", a {_FILE_NAME}, the directory of one, or a model of the Hub'
    )


def _eos_beside(directory: Path) -> str | int | None:
    """Return the EOS token or id that the files next to a `tokenizer.json` name."""
    if (token := _token_beside(directory, "eos_token")) is not None:
        return token
    for name in _NEIGHBOURS[2:]:
        if ids := _eos_ids_in(directory / name):
            return ids[0]
    return None


def _eos_ids_in(path: Path) -> list[int]:
    ids = _json(path).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return [id_ for id_ in listed if type(id_) is int]


def _token_beside(directory: Path, key: str) -> str | None:
    """Return a special token by its key in the files next to a `tokenizer.json`."""
    for name in _NEIGHBOURS[:2]:
        token = _json(directory / name).get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _chat_beside(directory: Path) -> dict[str, str]:
    """Return `Tokenizer.chat` from the files next to a `tokenizer.json`."""
    settings = _json(directory / _NEIGHBOURS[1]) | _json(directory / _NEIGHBOURS[0])
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        if not all(isinstance(named, dict) and named.get("name") for named in template):
            raise UserError(
                f"cannot use {directory}: chat_template of {_NEIGHBOURS[0]} must be a text, or a "
                'list of objects with "name" and "template"'
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
    """The object in a JSON file; empty where there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return value if isinstance(value, dict) else {}
