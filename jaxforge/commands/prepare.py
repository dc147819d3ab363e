"""Documents in, token shards out: `python -m jaxforge.prepare INPUT... --output DIR`.

INPUT ─► documents ─► pieces ─► tokens + EOS ─► .DIR.partial/out/{train,validation}/shard_*.npy
         (files,      of text                   .DIR.partial/out/{tokenizer/,train.toml}
          records)                                  │ rename, when all is written
                                                    ▼
                                                   DIR

A killed run goes on where it was: `corpus.atomic_directory`. docs/data.md tells how to use it.
"""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import raise_interrupts, run_main
from jaxforge.commands.command_line import CommandParser, count
from jaxforge.data.corpus.records import MAX_RECORD_BYTES
from jaxforge.data.corpus.text_files import TEXTS
from jaxforge.data.corpus.tokenizer import BPE_VOCAB_SIZE
from jaxforge.tools.starting.machine import FORMS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; all of DIR is written, or nothing.

    Args:
        argv: arguments; by default the process's.

    Returns:
        0.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used.
        SystemExit: `--help`.
    """
    args = _parse(argv)
    from jaxforge.tools.starting import (
        preparation,  # here, as all that it needs takes half a second
    )

    raise_interrupts()
    return preparation.run(args)


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


def _fraction(text: str) -> float:
    """The type of an option: a part, such as 0.05 or 5%."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1:
        meant = f", or {number:g}% for {number / 100:g}" if 1 <= number < 100 else ""
        raise argparse.ArgumentTypeError(
            f"{text!r} is not at least 0 and below 1: give a part such as 0.05{meant}"
        )
    return number


_ARGUMENTS: dict[str, dict] = {
    "input": {
        "nargs": "*",
        "type": Path,
        "metavar": "INPUT",
        "help": "files and directories: records of .jsonl, .ndjson, .json, .csv, .tsv (also with "
        ".gz or .zst), .parquet, .arrow, .feather; all else is text",
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
    "--max-record-bytes": {
        "type": count,
        "default": MAX_RECORD_BYTES,
        "metavar": "N",
        "help": "a larger record is bad (default: %(default)s)",
    },
    "--workers": {
        "type": count,
        "default": os.cpu_count() or 1,
        "metavar": "N",
        "help": "processes that encode; the result is the same (default: one per core)",
    },
    "--output": {"required": True, "type": Path, "metavar": "DIR", "help": "directory to make"},
    "--overwrite": {"action": "store_true", "help": "replace what an earlier run left in DIR"},
    "--glob": {
        "help": "file names to take from directories, separated by commas (default: "
        f"{','.join(TEXTS)} and those of records; with --conversations, of records)",
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
    "--no-bos": {
        "action": "store_true",
        "help": "no BOS before documents, though the tokenizer adds it",
    },
    "--vocab-size": {
        "type": count,
        "metavar": "N",
        "help": f"of --tokenizer bpe (default: {BPE_VOCAB_SIZE}, fewer for less than 16 MB)",
    },
    "--format": {"choices": ("npy", "bin"), "default": "npy", "help": "of shards (default: npy)"},
    "--dtype": {"choices": ("uint16", "uint32"), "help": "of tokens (default: the smallest)"},
    "--shard-tokens": {
        "type": count,
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
        "type": count,
        "metavar": "N",
        "help": "put the first N tokens into DIR/validation instead",
    },
    "--shuffle-documents": {
        "type": int,
        "metavar": "SEED",
        "help": "take text files in random order, not sorted by path",
    },
    "--max-bytes": {"type": count, "metavar": "N", "help": "stop after so much text"},
    "--machine": {
        "metavar": "WHAT",
        "help": f"what DIR/train.toml is sized for: {FORMS} (default: this machine)",
    },
}


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, outlives_reader=True)


if __name__ == "__main__":
    raise SystemExit(entry())
