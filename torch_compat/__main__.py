"""`python -m torch_compat COMMAND`: checkpoints to and from PyTorch.

    convert SRC DST --to jaxforge|dcp|pt|hf [--config FILE]
                                         a checkpoint of any format in any other
    import SRC DST [--config FILE]       a DCP or Hugging Face checkpoint as a run of jaxforge
    export SRC DST --to dcp|pt|hf        a run of jaxforge as a DCP, a file of torch.save, or a
                                         Hugging Face checkpoint
    inspect PATH [--json]                what a checkpoint of any format holds
    verify A B [--json]                  whether two hold the same (exit code 1 where they do not)
    lockstep --torch MODULE:FACTORY --checkpoint PATH
                                         a torch model and ours, run side by side: what differs

Tensors pass through in blocks: memory does not grow with the model. Settings such as
`--optimizer.lr=1e-4` go over the config. See docs/torch_compat.md.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here computes on a device

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
from jaxforge.commands.command_line import CommandParser, positive_int
from jaxforge.errors import UserError
from torch_compat.formats.workers import Share, Workers

# Each command imports the modules that it needs when it runs: that takes half a second.
if TYPE_CHECKING:
    from torch_compat.checkpoint.checkpoints import CheckpointRef
    from torch_compat.checkpoint.dcp_state import ReadOptions
    from torch_compat.convert.source import Request
    from torch_compat.convert.verify import VerificationResult

_SIZE = re.compile(r"([\d.]+) *([kmgt]?)(i?)b?", re.IGNORECASE)
_DIALECTS = "such as kempnerforge, torchtitan or hf-llama (docs/torch_compat.md has all of them)"
_SHOWN = 30  # differences of `verify`


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args, overrides = parser().parse(argv)
    args.argv = argv
    from jaxforge.parallel import host_memory

    host_memory.share_heaps()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step at WARNING
    return args.run(args, overrides)


class Size:
    """A number of bytes such as 5GB or 256MiB.

    Raises:
        ValueError: the text is none.
    """

    def __init__(self, text: str) -> None:
        match = _SIZE.fullmatch(text.strip())
        if not match:
            raise ValueError(f"{text}: no size such as 256MiB")
        base = 1024 if match[3] else 1000
        size = float(match[1]) * base ** " kmgt".index(match[2].lower() or " ")
        if not 1 <= size < 2**63:
            raise ValueError(f"{text}: no size such as 256MiB")
        self.bytes = int(size)


_LARGEST_FILE = Size("5GB")


def parser() -> CommandParser:
    """Return the parser of all commands."""
    about, _, details = (__doc__ or "").partition("\n\n")
    parser = CommandParser(
        "torch_compat", description=about, epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = functools.partial(commands.add_parser, takes_settings=True, uses_runs=True)
    _add_converting(add("convert", help="a checkpoint of any format in any other"))
    _add_importing(add("import", help="a PyTorch checkpoint as a run of jaxforge"))
    _add_exporting(add("export", help="a run of jaxforge as a PyTorch checkpoint"))
    inspecting = commands.add_parser("inspect", help="what a checkpoint holds")
    inspecting.add_argument("path")
    inspecting.add_argument("--json", action="store_true")
    inspecting.set_defaults(run=_inspect)
    verifying = add("verify", help="whether two checkpoints hold the same")
    verifying.add_argument("a")
    verifying.add_argument("b")
    _add_reading(verifying)
    verifying.add_argument("--max-memory", type=Size, default=Size("256MiB"))
    verifying.add_argument("--json", action="store_true")
    verifying.set_defaults(run=_verify, fill_optimizer=False)
    _add_lockstep(add("lockstep", help="a torch model and ours, run side by side: what differs"))
    return parser


def _add_converting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint, or a directory with `latest` or steps")
    parser.add_argument("destination",
                        help="jaxforge: the run directory to make; hf: the directory; pt: the "
                             "file; dcp: where step_<n> appears")  # fmt: skip
    parser.add_argument("--to", choices=["jaxforge", "dcp", "pt", "hf"], required=True)
    _add_reading(parser, dialect="--from-dialect")
    _add_fill(parser)
    _add_target(parser)
    _add_writing(parser)
    parser.set_defaults(run=_convert)


def _add_importing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a checkpoint, or a directory with `latest` or steps")
    parser.add_argument("destination", help="the run directory to make")
    _add_reading(parser)
    _add_fill(parser)
    _add_writing(parser)
    parser.set_defaults(run=_import, to="jaxforge", dialect=None, layout=None, ranks=1, stages=1,
                        max_shard_size=_LARGEST_FILE)  # fmt: skip


def _add_exporting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a run directory, or one of its checkpoints")
    parser.add_argument("destination", help="hf: the directory; pt: the file; "
                        "dcp: where step_<n> appears")  # fmt: skip
    parser.add_argument("--to", choices=["dcp", "pt", "hf"], required=True)
    parser.add_argument("--config", type=Path, help="instead of the config in the checkpoint")
    _add_target(parser)
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer out")
    _add_writing(parser)
    parser.set_defaults(run=_export, from_dialect=None, fill_optimizer=False, resize_vocab=False)


def _add_reading(parser: argparse.ArgumentParser, dialect: str = "--dialect") -> None:
    parser.add_argument(
        "--config", type=Path, help="the TOML file of the run (DCP and .pt need one)"
    )
    parser.add_argument(dialect, metavar="NAME", dest="from_dialect",
                        help=f"by default found from the keys: {_DIALECTS}")  # fmt: skip
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer")
    parser.add_argument("--resize-vocab", action="store_true",
                        help="cut a padded vocabulary off, or pad with zeros")  # fmt: skip


def _add_fill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fill-optimizer", action="store_true",
                        help="start optimizer state that is missing from zero")  # fmt: skip


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dialect", metavar="NAME", help=f"whose names to use: {_DIALECTS}")
    parser.add_argument("--layout", choices=["nested", "flat"],
                        help="of optimizer state in DCP; by default the dialect's")  # fmt: skip
    parser.add_argument("--ranks", type=positive_int, default=1,
                        help="data-parallel ranks that will go on with it (1)")  # fmt: skip
    parser.add_argument("--stages", type=positive_int, default=1,
                        help="pipeline stages that will, each with its own DCP (1)")  # fmt: skip
    parser.add_argument("--max-shard-size", type=Size, default=_LARGEST_FILE,
                        help="of a safetensors file (5GB)")  # fmt: skip


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="of the weights; by default as they are")  # fmt: skip
    parser.add_argument("--max-memory", type=Size, default=Size("256MiB"),
                        help="for tensors on their way (256MiB)")  # fmt: skip
    parser.add_argument(
        "--processes", type=positive_int, default=1, help="work on so many cores (1)"
    )
    parser.add_argument("--process", type=_share, default=Share(), metavar="I/N",
                        help="be process I of N, started elsewhere too")  # fmt: skip
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # of a process: its source
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")


def _add_lockstep(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--torch", required=True, metavar="MODULE:FACTORY",
        help="what makes the torch module, and perhaps its optimizer and loss")  # fmt: skip
    add("--checkpoint", required=True, metavar="PATH", help="weights of both")
    add("--config", type=Path, help="the TOML file of the run (DCP needs one)")
    add("--dialect", metavar="NAME", help=f"the module's names; by default found: {_DIALECTS}")
    add("--loaded", action="store_true", help="the factory has loaded the weights itself")
    add("--batch", type=Path, metavar="FILE.npz",
        help="input_ids and labels, [b, s]; by default of the config's data")  # fmt: skip
    add("--rows", type=positive_int, default=2, help="of a batch that is drawn (2)")
    add("--tokens", type=positive_int, default=64, help="of each of its rows (64)")
    add("--json", action="store_true")
    parser.set_defaults(run=_lockstep)


def _share(text: str) -> Share:
    process, _, processes = text.partition("/")
    share = Share(int(process), int(processes))
    if not 0 <= share.process < share.processes:
        raise ValueError(text)
    return share


def _import(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    request = _request(args, overrides)
    if request.source.format == "jaxforge":
        raise UserError(f"{request.source.directory} is a run of jaxforge already")
    return _run(args, request)


def _export(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    request = _request(args, overrides)
    if request.source.format != "jaxforge":
        raise UserError(f"{request.source.directory}: export takes a run of jaxforge; import it")
    return _run(args, request)


def _convert(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    request = _request(args, overrides)
    _check_options(args, request.source)
    return _run(args, request)


def _check_options(args: argparse.Namespace, source: "CheckpointRef") -> None:
    """Check that options that are given have an effect.

    Raises:
        UserError: the source or the format asked for has no use for one.
    """
    shard_size = args.max_shard_size is not _LARGEST_FILE
    of_target = {
        "dcp": {"--layout": args.layout, "--ranks": args.ranks > 1, "--stages": args.stages > 1},
        "hf": {"--max-shard-size": shard_size},
    }
    for to, options in of_target.items():
        for option, is_given in options.items():
            if is_given and to != args.to:
                raise UserError(f"{option} is for --to {to}: remove it with --to {args.to}")
    if args.dialect and args.to == "jaxforge":
        raise UserError(
            "--dialect says whose names to write, and a run has jaxforge's own: remove it; "
            "--from-dialect says whose names the source has"
        )
    of_source = {
        "--from-dialect": args.from_dialect, "--resize-vocab": args.resize_vocab,
        "--fill-optimizer": args.fill_optimizer,
    }  # fmt: skip
    useless = [option for option, is_given in of_source.items() if is_given]
    if useless and source.format == "jaxforge":
        raise UserError(f"{useless[0]}: {source.directory} is a run of jaxforge: remove it")
    if args.fill_optimizer and (args.to == "hf" or args.weights_only or source.format == "hf"):
        raise UserError("--fill-optimizer: no optimizer state is converted here: remove it")


def _request(args: argparse.Namespace, overrides: Sequence[str]) -> "Request":
    from jaxforge.storage import urls
    from torch_compat.checkpoint import checkpoints
    from torch_compat.convert.source import Request

    destination = urls.path(args.destination)
    if args.to == "pt" and urls.in_bucket(destination):
        raise UserError(f"{destination}: --to pt writes a local file: copy that to the bucket")
    if urls.in_bucket(destination) and args.process.processes > 1 and not args.worker:
        raise UserError(
            f"{destination}: what goes to a bucket gathers on one machine first: leave --process "
            "out; --processes N works on N of its cores"
        )
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
    )


def _run(args: argparse.Namespace, request: "Request") -> int:
    """Plan a conversion, say what it does, and run it unless this is a dry run."""
    from rich.console import Console

    from jaxforge.storage import urls
    from torch_compat.checkpoint.progress import bar
    from torch_compat.convert import conversion

    console = Console(stderr=True, highlight=False)
    plan = conversion.plan(request)
    notes, run = plan.notes, conversion.run
    if urls.in_bucket(request.destination):
        from torch_compat.convert import upload  # here, as its clients take a second to import

        notes, run = (*notes, *upload.notes(request)), upload.run
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
        for d in result.differences[:_SHOWN]:
            table.add_row(*map(escape, (d.name, d.what, f"{d.largest:.3g}", d.note)))
        console.print(table)
        if (more := len(result.differences) - _SHOWN) > 0:
            console.print(f"... and {more} more")
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    of_settings = sum(d.what == "settings" for d in result.differences)
    counts = {"tensors": (len(result.differences) - of_settings, result.compared)}
    if result.settings:
        counts["place, schedule and optimizer"] = (of_settings, result.settings)
    for what, (differ, of) in counts.items():
        verdict = f"{differ} of {of} differ" if differ else f"{of} are the same"
        console.print(f"{what}: {verdict}")


def _lockstep(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    from torch_compat.lockstep import command  # imports JAX: two seconds

    job = command.Job(
        spec=args.torch, checkpoint=args.checkpoint, config=args.config, overrides=overrides,
        batch=args.batch, size=(args.rows, args.tokens), dialect=args.dialect, loaded=args.loaded,
    )  # fmt: skip
    report = command.lockstep(job)
    command.print_report(report, args.json)
    return 0 if report.same else 1


def entry() -> int:
    """Run the command as this process was called, and return its exit code."""
    return run_main(main)


if __name__ == "__main__":
    raise SystemExit(entry())
