"""`jaxforge prepare INPUT... --output DIR`: convert documents to token shards.

INPUT ─► documents ─► chunks ─► tokens + EOS ─► .DIR.partial/out/{train,validation}/shard_*.npy
         (files,      of text                   .DIR.partial/out/{tokenizer/,train.toml}
          records)                                  │ rename when complete
                                                    ▼
                                                   DIR

A killed run resumes (`storage.atomic_directory`). See docs/data.md for its use.

`jaxforge prepare --teacher-logits CONFIG --output DIR` runs the teacher of a distillation once over
each sequence of its training data. DIR gets the `distillation.top_k` largest logits of each token.
A run with `distillation.logits = DIR` reads them, so that it needs no teacher.
"""

import argparse
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import check_xla_flags, raise_interrupts, run_main
from jaxforge.commands.command_line import CommandParser, positive_int
from jaxforge.data.corpus import formats, remote_input
from jaxforge.data.corpus.formats.text import parse_separator
from jaxforge.data.corpus.inputs import UNIT_BYTES
from jaxforge.data.corpus.records import MAX_RECORD_BYTES
from jaxforge.data.corpus.tokenizer import BPE_VOCAB_SIZE
from jaxforge.storage import trust, urls
from jaxforge.tools.starting.machine import FORMS

_TOKEN_DTYPES = ("uint16", "uint32")
_LOGIT_DTYPES = ("float32", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, which writes the output directory completely or not at all.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        0.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used.
        SystemExit: `--help`.
    """
    args, overrides = _parse(argv)
    if args.teacher_logits is not None:
        check_xla_flags()
        trust.use_working_directory()
        from jaxforge.tools import teacher_logits  # JAX takes a second to import

        return teacher_logits.run(args, overrides)
    from jaxforge.tools.starting import preparation  # takes half a second to import

    # Ctrl-C unwinds the stack, so that the output can be resumed.
    raise_interrupts()
    return preparation.run(args)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "prepare",
        takes_settings=True,
        usage="%(prog)s INPUT ... --output DIR [options]\n"
        "       %(prog)s --teacher-logits CONFIG --output DIR [options] [--section.key=value ...]",
        description="Convert text or conversations to token shards. Documents are text "
        "files, lines of JSONL, and rows of Parquet files and Hugging Face datasets. Each document "
        "ends with the tokenizer's end-of-text token; empty documents are skipped. After a kill, "
        "the same command resumes. Or save the largest logits of a teacher for the training data "
        "of a distillation.",
    )
    for names, options in _ARGUMENTS.items():
        parser.add_argument(*names.split(), **options)
    return parser


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the parsed options, and the settings over the config of --teacher-logits."""
    line = parser()
    args, overrides = line.parse(argv)
    if args.teacher_logits is not None:
        names = {"teacher_logits", "output", "overwrite", "dtype", "sequences_per_file"}
        line.check_options(args, names, "--teacher-logits")
        if args.input or args.dtype in _TOKEN_DTYPES:
            line.error("--teacher-logits takes no INPUT, and --dtype float32 or float16")
        return args, overrides
    _check(args, overrides, line)
    # The script of --slurm repeats these words.
    args.command_line = list(sys.argv[1:] if argv is None else argv)
    return args, overrides


def _check(args: argparse.Namespace, overrides: Sequence[str], line: CommandParser) -> None:
    """Check the options of a conversion of documents; raise UserError."""
    if overrides:
        line.error(f"{overrides[0]}: settings require --teacher-logits, or belong to a config")
    if args.sequences_per_file or args.dtype in _LOGIT_DTYPES:
        line.error("--sequences-per-file and --dtype float32 or float16 require --teacher-logits")
    if args.vocab_size and args.tokenizer != "bpe":
        line.error("--vocab-size requires --tokenizer bpe; other tokenizers have a fixed size")
    kind = "--preferences" if args.preferences else "--conversations"
    if args.preferences and args.conversations:
        line.error("--preferences and --conversations exclude each other")
    args.conversations |= args.preferences  # pairs of conversations
    if args.conversations and args.tokenizer == "bpe":
        line.error(f"{kind} requires the tokenizer of the model, not --tokenizer bpe")
    if args.conversations and args.dtype == "uint16":
        line.error(f"{kind} are written as uint32: remove --dtype")
    if args.validation_fraction and args.validation_tokens:
        line.error("--validation-fraction and --validation-tokens exclude each other")
    if args.conversations and args.validation_tokens:
        line.error(f"{kind} are held out as a whole: use --validation-fraction")
    if args.slurm and not str(args.output).isprintable():  # a comment would end at a line break
        line.error(f"--slurm writes a script with the name of --output {str(args.output)!r}: give "
                   "a name without control characters")  # fmt: skip
    if args.slurm and args.share:
        line.error("--slurm and --share exclude each other")
    if not args.input and not args.hf_dataset:
        line.error("INPUT or --hf-dataset is required")
    if not args.input and args.separator:
        line.error("--separator requires INPUT")


def _input(text: str) -> Path | str:
    """Parse an input: a path, or a URL as str."""
    if problem := remote_input.fault(text):
        raise argparse.ArgumentTypeError(problem)
    return text if remote_input.is_url(text) else Path(text)


def _output(text: str) -> Path:
    """Parse the output: a path of this machine or in a bucket."""
    if problem := urls.fault(text):
        raise argparse.ArgumentTypeError(problem)
    if text != text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} begins or ends with a blank: remove it")
    return urls.path(text)


