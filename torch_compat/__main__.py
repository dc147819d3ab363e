"""`python -m torch_compat COMMAND`: convert and compare checkpoints of PyTorch and jaxforge."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no command computes on an accelerator

import argparse
import dataclasses
import functools
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser, add_weights_option, positive_int
from jaxforge.errors import UserError
from torch_compat.formats.workers import Share, Workers

# Commands import their modules when they run: importing all of them takes half a second.
if TYPE_CHECKING:
    from torch_compat.checkpoint.checkpoints import CheckpointRef
    from torch_compat.checkpoint.dcp_state import ReadOptions
    from torch_compat.convert.hub import HubRepository
    from torch_compat.convert.source import Request
    from torch_compat.convert.verify import VerificationResult

_SIZE = re.compile(r"([\d.]+) *([kmgt]?)(i?)b?", re.IGNORECASE)
_DIALECTS = "such as kempnerforge, torchtitan or hf-llama (docs/torch_compat.md lists all of them)"
_TARGETS = ["dcp", "pt", "hf", "megatron", "peft"]
_MAX_SHOWN = 30  # differences that `verify` prints


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args, overrides = parser().parse(argv)
    args.argv = argv
    from jaxforge.parallel import host_memory

    host_memory.share_heaps()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step at WARNING
    return args.run(args, overrides)


class Size:
    """Number of bytes, parsed from text such as 5GB or 256MiB.

    Raises:
        ValueError: the text is not a size.
    """

    def __init__(self, text: str) -> None:
        match = _SIZE.fullmatch(text.strip())
        if not match:
            raise ValueError(f"{text}: not a size such as 256MiB")
        base = 1024 if match[3] else 1000
        size = float(match[1]) * base ** " kmgt".index(match[2].lower() or " ")
        if not 1 <= size < 2**63:
            raise ValueError(f"{text}: not a size such as 256MiB")
        self.bytes = int(size)


_LARGEST_FILE = Size("5GB")
_ABOUT = (
    "`python -m torch_compat COMMAND`: convert and compare checkpoints of PyTorch and jaxforge."
)
_DETAILS = """\
    convert SRC DST --to jaxforge|dcp|pt|hf|megatron|peft [--config FILE]
                                         convert a checkpoint between any two formats
    import SRC DST [--config FILE]       import a DCP, Megatron or Hugging Face checkpoint as a run
    export SRC DST --to dcp|pt|hf|megatron|peft
                                         export a run as a DCP, a file of torch.save, a Hugging Face
                                         or Megatron checkpoint, or an adapter of PEFT
    average RUN --last N --output DIR    write the mean of the weights of several checkpoints
    inspect PATH [--json]                describe a checkpoint in any readable format
    verify A B [--json]                  compare two checkpoints (exit code 1 if they differ)
    lockstep --torch MODULE:FACTORY --checkpoint PATH
                                         compare a PyTorch model with jaxforge layer by layer

