"""`python -m torch_compat COMMAND`: checkpoints to and from PyTorch.

    import SRC DST [--config FILE]       a DCP or Hugging Face checkpoint as a run of jaxforge
    export SRC DST --to dcp|hf           a run of jaxforge as a DCP or Hugging Face checkpoint
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
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxforge import storage
from jaxforge.cli import program, run_main
from jaxforge.errors import UserError
from jaxforge.parallel import host_memory
from torch_compat import checkpoints, commands
from torch_compat.commands import Size
from torch_compat.dcp_state import Options
from torch_compat.inspection import inspect
from torch_compat.name_maps import NAME_MAPS
from torch_compat.progress import bar
from torch_compat.staging import Share
from torch_compat.verify import Verified, verify
from torch_compat.workers import Workers

_SHOWN = 30
_DIALECTS = ", ".join(NAME_MAPS) + ", or one that a plugin of the run's config registers"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, returns the exit code."""
    host_memory.share_heaps()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step at WARNING
    argv = list(sys.argv[1:] if argv is None else argv)
    args, overrides = _parser().parse_known_args(argv, argparse.Namespace(argv=argv))
    for unknown in overrides:
        if not unknown.startswith("--") or "." not in unknown.partition("=")[0]:
            _parser().error(f"unrecognized argument {unknown}")
    return args.run(args, overrides)


