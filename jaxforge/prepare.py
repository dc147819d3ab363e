"""Text files in, token shards out: `python -m jaxforge.prepare INPUT... --output DIR`.

INPUT ─► documents ─► pieces ─► tokens + EOS ─► .DIR.partial/{train,validation}/shard_*.npy
         (files)      of text                   .DIR.partial/tokenizer/
                                                     │ rename, when all is written
                                                     ▼
                                                    DIR
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Int
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from jaxforge.data.documents import Document, Piece, find_documents, first_bytes, pieces, shuffled
from jaxforge.data.manifest import FILE_NAME
from jaxforge.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from jaxforge.data.writer import ShardWriter
from jaxforge.errors import UserError

_BPE_VOCAB_SIZE = 32_768
_BATCH_BYTES = 8 << 20  # of text that a tokenizer gets at a time, to encode in parallel
_BATCH_PIECES = 4096
_LINE_SECONDS = 10.0  # between lines of progress where there is no terminal


@dataclass
class Split:
    """What is becoming of "train" or "validation".

    Attributes:
        writer: its shards.
        size: bytes of text.
        broken: names of documents that were not UTF-8.
    """

    writer: ShardWriter
    size: int = 0
    broken: set[str] = field(default_factory=set)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; all of DIR is written, or nothing.

    Args:
        argv: arguments; by default the process's.

    Returns:
        0.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used.
        SystemExit: wrong arguments (code 2), or `--help`.
    """
    args = _parse(argv)
    documents = _documents(args)
    with staged(args.output, args.overwrite) as partial:
        training = (document for document in documents if document.split == "train")
        texts = (piece.text for piece in pieces(training, args.max_bytes))
        tokenizer = _tokenizer(args.tokenizer, args.vocab_size, texts)
        tokenizer.save(partial / "tokenizer")
        splits = _write(args, documents, tokenizer, partial)
    print(_summary(splits, tokenizer), end="\n\n")
    print(_settings(args.output.absolute(), splits, tokenizer.vocab_size, args.format))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxforge.prepare",
        description="Turns text files into token shards for training. Each file is a document and "
        "is ended by the tokenizer's end-of-text token; empty files are left out.",
    )
    for names, options in _ARGUMENTS.items():
        parser.add_argument(*names.split(), **options)
    args = parser.parse_args(argv)
    if args.vocab_size and args.tokenizer != "bpe":
        parser.error("--vocab-size goes with --tokenizer bpe; the others have their own")
    return args


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _fraction(text: str) -> float:
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 0 and below 1")
    return number


_ARGUMENTS: dict[str, dict] = {
    "input": {
        "nargs": "+",
        "type": Path,
        "metavar": "INPUT",
        "help": "text files and directories",
    },
    "--output": {"required": True, "type": Path, "metavar": "DIR", "help": "directory to make"},
    "--overwrite": {"action": "store_true", "help": "replace what an earlier run left in DIR"},
    "--glob": {
        "default": "*.txt,*.md,*.py",
        "help": "file names to take from directories, separated by commas (default: %(default)s)",
    },
    "--exclude": {
        "action": "append",
        "default": [],
        "metavar": "GLOB",
        "help": "paths below INPUT to leave out; may be repeated",
    },
    "--tokenizer": {
        "default": "byte",
        "metavar": "byte|bpe|PATH",
        "help": "UTF-8 bytes (the default); a byte-level BPE trained on the training documents; "
        "or a tokenizer.json or its directory",
    },
    "--vocab-size": {
        "type": _positive,
        "metavar": "N",
        "help": f"of --tokenizer bpe (default: {_BPE_VOCAB_SIZE})",
    },
    "--format": {"choices": ("npy", "bin"), "default": "npy", "help": "of shards (default: npy)"},
    "--dtype": {"choices": ("uint16", "uint32"), "help": "of tokens (default: the smallest)"},
    "--shard-tokens": {
        "type": _positive,
        "default": 100_000_000,
        "metavar": "N",
        "help": "tokens per shard (default: %(default)s)",
    },
    "--validation-fraction": {
        "type": _fraction,
        "default": 0.0,
        "metavar": "F",
        "help": "part of the documents to put into DIR/validation, chosen by a hash of their "
        "paths (default: none)",
    },
    "--shuffle-documents": {
        "type": int,
        "metavar": "SEED",
        "help": "take documents in random order, not sorted by path",
    },
    "--max-bytes": {"type": _positive, "metavar": "N", "help": "stop after so much text"},
}


