"""`python -m torch_compat import | export | inspect | verify`: checkpoints to and from PyTorch.

    import SRC DST [--config FILE]       a DCP or Hugging Face checkpoint as a run of jaxforge
    export SRC DST --to dcp|hf           a run of jaxforge as a DCP or Hugging Face checkpoint
    inspect PATH [--json]                what a checkpoint of any format holds
    verify A B [--json]                  whether two hold the same (exit code 1 where they do not)

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
from rich.table import Table

from jaxforge.cli import run_main
from jaxforge.errors import UserError
from jaxforge.parallel import host_memory
from torch_compat import checkpoints, commands
from torch_compat.commands import Size
from torch_compat.dcp_state import Options
from torch_compat.inspection import inspect
from torch_compat.names import DIALECTS
from torch_compat.progress import bar
from torch_compat.staging import Share

_SHOWN = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, returns the exit code."""
    host_memory.share_heaps()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step at WARNING
    argv = list(sys.argv[1:] if argv is None else argv)
    args, overrides = _parser().parse_known_args(argv)
    for unknown in overrides:
        if not unknown.startswith("--") or "." not in unknown.partition("=")[0]:
            _parser().error(f"unrecognized argument {unknown}")
    return args.run(args, overrides)


def _import(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    job = commands.Import(
        source=checkpoints.find(args.source),
        destination=_local(args.destination),
        config=args.config,
        overrides=overrides,
        options=_options(args),
        dtype=args.dtype,
        max_memory=args.max_memory.bytes,
    )
    return _convert(args, job)


def _export(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    job = commands.Export(
        source=checkpoints.find(args.source),
        destination=_local(args.destination),
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
    if args.process.process == 0:
        console.print(plan.summary, markup=False, soft_wrap=True)
        for note in plan.notes:
            console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    if args.dry_run:
        return 0
    share = args.process
    workers = []
    if args.processes > 1 and share.processes == 1:
        share = Share(0, args.processes)
        workers = commands.start_workers(sys.argv[1:], args.processes)
    try:
        with bar(plan.nbytes // share.processes, console, quiet=share.process > 0) as advance:
            check = functools.partial(commands.check_workers, workers)
            done = job.run(plan, share, advance, check)
    finally:
        commands.end_workers(workers)
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
        table.add_row(name, tensor["dtype"], str(tensor["shape"]), str(tensor["chunks"]))
    console.print(table)
    return 0


def _verify(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    result = commands.verify(
        checkpoints.find(args.a), checkpoints.find(args.b), args.config, overrides,
        _options(args), args.max_memory.bytes,
    )  # fmt: skip
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        _print_differences(result)
    return 0 if result.same else 1


def _print_differences(result: "commands.Verified") -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    if result.differences:
        table = Table("tensor", "differs in", "largest difference", "")
        for d in result.differences[:_SHOWN]:
            table.add_row(d.name, d.what, f"{d.largest:.3g}", d.note)
        console.print(table)
        if (more := len(result.differences) - _SHOWN) > 0:
            console.print(f"... and {more} more")
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    count = len(result.differences)
    verdict = f"{count} of {result.compared} differ" if count else f"{result.compared} are the same"
    console.print(f"tensors: {verdict}")


def _local(path: str) -> Path:
    if "://" in path:
        raise UserError(f"{path}: write to a local or mounted directory, then copy it there")
    return Path(path)


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
        prog="python -m torch_compat", description=about, epilog=details,
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
    exporting.add_argument("--dialect", choices=list(DIALECTS), help="whose names to use")
    exporting.add_argument("--layout", choices=["nested", "flat"],
                           help="of optimizer state in DCP; by default the dialect's")  # fmt: skip
    exporting.add_argument("--ranks", type=int, default=1,
                           help="data-parallel ranks that will go on with it (1)")  # fmt: skip
    exporting.add_argument("--stages", type=int, default=1,
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
    return parser


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="the TOML file of the run (DCP needs one)")
    parser.add_argument("--dialect", choices=list(DIALECTS), help="by default found from the keys")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer")
    parser.add_argument("--resize-vocab", action="store_true",
                        help="cut a padded vocabulary off, or pad with zeros")  # fmt: skip


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="of the weights; by default as they are")  # fmt: skip
    parser.add_argument("--max-memory", type=Size, default=Size("256MiB"),
                        help="for tensors on their way (256MiB)")  # fmt: skip
    parser.add_argument("--processes", type=int, default=1, help="work on so many cores (1)")
    parser.add_argument("--process", type=_share, default=Share(), metavar="I/N",
                        help="be process I of N, started elsewhere too")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")


def _share(text: str) -> Share:
    process, _, processes = text.partition("/")
    share = Share(int(process), int(processes))
    if not 0 <= share.process < share.processes:
        raise ValueError(text)
    return share


if __name__ == "__main__":
    raise SystemExit(run_main(functools.partial(main, None)))
