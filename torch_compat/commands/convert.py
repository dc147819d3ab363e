"""`jaxforge convert SOURCE DESTINATION --to FORMAT`: convert a checkpoint between two formats.

Tensors are converted in blocks: memory use does not grow with the model.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser, add_weights_option, positive_int
from jaxforge.errors import UserError
from torch_compat.commands import (
    DIALECTS,
    Size,
    add_reading_options,
    prepare_process,
    reading_options,
)

if TYPE_CHECKING:
    from rich.console import Console

    from torch_compat.checkpoint.checkpoints import CheckpointRef
    from torch_compat.convert.source import Request

_TARGETS = ["jaxforge", "dcp", "pt", "hf", "megatron", "peft"]
_LARGEST_FILE = Size("5GB")


def main(argv: Sequence[str] | None = None) -> int:
    """Plan a conversion, print a summary, and run it unless this is a dry run.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        0.

    Raises:
        UserError: the source, the destination or an option cannot be used.
    """
    args, overrides = parser().parse(argv)
    prepare_process()
    request = _request(args, overrides)
    _check_options(args, request.source)
    return _run(request, is_dry=args.dry_run)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "convert",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s SOURCE DESTINATION --to FORMAT [options] [--section.key=value ...]",
        description="Convert a checkpoint between jaxforge, PyTorch (DCP, torch.save), Megatron, "
        "Hugging Face and PEFT (docs/torch_compat.md).",
        epilog="Settings such as --optimizer.lr=1e-4 override the config.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a run, or a checkpoint; or a directory with `latest`")
    add("destination", metavar="DESTINATION",
        help="jaxforge: the run directory to create; hf, peft: the directory to create; pt: the "
             "file; dcp: the parent directory of step_<n>; megatron: the parent directory of "
             "iter_<n>")  # fmt: skip
    add("--to", choices=_TARGETS, required=True, metavar="FORMAT", help=", ".join(_TARGETS))
    add_reading_options(parser, "--from-dialect")
    add_weights_option(parser)
    add("--average", type=_selection, metavar="N|A,B,...",
        help="with --to jaxforge: the mean of the weights of the N newest checkpoints of a run, or "
             "of its checkpoints of steps A, B, ...")  # fmt: skip
    add("--fill-optimizer", action="store_true",
        help="initialize missing optimizer state with zeros")  # fmt: skip
    add("--dialect", metavar="NAME", help=f"dialect of the names to write: {DIALECTS}")
    add("--layout", choices=["nested", "flat"],
        help="layout of DCP optimizer state; by default the dialect's")  # fmt: skip
    add("--ranks", type=positive_int, default=1,
        help="data-parallel ranks that will resume from the DCP (1)")  # fmt: skip
    add("--stages", type=positive_int, default=1,
        help="pipeline stages that will resume, a DCP for each (1)")  # fmt: skip
    add("--max-shard-size", type=Size, default=_LARGEST_FILE,
        help="maximum size of a safetensors file (5GB)")  # fmt: skip
    add("--text-only", action="store_true",
        help="with --to hf, of a model with images or sound: the language model alone")  # fmt: skip
    add("--dtype", choices=["float32", "bfloat16", "float16", "fp8"],
        help="dtype of the weights; unchanged by default. fp8 (--to hf): matrices of layers in "
             "e4m3 with a scale per 128 x 128 block, as in DeepSeek-V3's files")  # fmt: skip
    add("--dry-run", action="store_true", help="print what would be done")
    return parser


def _selection(text: str) -> int | list[int]:
    """Parse a number of checkpoints, or at least two steps."""
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, or steps such as 100,200")
    return positive_int(text) if len(words) == 1 else [int(word) for word in words]


def _request(args: argparse.Namespace, overrides: Sequence[str]) -> "Request":
    from jaxforge.storage import urls
    from torch_compat.checkpoint import checkpoints
    from torch_compat.convert.source import Request

    destination = urls.path(args.destination)
    if args.to == "pt" and urls.in_bucket(destination):
        raise UserError(f"{destination}: --to pt writes a local file. Copy it to the bucket")
    if args.average:
        source, args.weights_only = _average_source(args, destination), True
    else:
        source = checkpoints.find(args.source)
    return Request(
        source=source,
        destination=destination,
        to=args.to,
        config=args.config,
        overrides=overrides,
        options=reading_options(args),
        dialect=args.dialect,
        layout=args.layout,
        ranks=args.ranks,
        stages=args.stages,
        dtype=args.dtype,
        largest_file=args.max_shard_size.bytes,
        max_memory=args.max_memory.bytes,
        text_only=args.text_only,
    )


def _average_source(args: argparse.Namespace, destination: Path) -> "CheckpointRef":
    """Return the mean of the checkpoints that `--average` names, as a source.

    Raises:
        UserError: a checkpoint does not exist, or the format is another one.
    """
    from torch_compat.convert import average

    if args.to != "jaxforge":
        raise UserError("--average writes a run: use --to jaxforge, then convert that run")
    source = average.select(args.source, args.average)
    average.check_output(source.run, destination)
    return source


def _check_options(args: argparse.Namespace, source: "CheckpointRef") -> None:
    """Check that every given option has an effect.

    Raises:
        UserError: an option does not apply to the source or to the requested format.
    """
    # Identity and not equality: naming the default value counts as given, too.
    shard_size = args.max_shard_size is not _LARGEST_FILE
    target_options = {
        "dcp": {"--layout": args.layout, "--ranks": args.ranks > 1, "--stages": args.stages > 1},
        "hf": {"--max-shard-size": shard_size, "--text-only": args.text_only},
    }
    for to, options in target_options.items():
        for option, is_given in options.items():
            if is_given and to != args.to:
                raise UserError(
                    f"{option} only applies to --to {to}. Remove it with --to {args.to}"
                )
    if args.dialect and args.to == "jaxforge":
        raise UserError(
            "--dialect sets the names to write, and a run always has jaxforge's names. Remove it; "
            "--from-dialect sets the names of the source"
        )
    source_options = {
        "--from-dialect": args.from_dialect, "--resize-vocab": args.resize_vocab,
        "--fill-optimizer": args.fill_optimizer,
    }  # fmt: skip
    ineffective = [option for option, is_given in source_options.items() if is_given]
    if ineffective and source.format == "jaxforge":
        raise UserError(
            f"{ineffective[0]}: {source.directory} is a run of jaxforge. Remove the option"
        )
    weights_only = args.to in ("hf", "peft") or source.format in ("hf", "peft") or args.weights_only
    if args.fill_optimizer and weights_only:
        raise UserError("--fill-optimizer: no optimizer state is converted. Remove the option")


def _run(request: "Request", *, is_dry: bool) -> int:
    """Plan a conversion, print a summary, and run it unless this is a dry run."""
    from rich.console import Console

    from jaxforge.storage import urls
    from torch_compat.convert import conversion

    console = Console(stderr=True, highlight=False)
    plan = conversion.plan(request)
    notes, run = plan.notes, conversion.run
    if urls.in_bucket(request.destination):
        from torch_compat.convert import upload  # its clients take a second to import

        notes, run = (*notes, *upload.notes(request)), upload.run
    console.print(plan.summary, markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    if is_dry:
        return 0
    with _bar(plan.source.nbytes, console) as advance:
        result = run(request, plan, advance)
    print(result)
    return 0


@contextlib.contextmanager
def _bar(total: int, console: "Console") -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield a function that advances it by a number of bytes.

    Nothing is shown if standard error is not a terminal.
    """
    from rich import progress

    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    columns = (
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console) as shown:
        task = shown.add_task("", total=total)
        yield lambda nbytes: shown.advance(task, nbytes)


entry = functools.partial(run_main, main)