def _share(text: str) -> tuple[int, int]:
    """Parse K/N."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and int(k) < int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: give K/N with K below N")
    return int(k), int(n)


def _separator(text: str) -> bytes:
    """Parse an option value that is a separator."""
    try:
        return parse_separator(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _fraction(text: str) -> float:
    """Parse an option value that is a fraction such as 0.05 or 5%."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1:
        meant = f", or {number:g}% for {number / 100:g}" if 1 <= number < 100 else ""
        raise argparse.ArgumentTypeError(
            f"{text!r} must be at least 0 and less than 1: give a fraction such as 0.05{meant}"
        )
    return number


_ARGUMENTS: dict[str, dict] = {
    "input": {
        "nargs": "*",
        "type": _input,
        "metavar": "INPUT",
        "help": "files and directories, also gs://, s3:// and hf://datasets/: records in "
        f"{formats.listed_suffixes()}; other files are text",
    },
    "--hf-dataset": {
        "metavar": "NAME",
        "help": "Hugging Face dataset, read after INPUT: a Hub name, a directory of data files, or "
        "a directory from save_to_disk",
    },
    "--hf-config": {"metavar": "NAME", "help": "configuration of the dataset"},
    "--hf-split": {"default": "train", "metavar": "NAME", "help": "split (default: train)"},
    "--text-field": {
        "default": "text",
        "metavar": "NAME",
        "help": "key or column of the text in records (default: text)",
    },
    "--separator": {
        "type": _separator,
        "metavar": "TEXT",
        "help": r"text between the documents of a text file, such as '<|endoftext|>' or '\n\n' "
        "(default: a text file is one document)",
    },
    "--source-field": {
        "metavar": "NAME",
        "help": "key or column of records that names their source in the statistics (default: the "
        "directory of the file)",
    },
    "--map": {
        "action": "append",
        "default": [],
        "metavar": "FILE.py:FUNCTION|MODULE:FUNCTION",
        "help": "function applied to each record before tokenization, which returns the record, "
        "changed or not, or None to drop it; repeatable, applied in order",
    },
    "--conversations": {
        "action": "store_true",
        "help": "records are conversations (messages), or prompts with completions, for "
        "fine-tuning: they are formatted with the tokenizer's chat template, and only the "
        "assistant's text is trained on",
    },
    "--preferences": {
        "action": "store_true",
        "help": "records are pairs of answers (chosen, rejected) to a prompt, texts or messages, "
        'for train.objective = "dpo"; they are formatted as by --conversations',
    },
    "--skip-bad": {"action": "store_true", "help": "skip and count records without text"},
    "--max-record-bytes": {
        "type": positive_int,
        "default": MAX_RECORD_BYTES,
        "metavar": "N",
        "help": "largest valid record (default: %(default)s)",
    },
    "--workers": {
        "type": positive_int,
        "metavar": "N",
        "help": "processes, without effect on the result (default: one per core)",
    },
    "--slurm": {
        "type": positive_int,
        "metavar": "N",
        "help": "write a script that prepares the units in N tasks of a Slurm array, then ends the "
        "command; nothing else is prepared yet",
    },
    "--share": {
        "type": _share,
        "metavar": "K/N",
        "help": "prepare the units of task K of N (from 0) of an output that --slurm has planned",
    },
    "--unit-bytes": {
        "type": positive_int,
        "default": UNIT_BYTES,
        "metavar": "N",
        "help": "bytes of input in a unit of work, which has shards of its own and is repeated as "
        "a whole if its process is lost (default: %(default)s)",
    },
    "--output": {
        "required": True,
        "type": _output,
        "metavar": "DIR",
        "help": "directory to create, also gs:// or s3://",
    },
    "--overwrite": {"action": "store_true", "help": "replace an earlier output in DIR"},
    "--glob": {
        "help": "file name patterns in directories, separated by commas (default: "
        f"{','.join(f'*{suffix}' for suffix in formats.suffixes(text=True))} and record files; "
        "with --conversations or --preferences, record files)",
    },
    "--exclude": {
        "action": "append",
        "default": [],
        "metavar": "GLOB",
        "help": "paths below INPUT to exclude; repeatable",
    },
    "--tokenizer": {
        "default": "byte",
        "metavar": "byte|bpe|PATH|NAME",
        "help": "UTF-8 bytes (default), a byte-level BPE trained on the training documents, "
        "a tokenizer.json or its directory, or a model of the Hugging Face Hub",
    },
    "--no-bos": {
        "action": "store_true",
        "help": "omit the BOS token that the tokenizer adds to documents",
    },
    "--vocab-size": {
        "type": positive_int,
        "metavar": "N",
        "help": f"vocabulary size of --tokenizer bpe (default: {BPE_VOCAB_SIZE}, less below 16 MB)",
    },
    "--format": {
        "choices": ("npy", "bin"),
        "default": "npy",
        "help": "shard format (default: npy)",
    },
    "--dtype": {
        "choices": (*_TOKEN_DTYPES, *_LOGIT_DTYPES),
        "help": "dtype of tokens (default: the smallest), or of logits (default: float32, as a "
        "teacher in memory has them)",
    },
    "--shard-tokens": {
        "type": positive_int,
        "default": 100_000_000,
        "metavar": "N",
        "help": "tokens per shard (default: %(default)s)",
    },
    "--validation-fraction": {
        "type": _fraction,
        "default": 0.0,
        "metavar": "F",
        "help": "fraction of the documents for DIR/validation, selected by a hash of their "
        "paths and record numbers; for a single text file, its last part (default: 0)",
    },
    "--validation-tokens": {
        "type": positive_int,
        "metavar": "N",
        "help": "write the first N tokens to DIR/validation",
    },
    "--max-bytes": {"type": positive_int, "metavar": "N", "help": "stop after N bytes of text"},
    "--machine": {
        "metavar": "MACHINE",
        "help": f"hardware for DIR/train.toml: {FORMS} (default: this machine)",
    },
    "--teacher-logits": {
        "metavar": "CONFIG",
        "help": "config of a distillation (TOML): save the logits of its teacher instead of tokens",
    },
    "--sequences-per-file": {
        "type": positive_int,
        "metavar": "N",
        "help": "of teacher logits: sequences in a file; a killed command repeats at most one file "
        "(default: as many as take 256 MB)",
    },
}


entry = functools.partial(run_main, main, outlives_reader=True)
