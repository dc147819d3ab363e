"""`jaxforge report RUN [RUN ...]`: plot the metrics of runs as one HTML page.

RUN is the directory of a finished or active run. Several runs share the plots. The page is
self-contained: it can be opened from disk, mailed and printed. `--watch` serves the page on this
machine instead, and keeps it up to date. `--goodput` prints how the runs spent their time.
"""

import argparse
import functools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError, printable
from jaxforge.storage import safe_files, urls
from jaxforge.tools.report.names import AXES

_PORT = 8765


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print its path, or serve it; return the exit code."""
    options = parser()
    args = options.parse_args(argv)
    port = args.watch
    if port is not None and not port.isdigit():  # the name of a run, not a port
        args.runs, port = [port, *args.runs], str(_PORT)
    if not args.runs:
        options.error("the following arguments are required: RUN")
    runs = [urls.path(run) for run in args.runs]
    if args.goodput:
        return _print_goodput(runs, args)
    if port is not None:
        return _watch(runs, args, int(port))
    from jaxforge.runs.reading import read_runs
    from jaxforge.tools.report.run_page import page  # imported here, because they are slow

    output = _output(args.output, runs)
    readings = read_runs(runs)
    for message in (message for run in readings for message in run.omissions):
        print(f"warning: {printable(message)}", file=sys.stderr)
    html = page(readings, args.x)
    _write(output, html)
    print(f"{output}: {len(html.encode()) / 1e6:.2f} MB")
    return 0


def _print_goodput(runs: Sequence[Path], args: argparse.Namespace) -> int:
    for option in ("watch", "output"):
        if getattr(args, option) is not None:
            raise UserError(f"--goodput prints a table: remove --{option}")
    from jaxforge.runs import attempts
    from jaxforge.tools.report import goodput

    texts = []
    for run in runs:
        by_process, damage = attempts.read(run)
        for message in damage:
            print(f"warning: {printable(message)}", file=sys.stderr)
        if not by_process:
            raise UserError(
                f"{run} has no {attempts.file_name(0)}: no run directory, or its run has not begun "
                "with this version"
            )
        texts.append(goodput.text(str(run), by_process))
    print("\n\n".join(texts))
    return 0


def _watch(runs: Sequence[Path], args: argparse.Namespace, port: int) -> int:
    if args.output is not None:
        raise UserError("--watch serves the page without writing it: remove --output")
    from jaxforge.tools.report.run_page import serve

    signal.signal(signal.SIGINT, signal.default_int_handler)  # for its final message
    serve(runs, args.x, port)
    return 0


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "report",
        description="Plot the metrics of runs as one HTML page that needs no network.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="run directory")
    parser.add_argument("--output", help="HTML file (default: RUN/report.html)")
    parser.add_argument("--x", choices=list(AXES), default="steps", help="initial horizontal axis")
    parser.add_argument(
        "--goodput", action="store_true",
        help="print a table of how the runs spent their time, instead of a page",
    )  # fmt: skip
    parser.add_argument(
        "--watch", nargs="?", const=str(_PORT), metavar="PORT",
        help=f"serve the page on this machine and keep it up to date (default: {_PORT})",
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
