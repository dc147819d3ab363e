"""Execution of `jaxforge replay`, and the tables that it prints."""

import argparse
from collections.abc import Iterable, Sequence

import jax
from rich.console import Console
from rich.table import Table

from jaxforge.cli.running import STDOUT, wide_console, write_json
from jaxforge.storage import urls
from jaxforge.telemetry.console import begin_command
from jaxforge.tools.replay.account import Account, RepeatedStep, Suspect, account, as_json, replayed
from jaxforge.tools.replay.past import open_past

_SHOWN = 60  # characters of a text in the table


def run(args: argparse.Namespace, overrides: Sequence[str], first: int, last: int) -> int:
    """Replay steps, print tables, write JSON, and return the exit code."""
    begin_command()
    run = urls.path(args.run)
    if args.steps:
        is_exact = _print_steps(wide_console(), replayed(run, first, last, overrides))
        return 0 if is_exact or not args.check else 1
    with open_past(run, first, overrides) as past:
        result = account(past, first, around=args.around)
    if jax.process_index() == 0:
        if args.json:
            write_json(args.json, as_json(result))
        if args.json != STDOUT:
            _print(wide_console(), result, args.top)
    is_exact = result.step.difference in (None, 0.0)
    return 0 if is_exact or not args.check else 1


def _print_steps(console: Console, steps: Iterable[RepeatedStep]) -> bool:
    """Print each step as it is replayed; return True if all match the log."""
    all_exact = True
    console.print(f"{'step':>8} {'loss':>14} {'grad norm':>14}  logged", highlight=False)
    for step in steps:
        all_exact &= step.difference in (None, 0.0)
        console.print(
            f"{step.step:8} {step.loss:14.9g} {step.grad_norm:14.9g}  {_compared(step)}",
            highlight=False,
        )
    return all_exact


def _compared(step: RepeatedStep) -> str:
    skipped = "" if step.applied or step.logged is None else ", update skipped"
    return f"{step.comparison}{skipped}"


def _print(console: Console, result: Account, top: int) -> None:
    step = result.step
    console.print(
        f"[bold]step {step.step}[/]: loss {step.loss:.6g}, gradient norm {step.grad_norm:.6g}; "
        f"logged: {_compared(step)}",
        highlight=False,
    )
    console.print(_documents(result, top))
    if result.odd:
        console.print(_layers(result, top))


def _documents(result: Account, top: int) -> Table:
    table = Table(title=f"documents of the step ({min(top, len(result.suspects))} of "
                  f"{len(result.suspects)})", title_justify="left")  # fmt: skip
    table.add_column("position", overflow="fold")
    for name in ("tokens", "loss"):
        table.add_column(name, justify="right")
    table.add_column("text", overflow="fold")
    for suspect in result.suspects[:top]:
        table.add_row(*_cells(suspect))
    return table


def _cells(suspect: Suspect) -> tuple[str, ...]:
    document, text = suspect.document, _line(suspect.text)
    if document.worst_loss > document.loss and suspect.worst_text:
        text += f"\nworst ({document.worst_loss:.3g}): {_line(suspect.worst_text)}"
    position = f"{suspect.name}, {document.start}:{document.end}"
    return position, str(document.tokens), f"{document.loss:.4g}", text


def _line(text: str) -> str:
    """Return a text shortened to one line, without markup."""
    return repr(text)[1:-1][:_SHOWN].replace("[", "\\[")


def _layers(result: Account, top: int) -> Table:
    steps = [step for step in result.norms if step != result.step.step]
    table = Table(title=f"largest deviations from steps {min(steps)} to {max(steps)}",
                  title_justify="left")  # fmt: skip
    for name in ("part", "norm of", "value", "ratio to median"):
        table.add_column(name, justify="left" if name in ("part", "norm of") else "right")
    layer_norms = result.norms[result.step.step]
    for part, name, ratio in result.odd[:top]:
        value = layer_norms.norms[name][layer_norms.parts.index(part)]
        table.add_row(part, name, f"{value:.4g}", f"{ratio:.3g}")
    return table
