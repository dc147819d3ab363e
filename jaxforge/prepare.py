"""Documents in, token shards out: `python -m jaxforge.prepare INPUT... --output DIR`.

INPUT ─► documents ─► pieces ─► tokens + EOS ─► .DIR.partial/out/{train,validation}/shard_*.npy
         (files,      of text                   .DIR.partial/out/{tokenizer/,train.toml}
          records)                                  │ rename, when all is written
                                                    ▼
                                                   DIR

A killed run goes on where it was: `corpus.atomic_directory`. docs/data.md tells how to use it.
"""

import argparse
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from jaxforge import storage
from jaxforge.cli import run_main
from jaxforge.command_line import CommandParser
from jaxforge.corpus.atomic_directory import AtomicDirectory, Plan, atomic_directory
from jaxforge.corpus.conversations import Conversations, fingerprint
from jaxforge.corpus.documents import (
    first_bytes,
    is_split_inside,
    pieces,
    shuffled,
    split_of,
)
from jaxforge.corpus.entries import ENTRY_DTYPE
from jaxforge.corpus.huggingface import load_dataset
from jaxforge.corpus.ingest import Options, check_split, ingest
from jaxforge.corpus.inputs import (
    Content,
    HuggingFace,
    Input,
    TextField,
    find_inputs,
)
from jaxforge.corpus.manifest import FILE_NAME
from jaxforge.corpus.progress import progress_shown
from jaxforge.corpus.summary import table
from jaxforge.corpus.text_files import RECORDS, TEXTS
from jaxforge.corpus.tokenizer import Tokenizer, load_tokenizer, train_bpe
from jaxforge.corpus.writer import token_dtype
from jaxforge.errors import UserError
from jaxforge.starting.config import FILE_NAME as CONFIG
from jaxforge.starting.config import for_data, in_epochs
from jaxforge.starting.machine import FORMS, Machine
from jaxforge.starting.prepared import Prepared
from jaxforge.starting.sizing import Size

