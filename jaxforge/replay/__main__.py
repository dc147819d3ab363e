"""`python -m jaxforge.replay RUN --step N` (or `--steps A:B`): makes steps of a run again.

State and batch come from the nearest checkpoint before, exactly, on whatever devices are here. With
one step, says what happened in it: the loss of every document with its text, which documents the
gradient comes from and what the step would have been without them, and layer by layer what differs
from the steps around it. With several, whether they are what was logged. With `--against`, which
value is the first that differs from another run's step, or from its own under other settings.
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jaxforge import storage
from jaxforge.cli import run_main
from jaxforge.errors import UserError
from jaxforge.parallel import host_memory, multihost
from jaxforge.replay import compare
from jaxforge.replay.account import Account, Made, Suspect, account, as_json, replayed
from jaxforge.replay.against import Way, against
from jaxforge.replay.past import open_past
from jaxforge.telemetry.console import setup_logging

_STDOUT = Path("-")
_SHOWN = 60  # characters of a text in the table


def main(argv: Sequence[str] | None = None) -> int:
    """Replays, prints tables, writes JSON."""
    args, overrides = _parser().parse_known_args(argv)
    first, last = _range(args)
    setup_logging(Console(stderr=True))
    host_memory.keep_freed_memory()
    multihost.initialize()
    if args.against:
        return _against(args, overrides)
    run = storage.path(args.run)
    if args.steps:
        exact = _print_steps(_console(), replayed(run, first, last, overrides))
        return 0 if exact or not args.check else 1
    with open_past(run, first, overrides) as past:
        found = account(past, first, around=args.around, rows=args.rows)
    if jax.process_index() == 0:
        if args.json:
            _write(args.json, found)
        if args.json != _STDOUT:
            _print(_console(), found, args.top)
    exact = found.made.difference in (None, 0.0)
    return 0 if exact or not args.check else 1


def _against(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Exit code 1 where something differs."""
    one = Way(storage.path(args.run), overrides)
    other = Way(storage.path(args.against), [*overrides, *args.other])
    rows, notes = against(one, other, args.step)
    if args.json:
        _write_json(args.json, {**compare.as_json(rows), "notes": notes})
    if args.json != _STDOUT:
        compare.show(_console(), rows, ("RUN", "OTHER"))
        for note in notes:
            _console().print(f"note: {note}", markup=False)
    return 0 if compare.first_difference(rows) is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxforge.replay",
        usage="%(prog)s RUN (--step N | --steps A:B) [--against OTHER] [options] "
        "[--section.key=value ...]",
        description="Makes steps of a run again, and says what happened in one.",
        epilog="Settings of the run's config, such as --distributed.tp=2, may follow.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="the step to look at, from 1")
    which.add_argument("--steps", metavar="A:B", help="steps to compare with what was logged")
    add("--around", type=int, default=2, metavar="N",
        help="steps before and after, to compare layers with (default: 2)")  # fmt: skip
    add("--rows", type=int, default=4, metavar="N",
        help="rows of the batch to take apart into documents (default: 4)")  # fmt: skip
    add("--top", type=int, default=8, metavar="N", help="documents and layers to show (default: 8)")
    add("--against", metavar="OTHER", help="a run whose step to compare with this one's")
    add("--other", metavar="SETTING", action="append", default=[],
        help="of OTHER alone, such as --other=--distributed.tp=2")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help='write all of it as JSON; "-" to stdout')
    add(
        "--check", action="store_true", help="exit code 1 unless it is what was logged, bit for bit"
    )
    return parser


def _range(args: argparse.Namespace) -> tuple[int, int]:
    for name, least in (("around", 0), ("rows", 1), ("top", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name}: expected {least} or more")
    if args.other and not args.against:
        raise UserError("--other is of the run that --against names, which may be RUN itself")
    if args.steps and args.against:
        raise UserError("--against is for one step: use --step")
    if args.steps is None:
        return args.step, args.step
    first, colon, last = args.steps.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UserError(f"--steps {args.steps}: expected A:B, the first step and the last, from 1")
    if args.json:
        raise UserError("--json is for one step: use --step")
    return int(first), int(last)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def _print_steps(console: Console, steps: Iterable[Made]) -> bool:
    """A row each, as they are made; whether all are what was logged."""
    all_exact = True
    console.print(f"{'step':>8} {'loss':>14} {'grad norm':>14}  logged", highlight=False)
    for one in steps:
        all_exact &= one.difference in (None, 0.0)
        console.print(
            f"{one.step:8} {one.loss:14.9g} {one.grad_norm:14.9g}  {_compared(one)}",
            highlight=False,
        )
    return all_exact


def _compared(one: Made) -> str:
    if one.difference is None:
        return "not logged"
    applied = "" if one.applied else ", update left out"
    if one.difference == 0:
        return f"the same{applied}"
    return f"{one.difference:.1e} apart{applied}"


def _print(console: Console, found: Account, top: int) -> None:
    one = found.made
    console.print(
        f"[bold]step {one.step}[/]: loss {one.loss:.6g}, gradient norm {one.grad_norm:.6g}; "
        f"logged: {_compared(one)}",
        highlight=False,
    )
    console.print(_documents(found, top))
    if found.without_first:
        loss, norm = found.without_first
        console.print(
            f"without the first: loss {loss:.6g}, gradient norm {norm:.6g}", highlight=False
        )
    if found.odd:
        console.print(_layers(found, top))


def _documents(found: Account, top: int) -> Table:
    table = Table(title=f"documents of the step ({min(top, len(found.suspects))} of "
                  f"{len(found.suspects)})", title_justify="left")  # fmt: skip
    table.add_column("where", overflow="fold")
    for name in ("tokens", "loss", "own norm", "norm without"):
        table.add_column(name, justify="right")
    table.add_column("text", overflow="fold")
    for suspect in found.suspects[:top]:
        table.add_row(*_cells(suspect))
    return table


def _cells(suspect: Suspect) -> tuple[str, ...]:
    one, influence = suspect.document, suspect.influence
    own = f"{influence.norm:.4g}" if influence else "-"
    without = f"{influence.without:.4g}" if influence else "-"
    text = _line(suspect.text)
    if one.worst_loss > one.loss and suspect.worst_text:
        text += f"\nworst ({one.worst_loss:.3g}): {_line(suspect.worst_text)}"
    where = f"{suspect.name}, {one.start}:{one.end}"
    return where, str(one.tokens), f"{one.loss:.4g}", own, without, text


def _line(text: str) -> str:
    """On one line, without markup."""
    return repr(text)[1:-1][:_SHOWN].replace("[", "\\[")


def _layers(found: Account, top: int) -> Table:
    steps = [step for step in found.norms if step != found.made.step]
    table = Table(title=f"what differs most from steps {min(steps)} to {max(steps)}",
                  title_justify="left")  # fmt: skip
    for name in ("part", "norm of", "here", "to their median"):
        table.add_column(name, justify="left" if name in ("part", "norm of") else "right")
    here = found.norms[found.made.step]
    for part, name, ratio in found.odd[:top]:
        value = here.norms[name][here.parts.index(part)]
        table.add_row(part, name, f"{value:.4g}", f"{ratio:.3g}")
    return table


def _write(path: Path, found: Account) -> None:
    _write_json(path, as_json(found))


def _write_json(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, ensure_ascii=False) + "\n"
    if path == _STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from error


if __name__ == "__main__":
    raise SystemExit(run_main(functools.partial(main, None), uses_devices=True))