def _import(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    destination = _destination(args)
    job = commands.Import(
        source=_source(args),
        destination=destination,
        config=args.config,
        overrides=overrides,
        options=_options(args),
        dtype=args.dtype,
        max_memory=args.max_memory.bytes,
    )
    return _convert(args, job)


def _export(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    destination = _destination(args)
    job = commands.Export(
        source=_source(args),
        destination=destination,
        to=args.to,
        config=args.config,
        overrides=overrides,
        dialect=args.dialect,
        layout=args.layout,
        ranks=args.ranks,
        stages=args.stages,
        weights_only=args.weights_only,
        dtype=args.dtype,
        largest_file=args.max_shard_size.bytes,
        max_memory=args.max_memory.bytes,
    )
    return _convert(args, job)


def _convert(args: argparse.Namespace, job: "commands.Import | commands.Export") -> int:
    console = Console(stderr=True, highlight=False)
    plan = job.plan()
    notes, run = plan.notes, job.run
    if storage.in_bucket(job.destination):
        from torch_compat import upload  # here, as its clients take a second to import

        notes, run = (*notes, *upload.notes(job)), functools.partial(upload.run, job)
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
        workers = Workers(args.argv, str(job.source.directory), args.processes)
    with workers, bar(plan.nbytes // share.processes, console, quiet=share.process > 0) as advance:
        done = run(plan, share, advance, workers)
    if done:
        print(done)
    return 0


def _inspect(args: argparse.Namespace, _: Sequence[str]) -> int:
    report = inspect(checkpoints.find(args.path))
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    tensors = report.pop("tensors")
    for key, value in report.items():
        console.print(f"{key}: {value}", markup=False)
    table = Table("tensor", "dtype", "shape", "chunks")
    for name, tensor in tensors.items():
        row = (name, tensor["dtype"], str(tensor["shape"]), str(tensor["chunks"]))
        table.add_row(*map(escape, row))
    console.print(table)
    return 0


def _verify(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    result = verify(
        checkpoints.find(args.a), checkpoints.find(args.b), args.config, overrides,
        _options(args), args.max_memory.bytes,
    )  # fmt: skip
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        _print_differences(result)
    return 0 if result.same else 1


def _lockstep(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    from torch_compat.lockstep import command  # here, as it imports JAX: two seconds

    job = command.Job(
        spec=args.torch, checkpoint=args.checkpoint, config=args.config, overrides=overrides,
        batch=args.batch, size=(args.rows, args.tokens), dialect=args.dialect, loaded=args.loaded,
    )  # fmt: skip
    report = command.lockstep(job)
    command.print_report(report, args.json)
    return 0 if report.same else 1


def _print_differences(result: Verified) -> None:
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
    for what, (count, of) in counts.items():
        verdict = f"{count} of {of} differ" if count else f"{of} are the same"
        console.print(f"{what}: {verdict}")


def _source(args: argparse.Namespace) -> checkpoints.CheckpointRef:
    return checkpoints.find(args.worker[1] if args.worker else args.source)


def _destination(args: argparse.Namespace) -> Path:
    place = storage.path(args.destination)
    if storage.in_bucket(place) and args.process.processes > 1 and not args.worker:
        raise UserError(
            f"{place}: what goes to a bucket gathers on one machine first: leave --process out; "
            "--processes N works on N of its cores"
        )
    return place


def _options(args: argparse.Namespace) -> Options:
    return Options(
        dialect=args.dialect,
        weights_only=args.weights_only,
        fill_optimizer=getattr(args, "fill_optimizer", False),
        resize_vocab=args.resize_vocab,
    )


def _parser() -> argparse.ArgumentParser:
    about, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog=program("torch_compat"), description=about, epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = functools.partial(parser.add_subparsers(required=True, metavar="COMMAND").add_parser)
    importing = add("import", help="a PyTorch checkpoint as a run of jaxforge")
    importing.add_argument("source", help="a checkpoint, or a directory with `latest` or steps")
    importing.add_argument("destination", help="the run directory to make")
    _add_reading(importing)
    importing.add_argument("--fill-optimizer", action="store_true",
                           help="start optimizer state that is missing from zero")  # fmt: skip
    _add_writing(importing)
    importing.set_defaults(run=_import)
    exporting = add("export", help="a run of jaxforge as a PyTorch checkpoint")
    exporting.add_argument("source", help="a run directory, or one of its checkpoints")
    exporting.add_argument("destination", help="hf: the directory; dcp: where step_<n> appears")
    exporting.add_argument("--to", choices=["dcp", "hf"], required=True)
    exporting.add_argument("--config", type=Path, help="instead of the config in the checkpoint")
    exporting.add_argument("--dialect", metavar="NAME", help=f"whose names to use: {_DIALECTS}")
    exporting.add_argument("--layout", choices=["nested", "flat"],
                           help="of optimizer state in DCP; by default the dialect's")  # fmt: skip
    exporting.add_argument("--ranks", type=_count, default=1,
                           help="data-parallel ranks that will go on with it (1)")  # fmt: skip
    exporting.add_argument("--stages", type=_count, default=1,
                           help="pipeline stages that will, each with its own DCP (1)")  # fmt: skip
    exporting.add_argument("--weights-only", action="store_true", help="leave the optimizer out")
    exporting.add_argument("--max-shard-size", type=Size, default=Size("5GB"),
                           help="of a safetensors file (5GB)")  # fmt: skip
    _add_writing(exporting)
    exporting.set_defaults(run=_export)
    inspecting = add("inspect", help="what a checkpoint holds")
    inspecting.add_argument("path")
    inspecting.add_argument("--json", action="store_true")
    inspecting.set_defaults(run=_inspect)
    verifying = add("verify", help="whether two checkpoints hold the same")
    verifying.add_argument("a")
    verifying.add_argument("b")
    _add_reading(verifying)
    verifying.add_argument("--max-memory", type=Size, default=Size("256MiB"))
    verifying.add_argument("--json", action="store_true")
    verifying.set_defaults(run=_verify)
    _add_lockstep(add("lockstep", help="a torch model and ours, run side by side: what differs"))
    return parser


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
    add("--rows", type=_count, default=2, help="of a batch that is drawn (2)")
    add("--tokens", type=_count, default=64, help="of each of its rows (64)")
    add("--json", action="store_true")
    parser.set_defaults(run=_lockstep)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="the TOML file of the run (DCP needs one)")
    parser.add_argument("--dialect", metavar="NAME",
                        help=f"by default found from the keys: {_DIALECTS}")  # fmt: skip
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer")
    parser.add_argument("--resize-vocab", action="store_true",
                        help="cut a padded vocabulary off, or pad with zeros")  # fmt: skip


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="of the weights; by default as they are")  # fmt: skip
    parser.add_argument("--max-memory", type=Size, default=Size("256MiB"),
                        help="for tensors on their way (256MiB)")  # fmt: skip
    parser.add_argument("--processes", type=_count, default=1, help="work on so many cores (1)")
    parser.add_argument("--process", type=_share, default=Share(), metavar="I/N",
                        help="be process I of N, started elsewhere too")  # fmt: skip
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # of a process: its source
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


def _share(text: str) -> Share:
    process, _, processes = text.partition("/")
    share = Share(int(process), int(processes))
    if not 0 <= share.process < share.processes:
        raise ValueError(text)
    return share


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main)


if __name__ == "__main__":
    raise SystemExit(entry())