_BPE_VOCAB_SIZE = 32_768
_TEXTS, _RECORDS = ",".join(TEXTS), ",".join(RECORDS)


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
    machine = Machine.parse(args.machine) if args.machine else Machine.here()
    for place in (*args.input, args.output):
        storage.local(place, "prepare", "copy the text here, and what is made of it there")
    given = None if args.tokenizer == "bpe" else _given_tokenizer(args.tokenizer)
    content = Conversations(given) if args.conversations and given else TextField(args.text_field)
    inputs = _inputs(args, content)
    plan = _plan(args, inputs, given)
    made_by = f"train/{FILE_NAME}"
    with atomic_directory(
        args.output, plan, made_by=made_by, overwrite=args.overwrite, say=_say
    ) as destination:
        assert destination is not None
        tokenizer = given or _bpe(args, inputs, destination)
        tokenizer.save(destination.out / "tokenizer")
        options = _options(args, tokenizer.vocab_size)
        with progress_shown(_text_size(inputs, args.max_bytes)) as show:
            corpus = ingest(
                inputs,
                tokenizer,
                options,
                destination,
                tokenizer_name=args.tokenizer,
                workers=args.workers,
                show=show,
            )
        size = _write_config(destination.out, args.output, machine)
    print(table(corpus, tokenizer), end="\n\n")
    print(_next(args.output, size))
    return 0


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser(
        "prepare",
        description="Turns text, or conversations, into token shards for training. Documents are "
        "text files, lines of JSONL, and rows of Parquet files and Hugging Face datasets; each is "
        "ended by the tokenizer's end-of-text token, empty ones are left out. The same command "
        "goes on with what a killed one has left.",
    )
    for names, options in _ARGUMENTS.items():
        parser.add_argument(*names.split(), **options)
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    line = parser()
    args = line.parse_args(argv)
    if args.vocab_size and args.tokenizer != "bpe":
        line.error("--vocab-size goes with --tokenizer bpe; the others have their own")
    if args.conversations and args.tokenizer == "bpe":
        line.error("--conversations goes with the tokenizer of the model, not with one made here")
    if args.conversations and args.dtype == "uint16":
        line.error("--conversations are written as uint32: leave --dtype out")
    if args.validation_fraction and args.validation_tokens:
        line.error("--validation-fraction and --validation-tokens exclude each other")
    if args.conversations and args.validation_tokens:
        line.error("--conversations are held out whole: use --validation-fraction")
    if not args.input and not args.hf_dataset:
        line.error("give INPUT or --hf-dataset")
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
        "nargs": "*",
        "type": Path,
        "metavar": "INPUT",
        "help": "files and directories: JSONL (.jsonl, .jsonl.gz, .jsonl.zst), .parquet, and all "
        "else as text",
    },
    "--hf-dataset": {
        "metavar": "NAME",
        "help": "Hugging Face dataset, after the INPUTs: of the hub, a directory of data files, or "
        "one written by save_to_disk",
    },
    "--hf-config": {"metavar": "NAME", "help": "its configuration"},
    "--hf-split": {"default": "train", "metavar": "NAME", "help": "its split (default: train)"},
    "--text-field": {
        "default": "text",
        "metavar": "NAME",
        "help": "key or column of the text in records (default: text)",
    },
    "--conversations": {
        "action": "store_true",
        "help": "records are conversations (messages), or prompts with completions, for "
        "fine-tuning: the tokenizer's chat template writes them, and what the assistant says is "
        "learned",
    },
    "--skip-bad": {"action": "store_true", "help": "leave out, and count, records without text"},
    "--workers": {
        "type": _positive,
        "default": os.cpu_count() or 1,
        "metavar": "N",
        "help": "processes that encode; the result is the same (default: one per core)",
    },
    "--output": {"required": True, "type": Path, "metavar": "DIR", "help": "directory to make"},
    "--overwrite": {"action": "store_true", "help": "replace what an earlier run left in DIR"},
    "--glob": {
        "help": "file names to take from directories, separated by commas (default: "
        f"{_TEXTS},{_RECORDS}; with --conversations, {_RECORDS})",
    },
    "--exclude": {
        "action": "append",
        "default": [],
        "metavar": "GLOB",
        "help": "paths below INPUT to leave out; may be repeated",
    },
    "--tokenizer": {
        "default": "byte",
        "metavar": "byte|bpe|PATH|NAME",
        "help": "UTF-8 bytes (the default); a byte-level BPE trained on the training documents; "
        "a tokenizer.json or its directory; or a model of the Hugging Face Hub",
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
        "paths and record numbers; of a single text file, its last part (default: none)",
    },
    "--validation-tokens": {
        "type": _positive,
        "metavar": "N",
        "help": "put the first N tokens into DIR/validation instead",
    },
    "--shuffle-documents": {
        "type": int,
        "metavar": "SEED",
        "help": "take text files in random order, not sorted by path",
    },
    "--max-bytes": {"type": _positive, "metavar": "N", "help": "stop after so much text"},
    "--machine": {
        "metavar": "WHAT",
        "help": f"what DIR/train.toml is sized for: {FORMS} (default: this machine)",
    },
}


def _inputs(args: argparse.Namespace, content: Content) -> list[Input]:
    """What to read, in order."""
    inputs: list[Input] = []
    if args.input:
        globs = args.glob or (_RECORDS if args.conversations else f"{_TEXTS},{_RECORDS}")
        inputs += find_inputs(args.input, globs.split(","), args.exclude, content)
    if args.hf_dataset:
        dataset = load_dataset(args.hf_dataset, args.hf_config, args.hf_split)
        name = ":".join(filter(None, [args.hf_dataset, args.hf_config, args.hf_split]))
        inputs.append(HuggingFace(name, dataset, content))
    if args.conversations:
        _check_records(inputs)
    if args.shuffle_documents is not None:
        inputs = _shuffled(inputs, args.shuffle_documents)
    inputs = first_bytes(inputs, args.max_bytes)
    if _all_text(inputs) and not is_split_inside(inputs):  # else they are known when all is read
        splits = [split_of(source.name, args.validation_fraction) for source in inputs]
        held_out = splits.count("validation")
        check_split(len(splits) - held_out, held_out, args.validation_fraction)
    return inputs