Tensors are converted in blocks: memory use does not grow with the model. Settings such as
`--optimizer.lr=1e-4` override the config. See docs/torch_compat.md.
"""


def parser() -> CommandParser:
    """Return the parser of all commands."""
    parser = CommandParser(
        "torch_compat", description=_ABOUT, epilog=_DETAILS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = functools.partial(commands.add_parser, takes_settings=True, uses_runs=True)
    _add_convert_options(add("convert", help="convert a checkpoint between any two formats"))
    _add_import_options(add("import", help="import a PyTorch checkpoint as a run of jaxforge"))
    _add_export_options(add("export", help="export a run of jaxforge as a PyTorch checkpoint"))
    _add_average_options(
        commands.add_parser("average", help="average the weights of checkpoints", uses_runs=True)
    )
    inspecting = commands.add_parser("inspect", help="describe the contents of a checkpoint")
    inspecting.add_argument("path")
    inspecting.add_argument("--json", action="store_true")
    inspecting.set_defaults(run=_inspect)
    verifying = add("verify", help="compare two checkpoints")
    verifying.add_argument("a")
    verifying.add_argument("b")
    _add_source_options(verifying)
    verifying.add_argument("--max-memory", type=Size, default=Size("256MiB"))
    verifying.add_argument("--json", action="store_true")
    verifying.set_defaults(run=_verify, fill_optimizer=False)
    _add_lockstep_options(
        add("lockstep", help="compare a PyTorch model with jaxforge layer by layer")
    )
    return parser


def _add_convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint, or a directory with `latest` or steps")
    parser.add_argument("destination",
                        help="jaxforge: the run directory to create; hf, peft: the directory to "
                             "create; pt: the file; dcp: the parent directory of step_<n>; "
                             "megatron: the parent directory of iter_<n>")  # fmt: skip
    parser.add_argument("--to", choices=["jaxforge", *_TARGETS], required=True)
    _add_source_options(parser, dialect="--from-dialect")
    add_weights_option(parser)
    _add_fill_option(parser)
    _add_dialect_options(parser)
    _add_write_options(parser)
    parser.set_defaults(run=_convert)


def _add_import_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint, or a directory with `latest` or steps")
    parser.add_argument("destination", help="the run directory to create")
    _add_source_options(parser)
    _add_fill_option(parser)
    _add_write_options(parser)
    parser.set_defaults(run=_import, to="jaxforge", dialect=None, layout=None, ranks=1, stages=1,
                        max_shard_size=_LARGEST_FILE)  # fmt: skip


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a run directory, or one of its checkpoints")
    parser.add_argument(
        "destination",
        help="hf, peft: the directory to create; pt: the file; dcp: the parent directory of "
        "step_<n>; megatron: the parent directory of iter_<n>",
    )
    parser.add_argument("--to", choices=_TARGETS, required=True)
    parser.add_argument("--config", type=Path, help="replaces the config in the checkpoint")
    _add_dialect_options(parser)
    parser.add_argument("--weights-only", action="store_true", help="export no optimizer state")
    add_weights_option(parser)
    _add_write_options(parser)
    parser.add_argument("--push-to-hub", metavar="OWNER/NAME",
                        help="upload the result to a model of the Hugging Face Hub; the token is "
                        "that of HF_TOKEN or `hf auth login`")  # fmt: skip
    parser.add_argument("--private", action="store_true", help="create that model as private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch of that model")
    parser.set_defaults(run=_export, from_dialect=None, fill_optimizer=False, resize_vocab=False)


def _add_average_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="RUN", help="a run directory")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=positive_int, metavar="N", help="the N newest checkpoints")
    which.add_argument("--steps", type=_steps, metavar="A,B,...", help="checkpoints of these steps")
    add("--output", required=True, metavar="DIR", help="new run directory for the mean")
    add_weights_option(parser)
    add("--max-memory", type=Size, default=Size("256MiB"),
        help="memory for tensors in transit (256MiB)")  # fmt: skip
    add("--dry-run", action="store_true", help="print what would be done")
    parser.set_defaults(run=_average, process=Share(), processes=1, worker=None)


def _add_source_options(parser: argparse.ArgumentParser, dialect: str = "--dialect") -> None:
    parser.add_argument(
        "--config", type=Path, help="the TOML file of the run (required for DCP and .pt)"
    )
    parser.add_argument(dialect, metavar="NAME", dest="from_dialect",
                        help=f"detected from the keys by default: {_DIALECTS}")  # fmt: skip
    parser.add_argument("--weights-only", action="store_true", help="read no optimizer state")
    parser.add_argument("--resize-vocab", action="store_true",
                        help="truncate a padded vocabulary, or pad it with zeros")  # fmt: skip


def _add_fill_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fill-optimizer", action="store_true",
                        help="initialize missing optimizer state with zeros")  # fmt: skip


def _add_dialect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dialect", metavar="NAME", help=f"dialect of the names to write: {_DIALECTS}"
    )
    parser.add_argument("--layout", choices=["nested", "flat"],
                        help="layout of DCP optimizer state; by default the dialect's")  # fmt: skip
    parser.add_argument("--ranks", type=positive_int, default=1,
                        help="data-parallel ranks that will resume from the DCP (1)")  # fmt: skip
    parser.add_argument("--stages", type=positive_int, default=1,
                        help="pipeline stages that will resume, a DCP for each (1)")  # fmt: skip
    parser.add_argument("--max-shard-size", type=Size, default=_LARGEST_FILE,
                        help="maximum size of a safetensors file (5GB)")  # fmt: skip


def _add_write_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "fp8"],
                        help="dtype of the weights; unchanged by default. fp8 (--to hf): matrices "
                        "of layers in e4m3 with a scale per 128 x 128 block, as in DeepSeek-V3's "
                        "files")  # fmt: skip
    parser.add_argument("--max-memory", type=Size, default=Size("256MiB"),
                        help="memory for tensors in transit (256MiB)")  # fmt: skip
    parser.add_argument(
        "--processes", type=positive_int, default=1, help="number of local worker processes (1)"
    )
    parser.add_argument("--process", type=_share, default=Share(), metavar="I/N",
                        help="act as process I of N, which are started separately")  # fmt: skip
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # parent process and source
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")


def _add_lockstep_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--torch", required=True, metavar="MODULE:FACTORY",
        help="factory of the torch module, and optionally its optimizer and loss")  # fmt: skip
    add("--checkpoint", required=True, metavar="PATH", help="weights of both models")
    add("--config", type=Path, help="the TOML file of the run (required for DCP)")
    add("--dialect", metavar="NAME", help=f"names of the module, detected by default: {_DIALECTS}")
    add("--loaded", action="store_true", help="the factory has loaded the weights itself")
    add("--batch", type=Path, metavar="FILE.npz",
        help="input_ids and labels, [b, s]; by default from the config's data")  # fmt: skip
    add("--rows", type=positive_int, default=2, help="number of sequences of a sampled batch (2)")
    add("--tokens", type=positive_int, default=64, help="tokens of each sampled sequence (64)")
    add("--json", action="store_true")
    parser.set_defaults(run=_lockstep)


def _share(text: str) -> Share:
    process, _, processes = text.partition("/")
    share = Share(int(process), int(processes))
    if not 0 <= share.process < share.processes:
        raise ValueError(text)
    return share


def _steps(text: str) -> list[int]:
    return [int(step) for step in text.split(",")]


def _average(args: argparse.Namespace, _: Sequence[str]) -> int:
    from jaxforge.storage import urls
    from torch_compat.checkpoint.dcp_state import ReadOptions
    from torch_compat.convert import average
    from torch_compat.convert.source import Request

    source = average.select(args.source, args.last, args.steps)
    output = urls.path(args.output)
    average.check_output(source.run, output)
    options = ReadOptions(weights_only=True, weights=args.weights)
    max_memory = args.max_memory.bytes
    return _run(args, Request(source, output, "jaxforge", options=options, max_memory=max_memory))


def _import(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    request = _request(args, overrides)
    if request.source.format == "jaxforge":
        raise UserError(f"{request.source.directory} is already a run of jaxforge")
    return _run(args, request)


def _export(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    request = _request(args, overrides)
    if request.source.format != "jaxforge":
        raise UserError(f"{request.source.directory}: not a run of jaxforge. Import it first")
    return _run(args, request, _hub_repository(args, request))


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


def _convert(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    request = _request(args, overrides)
    _check_options(args, request.source)
    return _run(args, request)


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
    return Request(
        source=checkpoints.find(args.worker[1] if args.worker else args.source),
        destination=destination,
        to=args.to,
        config=args.config,
        overrides=overrides,
        options=_options(args),
        dialect=args.dialect,
        layout=args.layout,
        ranks=args.ranks,
        stages=args.stages,
        dtype=args.dtype,
        largest_file=args.max_shard_size.bytes,
        max_memory=args.max_memory.bytes,
    )


def _options(args: argparse.Namespace) -> "ReadOptions":
    from torch_compat.checkpoint.dcp_state import ReadOptions

    return ReadOptions(
        dialect=args.from_dialect,
        weights_only=args.weights_only,
        fill_optimizer=args.fill_optimizer,
        resize_vocab=args.resize_vocab,
        weights=getattr(args, "weights", "raw"),
    )


def _run(args: argparse.Namespace, request: "Request", hub: "HubRepository | None" = None) -> int:
    """Plan a conversion, print a summary, and run it unless this is a dry run.

    With `hub`, process 0 uploads the result.
    """
    from rich.console import Console

    from jaxforge.storage import urls
    from torch_compat.checkpoint.progress import bar
    from torch_compat.convert import conversion

    console = Console(stderr=True, highlight=False)
    plan = conversion.plan(request)
    notes, run = plan.notes, conversion.run
    if urls.in_bucket(request.destination):
        from torch_compat.convert import (
            upload,  # imported here: its clients take a second to import
        )

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
        workers = Workers(args.argv, str(request.source), args.processes)
    nbytes = plan.source.nbytes // share.processes
    with workers, bar(nbytes, console, quiet=share.process > 0) as advance:
        result = run(request, plan, share, advance, workers)
    if result:
        print(result)
    if result and hub is not None:
        print(hub.push(result, f"Export step {plan.source.progress.step} with jaxforge"))
    return 0


def _inspect(args: argparse.Namespace, _: Sequence[str]) -> int:
    from torch_compat.checkpoint import checkpoints, inspection

    report = inspection.inspect(checkpoints.find(args.path))
    print(inspection.as_json(report) if args.json else inspection.as_text(report))
    return 0


def _verify(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    from torch_compat.checkpoint import checkpoints
    from torch_compat.convert.verify import verify

    result = verify(
        checkpoints.find(args.a), checkpoints.find(args.b), args.config, overrides,
        _options(args), args.max_memory.bytes,
    )  # fmt: skip
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        _print_differences(result)
    return 0 if result.same else 1


def _print_differences(result: "VerificationResult") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    if result.differences:
        table = Table("name", "differs in", "largest difference", "")
        for d in result.differences[:_MAX_SHOWN]:
            table.add_row(*map(escape, (d.name, d.what, f"{d.largest:.3g}", d.note)))
        console.print(table)
        if (more := len(result.differences) - _MAX_SHOWN) > 0:
            console.print(f"... and {more} more")
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    n_settings = sum(d.what == "settings" for d in result.differences)
    counts = {"tensors": (len(result.differences) - n_settings, result.compared)}
    if result.settings:
        counts["place, schedule and optimizer"] = (n_settings, result.settings)
    for what, (differ, of) in counts.items():
        verdict = f"{differ} of {of} differ" if differ else f"{of} are the same"
        console.print(f"{what}: {verdict}")


def _lockstep(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    from torch_compat.lockstep import command  # imports JAX, which takes two seconds

    job = command.Job(
        spec=args.torch, checkpoint=args.checkpoint, config=args.config, overrides=overrides,
        batch=args.batch, size=(args.rows, args.tokens), dialect=args.dialect, loaded=args.loaded,
    )  # fmt: skip
    report = command.lockstep(job)
    command.print_report(report, args.json)
    return 0 if report.same else 1


def entry() -> int:
    """Run the command line of this process and return its exit code."""
    return run_main(main)


if __name__ == "__main__":
    raise SystemExit(entry())