def _documents(args: argparse.Namespace) -> list[Document]:
    """The documents to read, in order, no split of them empty."""
    documents = find_documents(
        args.input, args.glob.split(","), args.exclude, args.validation_fraction
    )
    if args.shuffle_documents is not None:
        documents = shuffled(documents, args.shuffle_documents)
    documents = first_bytes(documents, args.max_bytes)
    held_out = sum(document.split == "validation" for document in documents)
    if held_out == len(documents) or (args.validation_fraction and not held_out):
        raise UserError(
            f"--validation-fraction {args.validation_fraction} puts {held_out} of "
            f"{len(documents)} documents into validation; change it, or split the text into more "
            "files"
        )
    return documents


def _tokenizer(spec: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer asked for; only a BPE reads `texts`."""
    if spec == "bpe":
        Console(stderr=True).print("training the BPE tokenizer …")
        return train_bpe(texts, vocab_size or _BPE_VOCAB_SIZE)
    tokenizer = load_tokenizer(spec)
    if tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer {spec} names no end-of-text token for documents to end with; put a "
            'tokenizer_config.json with "eos_token" beside its tokenizer.json'
        )
    return tokenizer


def token_dtype(name: str | None, vocab_size: int) -> str:
    """Type of tokens on disk: `name`, or the smaller of uint16 and uint32 that will do.

    Raises:
        UserError: `name` does not hold the vocabulary.
    """
    smallest = "uint16" if vocab_size <= 2**16 else "uint32"
    if name and np.iinfo(name).max < vocab_size - 1:
        raise UserError(f"--dtype {name} cannot hold a vocabulary of {vocab_size}; use {smallest}")
    return name or smallest


@contextmanager
def staged(output: Path, overwrite: bool = False) -> Iterator[Path]:
    """A directory beside `output` that takes its place if all goes well, and else is removed.

    What a killed run has left is removed first.

    Args:
        output: the directory to make.
        overwrite: `output` may exist, if this program made it.

    Raises:
        UserError: `output` exists and is not to be overwritten, or cannot be written.
    """
    output = output.absolute()
    if output.exists() and not overwrite:
        raise UserError(f"{output} exists; choose another --output or pass --overwrite")
    if output.exists() and not (output / "train" / FILE_NAME).exists():
        raise UserError(f"{output} was not made by jaxforge.prepare; remove it yourself")
    partial, old = (output.with_name(f".{output.name}.{end}") for end in ("partial", "old"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if output.exists():
            output.rename(old)
        partial.rename(output)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or output}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    args: argparse.Namespace, documents: Sequence[Document], tokenizer: Tokenizer, directory: Path
) -> dict[str, Split]:
    """Writes the shards of each split into a directory of its own."""
    with ExitStack() as stack:
        splits = {}
        for name in sorted({document.split for document in documents}):
            writer = ShardWriter(
                directory / name,
                vocab_size=tokenizer.vocab_size,
                dtype=token_dtype(args.dtype, tokenizer.vocab_size),
                file_format=args.format,
                shard_tokens=args.shard_tokens,
            )
            splits[name] = Split(stack.enter_context(writer))
        size = sum(document.size for document in documents)
        show = stack.enter_context(_progress(min(size, args.max_bytes or size)))
        for batch in _batches(pieces(documents, args.max_bytes)):
            tokenize(batch, tokenizer, splits)
            show(splits)
        for split in splits.values():
            split.writer.finish(
                eos_id=tokenizer.eos_id,
                tokenizer=args.tokenizer,
                tokenizer_sha256=tokenizer.fingerprint,
            )
    return splits


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= _BATCH_BYTES or len(batch) == _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenize(batch: Sequence[Piece], tokenizer: Tokenizer, splits: Mapping[str, Split]) -> None:
    """Adds pieces to the splits of their documents, EOS after each document's last."""
    encoded = tokenizer.encode_batch([piece.text for piece in batch])
    for piece, ids in zip(batch, encoded, strict=True):
        split = splits[piece.document.split]
        split.writer.add(ids, end=tokenizer.eos_id if piece.last else None)
        split.size += piece.size
        if not piece.valid:
            split.broken.add(piece.document.name)


@contextmanager
def _progress(size: int) -> Iterator[Callable[[Mapping[str, Split]], None]]:
    """Yields what shows how far `size` bytes are: by a bar on a terminal, elsewhere by lines."""
    console, start = Console(stderr=True), time.monotonic()
    said = start
    columns = (
        BarColumn(20),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=size)

        def show(splits: Mapping[str, Split]) -> None:
            nonlocal said
            now, done = time.monotonic(), sum(split.size for split in splits.values())
            text = _state(splits, now - start)
            progress.update(bar, completed=done, description=text)
            if not console.is_terminal and now - said >= _LINE_SECONDS:
                console.print(f"{done / size:.0%}: {text}", highlight=False, soft_wrap=True)
                said = now

        yield show


def _state(splits: Mapping[str, Split], seconds: float) -> str:
    tokens = sum(split.writer.tokens for split in splits.values())
    documents = sum(split.writer.documents for split in splits.values())
    return f"{documents:,} docs, {tokens / 1e6:,.1f} M tokens, {tokens / seconds / 1e6:.2f} M/s"


def entropy(counts: Int[np.ndarray, "V"]) -> float:
    """Entropy, in nats, of a token drawn with these frequencies.

    It is the loss of a model that knows nothing but how often each token occurs.
    """
    frequencies = counts[counts > 0] / counts.sum()
    return -float(frequencies @ np.log(frequencies))


def _summary(splits: Mapping[str, Split], tokenizer: Tokenizer) -> str:
    """What was written, as a table."""
    parts, train = splits.values(), splits["train"].writer
    rows = [
        ("", *splits),
        ("documents", *(f"{part.writer.documents:,}" for part in parts)),
        ("… not UTF-8", *(f"{len(part.broken):,}" for part in parts)),
        ("tokens", *(f"{part.writer.tokens:,}" for part in parts)),
        ("bytes per token", *(f"{part.size / part.writer.tokens:.3f}" for part in parts)),
        ("unigram entropy", f"{entropy(train.counts):.4f} nats per training token: loss to beat"),
        ("vocabulary", f"{tokenizer.vocab_size:,} ({train.dtype}), EOS {tokenizer.eos_id}"),
    ]
    lines = (f"{row[0]:<17}" + "".join(f"{cell:<17}" for cell in row[1:]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _settings(output: Path, splits: Mapping[str, Split], vocab_size: int, suffix: str) -> str:
    """What a TOML says to train on it."""

    def at(name: str) -> str:  # JSON's strings are TOML's too
        return json.dumps(str(output / name), ensure_ascii=False)

    pattern = f'\nfile_pattern = "*.{suffix}"' if suffix != "npy" else ""
    tokenizer = f"tokenizer_path = {at('tokenizer')}"
    sections = [
        f"[model]\nvocab_size = {vocab_size}",
        f"[data]\ndataset_path = {at('train')}{pattern}\n{tokenizer}",
    ]
    if "validation" in splits:
        sections.append(f"[eval]\nenabled = true\ndataset_path = {at('validation')}{pattern}")
    return "\n\n".join(sections)


if __name__ == "__main__":
    from jaxforge.cli import run_main

    raise SystemExit(run_main(main))