def _shuffled(inputs: Sequence[Input], seed: int) -> list[Input]:
    if not _all_text(inputs):
        raise UserError(
            "--shuffle-documents is for text files: records keep their order; leave it out, as "
            "training shuffles anyway (data.shuffle)"
        )
    return shuffled(inputs, seed)


def _check_records(inputs: Iterable[Input]) -> None:
    for source in inputs:
        if source.text_size is not None:
            raise UserError(
                f"{source.where} is read as plain text, and holds no conversations: give JSONL, "
                "Parquet, or with --hf-dataset a directory of other files (.json, .csv)"
            )


def _all_text(inputs: Iterable[Input]) -> bool:
    return all(source.text_size is not None for source in inputs)


def _text_size(inputs: Sequence[Input], max_bytes: int | None) -> int | None:
    """Bytes of text to come, where they are known."""
    if not _all_text(inputs):
        return max_bytes
    size = sum(source.text_size or 0 for source in inputs)
    return min(size, max_bytes or size)


_PLANNED = ("text_field", "tokenizer", "vocab_size", "format", "dtype", "shard_tokens",
            "validation_fraction", "validation_tokens", "max_bytes")  # fmt: skip


def _plan(args: argparse.Namespace, inputs: Iterable[Input], tokenizer: Tokenizer | None) -> Plan:
    """What DIR depends on."""
    options = {f"--{name.replace('_', '-')}": getattr(args, name) for name in _PLANNED}
    options["the tokenizer's sha256"] = tokenizer and tokenizer.fingerprint
    if args.conversations and tokenizer:
        options["the chat template's sha256"] = fingerprint(tokenizer)
    return {"options": options, "inputs": [source.identity for source in inputs]}


def _options(args: argparse.Namespace, vocab_size: int) -> Options:
    return Options(
        dtype=ENTRY_DTYPE if args.conversations else token_dtype(args.dtype, vocab_size),
        file_format=args.format,
        shard_tokens=args.shard_tokens,
        validation_fraction=args.validation_fraction,
        validation_tokens=args.validation_tokens or 0,
        max_bytes=args.max_bytes,
        skip_bad=args.skip_bad,
        conversations=args.conversations,
    )


def _bpe(
    args: argparse.Namespace, inputs: Sequence[Input], destination: AtomicDirectory
) -> Tokenizer:
    """The BPE of the training documents: of an earlier run, if that came so far."""
    if destination.journal is not None:
        return load_tokenizer(destination.out / "tokenizer")
    _say("training the BPE tokenizer …")
    read = pieces(
        inputs,
        validation_fraction=args.validation_fraction,
        max_bytes=args.max_bytes,
        skip_bad=args.skip_bad,
    )
    texts = (piece.text for piece in read if piece.split == "train")
    return train_bpe(texts, args.vocab_size or _BPE_VOCAB_SIZE)


def _given_tokenizer(spec: str) -> Tokenizer:
    tokenizer = load_tokenizer(spec)
    if tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer {spec} names no end-of-text token for documents to end with; put a "
            'tokenizer_config.json with "eos_token" beside its tokenizer.json'
        )
    return tokenizer


def _write_config(directory: Path, output: Path, machine: Machine) -> Size:
    """Writes the config to train on `output`, which is still `directory`; what it comes to."""
    prepared = Prepared.read(directory, output)
    text, size = for_data(prepared, machine, Path("runs", prepared.place.name).absolute())
    try:
        (directory / CONFIG).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {directory / CONFIG}: {error.strerror}") from error
    return size


def _next(output: Path, size: Size) -> str:
    """What was written, and the command to type next."""
    path = output.absolute() / CONFIG
    return (
        f"{path}: {size.parameters / 1e6:.3g}M parameters, {size.max_steps:,} updates of "
        f"{size.tokens:,} tokens, {in_epochs(size.epochs)}\n"
        f"Next:\n  jaxforge train --config {shlex.quote(str(path))}"
    )


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, tidies_up=True)


if __name__ == "__main__":
    raise SystemExit(entry())
