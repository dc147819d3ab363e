"""`jaxforge convert SOURCE DESTINATION --to FORMAT`: convert a checkpoint between two formats.

Tensors are converted in blocks: memory use does not grow with the model.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
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
from torch_compat.formats.workers import Share, Workers

if TYPE_CHECKING:
    from torch_compat.checkpoint.checkpoints import CheckpointRef
    from torch_compat.convert.hub import HubRepository
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
    arguments = list(sys.argv[1:] if argv is None else argv)
    args, overrides = parser().parse(arguments)
    prepare_process()
    request = _request(args, overrides)
    _check_options(args, request.source)
    return _run(args, request, _hub_repository(args, request), arguments)


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
    add("--dtype", choices=["float32", "bfloat16", "float16", "fp8"],
        help="dtype of the weights; unchanged by default. fp8 (--to hf): matrices of layers in "
             "e4m3 with a scale per 128 x 128 block, as in DeepSeek-V3's files")  # fmt: skip
    add("--processes", type=positive_int, default=1, help="number of local worker processes (1)")
    add("--process", type=_share, default=Share(), metavar="I/N",
        help="act as process I of N, which are started separately")  # fmt: skip
    add("--worker", nargs=2, help=argparse.SUPPRESS)  # parent process and source
    add("--dry-run", action="store_true", help="print what would be done")
    add("--push-to-hub", metavar="OWNER/NAME",
        help="upload the result to a model of the Hugging Face Hub; the token is that of HF_TOKEN "
             "or `hf auth login`")  # fmt: skip
    add("--private", action="store_true", help="create that model as private")
    add("--revision", metavar="BRANCH", help="branch of that model")
    return parser


def _share(text: str) -> Share:
    process, _, processes = text.partition("/")
    share = Share(int(process), int(processes))
    if not 0 <= share.process < share.processes:
        raise ValueError(text)
    return share


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
    if urls.in_bucket(destination) and args.process.processes > 1 and not args.worker:
        raise UserError(
            f"{destination}: a conversion into a bucket runs on one machine. Remove --process; "
            "--processes N uses N of its cores"
        )
    if args.to == "pt" and urls.in_bucket(destination):
        raise UserError(f"{destination}: --to pt writes a local file. Copy it to the bucket")
    if args.average:
        source, args.weights_only = _average_source(args, destination), True
    else:
        source = checkpoints.find(args.worker[1] if args.worker else args.source)
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
    )


def _average_source(args: argparse.Namespace, destination: Path) -> "CheckpointRef":
    """Return the mean of the checkpoints that `--average` names, as a source.

    Raises:
        UserError: a checkpoint does not exist, or an option does not apply to a mean.
    """
    from torch_compat.convert import average

    if args.to != "jaxforge":
        raise UserError("--average writes a run: use --to jaxforge, then convert that run")
    if args.processes > 1 or args.process.processes > 1:
        raise UserError("--average runs in a single process: remove --processes or --process")
    source = average.select(args.source, args.average)
    average.check_output(source.run, destination)
    return source


def _check_options(args: argparse.Namespace, source: "CheckpointRef") -> None:
    """Check that every given option has an effect.

    Raises:
        UserError: an option does not apply to the source or to the requested format.
    """
    shard_size = args.max_shard_size is not _LARGEST_FILE
    target_options = {
        "dcp": {"--layout": args.layout, "--ranks": args.ranks > 1, "--stages": args.stages > 1},
        "hf": {"--max-shard-size": shard_size},
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


def _hub_repository(args: argparse.Namespace, request: "Request") -> "HubRepository | None":
    """Return the checked repository of `--push-to-hub`; None without it.

    Raises:
        UserError: the Hub cannot take the result, or an option does not apply.
    """
    from jaxforge.storage import urls

    if args.push_to_hub is None:
        for option in ("private", "revision"):
            if getattr(args, option):
                raise UserError(f"--{option} only applies to --push-to-hub. Add it, or remove this")
        return None
    from torch_compat.convert.hub import FORMATS, HubRepository

    if request.to not in FORMATS:
        formats = " and ".join(f"--to {name}" for name in FORMATS)
        raise UserError(f"--push-to-hub only applies to {formats}. Remove it with --to {args.to}")
    if urls.in_bucket(request.destination):
        raise UserError(
            f"--push-to-hub uploads a local result, and {request.destination} is in a bucket. "
            "Export to a local directory"
        )
    repository = HubRepository(args.push_to_hub, args.private, args.revision)
    if args.process.process == 0:
        repository.check()
    return repository


def _run(
    args: argparse.Namespace,
    request: "Request",
    hub: "HubRepository | None",
    arguments: Sequence[str],
) -> int:
    """Plan a conversion, print a summary, and run it unless this is a dry run.

    Process 0 uploads the result to `hub`, if it is given.
    """
    from rich.console import Console

    from jaxforge.storage import urls
    from torch_compat.checkpoint.progress import bar
    from torch_compat.convert import conversion

    console = Console(stderr=True, highlight=False)
    plan = conversion.plan(request)
    notes, run = plan.notes, conversion.run
    if urls.in_bucket(request.destination):
        from torch_compat.convert import upload  # its clients take a second to import

        notes, run = (*notes, *upload.notes(request)), upload.run
    if hub is not None:
        notes = (*notes, hub.note())
    if args.process.process == 0:
        console.print(plan.summary, markup=False, soft_wrap=True)
        for note in notes:
            console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    if args.dry_run:
        return 0
    share, workers = args.process, Workers()
    if args.worker:
        share = share._replace(parent=int(args.worker[0]))
    elif args.processes > 1 and share.processes == 1:
        share = Share(0, args.processes)
        workers = Workers(arguments, str(request.source), args.processes)
    nbytes = plan.source.nbytes // share.processes
    with workers, bar(nbytes, console, quiet=share.process > 0) as advance:
        result = run(request, plan, share, advance, workers)
    if result:
        print(result)
    if result and hub is not None:
        print(hub.push(result, f"Export step {plan.source.progress.step} with jaxforge"))
    return 0


entry = functools.partial(run_main, main)
