"""Execution and output of `jaxforge plan`."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxforge.cli.running import wide_console, write_text
from jaxforge.config.reading import load
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.resolution import World, resolve
from jaxforge.data.sources import sequences_per_epoch
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.parallel.groups import REPLICAS
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import describe_mesh
from jaxforge.parallel.rates import rate_along
from jaxforge.step import executable
from jaxforge.telemetry.numbers import human
from jaxforge.tools.plan import search
from jaxforge.tools.plan.plan import Plan, as_json, bubble, collectives_by_wait, plan
from jaxforge.tools.plan.topology import Topology

_COLLECTIVES_SHOWN = 8


def run(args: argparse.Namespace, topology: Topology, overrides: Sequence[str]) -> int:
    """Plan or search, print the result, and return the exit code.

    Args:
        args: parsed command line.
        topology: the target hardware; `Topology.prepare` has set the environment.
        overrides: settings over the config.

    Raises:
        UserError: a configuration cannot be read, or the compiler is not installed.
    """
    console = wide_console()
    if args.search:
        config = load.load_unresolved(args.config, list(overrides))
        return _search(args, topology, config, console)
    saves = args.save_executable is not None
    planned = plan_devices(args.config, overrides, topology, every_size=saves)
    if args.json:
        _print_json(as_json(planned))
    else:
        print_plan(console, planned)
    _save_executable(args, planned)
    return Exit.COMPLETED.code if planned.fits else Exit.USER_ERROR.code


def plan_devices(
    path: str, overrides: Sequence[str], topology: Topology, *, every_size: bool = False
) -> Plan:
    """Return the plan of a config file; errors of reading it are `Plan.errors`."""
    try:
        config = load.load_unresolved(path, list(overrides))
    except UserError as error:
        return Plan(topology, errors=str(error).splitlines())
    return plan(config, topology, every_size=every_size)


def _search(
    args: argparse.Namespace, topology: Topology, config: UnresolvedConfig, console: Console
) -> int:
    resolved = resolve(config, World(topology.n_devices), sequences_per_epoch).config
    candidates = search.search(
        resolved, topology, most=args.search, jobs=args.jobs, console=Console(stderr=True)
    )
    if args.json:
        _print_json(
            [
                {"settings": search.settings(candidate.candidate), **candidate.report}
                for candidate in candidates
            ]
        )
    else:
        named = [(_name(candidate.candidate), candidate.report) for candidate in candidates]
        console.print(comparison_table(named))
        console.print("The best:", *search.settings(candidates[0].candidate), soft_wrap=True)
    # The fastest is first: if it does not run, none does.
    if not candidates[0].tokens_per_second:
        return Exit.USER_ERROR.code
    if args.output:
        write_text("--output", Path(args.output), candidates[0].candidate.config.to_toml())
    if args.save_executable:
        _save_executable(args, plan(candidates[0].candidate.config, topology, every_size=True))
    return Exit.COMPLETED.code


def _name(candidate: search.Candidate) -> str:
    train = candidate.config.train
    split = f"{train.grad_accum_steps} x {train.batch_size} rows"
    flags = [f"{name}={value}" for name, value in train.xla_flags.items()]
    parts = [describe_mesh(candidate.mesh), split, train.activation_checkpointing, train.grad_sync]
    return "; ".join([*parts, *flags])


def _save_executable(args: argparse.Namespace, planned: Plan) -> None:
    path, step = args.save_executable, planned.step
    if path and step is not None and planned.fits:
        try:
            executable.write(path, step.executables, step.config, step.mesh)
        except OSError as error:
            raise UserError(f"--save-executable {path}: {error.strerror}") from error


def _print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()


def comparison_table(named: Iterable[tuple[str, dict[str, Any]]]) -> Table:
    """Return a table of plans, one row per name and `--json` report."""
    table = Table(title="estimates", title_justify="left")
    table.add_column("plan")
    for name in ("memory", "of the device", "tokens/s", "MFU", "waiting", "compiled in"):
        table.add_column(name, justify="right")
    for name, report in named:
        memory, step = report.get("memory_per_device"), report.get("step")
        cells = ["-"] * 6
        if memory:
            share = memory["peak_bytes"] / memory["capacity_bytes"]
            cells[:2] = format_gb(memory["peak_bytes"]), f"{share:.0%}"
            cells[5] = f"{report['compile_seconds']:.0f} s"
        if step:
            waiting = step["waited_seconds"] / step["seconds"]
            cells[2:5] = human(step["tokens_per_second"]), f"{step['mfu']:.1%}", f"{waiting:.0%}"
        table.add_row(name, *cells, style=None if report["fits"] else "dim")
    return table


def print_plan(console: Console, planned: Plan) -> None:
    """Print a plan as tables and a verdict."""
    for error in planned.errors:
        console.print(f"[red]error[/]: {escape(error)}", highlight=False, soft_wrap=True)
    for warning in planned.warnings:
        console.print(f"[yellow]warning[/]: {escape(warning)}", highlight=False, soft_wrap=True)
    for title, rows in _parts(planned):
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        table.add_column(style="dim")
        table.add_column(justify="right")
        table.add_column()
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(verdict(planned), highlight=False, soft_wrap=True)
    for item in planned.advice:
        console.print(f"  - {escape(item)}", highlight=False, soft_wrap=True)


def verdict(planned: Plan) -> str:
    """Return in one sentence whether the run fits."""
    if planned.step is None:
        return f"{planned.topology}: a run would be refused"
    memory = planned.step.memory
    share = f"{format_gb(memory.peak)} of {format_gb(memory.capacity)} per device"
    if planned.fits:
        return f"{planned.topology}: it fits, {share} ({memory.peak / memory.capacity:.0%})"
    return f"{planned.topology}: it does not fit, {share}. What helps:"


def format_gb(n: float) -> str:
    """Format bytes in units of 10^9."""
    return f"{n / 1e9:,.1f} GB"


def _parts(planned: Plan) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    if planned.step is not None:
        mesh = describe_mesh(planned.step.mesh.shape)
        yield f"Memory of a device ({planned.topology}, {mesh})", list(_memory(planned))
        if planned.step.between_groups is not None:
            yield "Sent between groups by a device, per update", list(_between_groups(planned))
    if planned.timeline is not None and planned.timeline.traffic:
        yield "Collectives of a step, on a device", list(_collectives(planned))
    if planned.estimate is not None:
        yield "A step (an estimate)", list(_step(planned))


def _memory(planned: Plan) -> Iterator[tuple[str, str, str]]:
    assert planned.step is not None
    memory = planned.step.memory
    for name, size in memory.parts.items():
        yield name, format_gb(size), ""
    yield "at the peak", format_gb(memory.peak), f"of {format_gb(memory.capacity)}"
    train = planned.step.config.train
    yield "gradients", f"per {train.grad_sync}", ""
    yield "recomputation", train.activation_checkpointing, planned.step.why
    if idle := bubble(planned):
        yield "pipeline", f"{idle:.1%}", "idle"
    yield "compiled in", f"{planned.step.seconds:.1f} s", ""


def _between_groups(planned: Plan) -> Iterator[tuple[str, str, str]]:
    step = planned.step
    assert step is not None
    traffic, chip = step.between_groups, CHIPS.get(planned.topology.chip)
    assert traffic is not None
    rows = {
        f"{traffic.groups} groups that exchange every {traffic.interval} updates": traffic.apart,
        "if they trained together": traffic.together,
    }
    for name, sent in rows.items():
        seconds = ""
        if chip is not None and traffic.groups > 1:
            seconds = f"{sent / rate_along(step.mesh, (REPLICAS,), chip):.2g} s"
        yield name, f"{human(sent)}B", seconds
    yield "in the seconds below", "0 B", "they are those of an update without an exchange"


def _collectives(planned: Plan) -> Iterator[tuple[str, str, str]]:
    assert planned.timeline is not None
    collectives = collectives_by_wait(planned.timeline)
    for key, item in collectives[:_COLLECTIVES_SHOWN]:
        where = "in a loop" if key.in_loop else "once"
        how = "overlapped" if key.overlapped else "exposed"
        times = f"{item.count:,.0f} x {key.kind} over {' x '.join(key.axes) or 'nothing'}"
        waits = f", {1e3 * item.waited:.1f} ms of waiting" if item.waited else ""
        yield times, format_gb(item.bytes), f"{where}, {how}{waits}"
    if len(collectives) > _COLLECTIVES_SHOWN:
        yield f"and {len(collectives) - _COLLECTIVES_SHOWN} more kinds", "", ""


def _step(planned: Plan) -> Iterator[tuple[str, str, str]]:
    estimate = planned.estimate
    assert estimate is not None
    yield "seconds", f"{estimate.seconds:.3f}", estimate.estimated_from
    for kind, seconds in sorted(estimate.seconds_by_kind.items(), key=lambda item: -item[1]):
        yield f"  {kind}", f"{seconds:.3f}", f"{seconds / estimate.seconds:.0%}"
    waited = estimate.waited_seconds
    yield "  waiting for collectives", f"{waited:.3f}", f"{waited / estimate.seconds:.0%}"
    yield "tokens/s per device", f"{estimate.tokens_per_second_per_device:,.0f}", ""
    yield "tokens/s", human(estimate.tokens_per_second), ""
    peak = CHIPS[planned.topology.chip].peak_flops / 1e12
    yield "MFU", f"{estimate.mfu:.1%}", f"of {peak:,.0f} TFLOP/s; {estimate.mfu_causal:.1%} causal"
    hours = f"{estimate.device_hours:,.0f} device hours"
    yield "hours to max_steps", f"{estimate.hours_to_max_steps:,.1f}", hours
