"""What each command of `torch_compat` does: `__main__` has read the command line."""

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

from jaxforge.errors import UserError
from jaxforge.parallel import host_memory
from jaxforge.storage import urls
from torch_compat.checkpoint import checkpoints, inspection
from torch_compat.checkpoint.dcp_state import Options
from torch_compat.checkpoint.progress import bar
from torch_compat.convert import commands
from torch_compat.convert.verify import Verified, verify
from torch_compat.formats.workers import Share, Workers

_SHOWN = 30


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Runs the command that `args.command` names; its exit code."""
    host_memory.share_heaps()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step at WARNING
    does = {
        "import": _import,
        "export": _export,
        "inspect": _inspect,
        "verify": _verify,
        "lockstep": _lockstep,
    }
    return does[args.command](args, overrides)


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
    if urls.in_bucket(job.destination):
        from torch_compat.convert import upload  # here, as its clients take a second to import

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
    report = inspection.inspect(checkpoints.find(args.path))
    print(inspection.as_json(report) if args.json else inspection.as_text(report))
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
    place = urls.path(args.destination)
    if urls.in_bucket(place) and args.process.processes > 1 and not args.worker:
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
