"""`jaxforge report RUN [RUN ...]`: plot the metrics of runs as one HTML page.

RUN is the directory of a finished or active run. Several runs share the plots. The page is
self-contained: it can be opened from disk, mailed and printed. `--goodput` prints how the runs
spent their time instead.
"""

import argparse
import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError, printable
from jaxforge.storage import safe_files, urls

_AXES = ("steps", "tokens", "hours")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print its path, or print the accounts; return the exit code."""
    args = parser().parse_args(argv)
    runs = [urls.path(run) for run in args.runs]
    if args.goodput:
        return _print_goodput(runs, args)
    from jaxforge.runs.reading import read_runs
    from jaxforge.tools.report.run_page import page  # imported here, because they are slow

    output = _output(args.output, runs)
    readings = read_runs(runs)
    _warn(message for run in readings for message in run.omissions)
    html = page(readings, args.x)
    _write(output, html)
    print(f"{output}: {len(html.encode()) / 1e6:.2f} MB")
    return 0


def _warn(messages: Iterable[str]) -> None:
    for message in messages:
        print(f"warning: {printable(message)}", file=sys.stderr)


def _print_goodput(runs: Sequence[Path], args: argparse.Namespace) -> int:
    if args.output is not None:
        raise UserError("--goodput prints a table: remove --output")
    from jaxforge.runs import attempts
    from jaxforge.tools.report.tables import goodput_text

    texts = []
    for run in runs:
        by_process, damage = attempts.read(run)
        _warn(damage)
        if not by_process:
            raise UserError(
                f"{run} has no {attempts.file_name(0)}: no run directory, or its run has not begun "
                "with this version"
            )
        texts.append(goodput_text(str(run), by_process))
    print("\n\n".join(texts))
    return 0


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "report",
        description="Plot the metrics of runs as one HTML page that needs no network.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directory")
    parser.add_argument("--output", help="HTML file (default: RUN/report.html)")
    parser.add_argument("--x", choices=_AXES, default="steps", help="initial horizontal axis")
    parser.add_argument(
        "--goodput", action="store_true",
        help="print a table of how the runs spent their time, instead of a page",
    )  # fmt: skip
    return parser


def _output(output: str | None, runs: Sequence[Path]) -> Path:
    if output is None and len(runs) > 1:
        raise UserError("--output FILE is required for several runs, which share one page")
    return urls.path(output, "--output") if output else runs[0] / "report.html"


def _write(output: Path, html: str) -> None:
    """Write the page atomically, because a browser may be reading an older version."""
    try:
        if urls.in_bucket(output):
            output.write_text(html, encoding="utf-8")
            return
        safe_files.replace_text(output, html)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from error


entry = functools.partial(run_main, main, outlives_reader=True)
