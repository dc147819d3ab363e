"""`jaxforge replay RUN --step N` (or `--steps A:B`): repeat steps of a run.

State and batch are restored exactly from the nearest earlier checkpoint, on any devices.

- One step: report the loss of each document with its text.
- Several steps: report whether they match the log.
- `--capsule FILE`: pack config, versions and metrics of a run into one file, without secrets and
  without data. `jaxforge replay FILE` repeats steps of the run on a machine with the same data, and
  reports differences of the environment.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import check_parent_directory, run_main
from jaxforge.commands.command_line import CommandParser, positive_int
from jaxforge.errors import UserError

_CAPSULE_SUFFIX = ".zip"
_OPTIONS = {
    "step": ("a step", {"step", "top", "json", "check"}),
    "steps": ("several steps", {"steps", "check"}),
    "capsule": ("--capsule", {"capsule"}),
    "file": ("a capsule", {"steps", "start", "json"}),
}
"""Options that apply, by what is asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Replay steps, print tables and write files; return the exit code."""
    line = parser()
    args, overrides = line.parse(argv)
    mode = _mode(args)
    about, names = _OPTIONS[mode]
    line.check_options(args, {*names, "trust_plugins"}, about)
    check_parent_directory("--json", args.json)
    if mode == "file":
        if args.steps and not (args.steps.isdecimal() and int(args.steps)):
            raise UserError(f"--steps {args.steps}: must be a number of steps, for a capsule")
        n = int(args.steps) if args.steps else None
        from jaxforge.tools.replay import capsule  # JAX takes a second to import

        return capsule.run_verify(args, n, overrides)
    if mode == "capsule":
        if overrides:
            raise UserError(
                f"{overrides[0]}: a capsule records the run unchanged. Remove this setting"
            )
        from jaxforge.tools.replay import capsule

        return capsule.make(args)
    first, last = _range(args.steps) if args.steps else (args.step, args.step)
    from jaxforge.tools.replay import steps

    return steps.run(args, overrides, first, last)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "replay",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN (--step N | --steps A:B) [options] [--section.key=value ...]\n"
        "       %(prog)s RUN --capsule FILE\n"
        "       %(prog)s CAPSULE [--steps K] [--from RUN] [--section.key=value ...]",
        description="Repeat steps of a run, and explain a step. Pack the description and metrics "
        "of a run into one file, and repeat steps from such a file.",
        epilog="Settings of the run's config, such as --distributed.tp=2 or "
        "--data.dataset_path=DIR, are accepted.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, or a capsule")
    add("--step", type=int, metavar="N", help="step to repeat, from 1, with its documents")
    add("--steps", metavar="A:B",
        help="steps to compare with the log; of a capsule, the number of logged steps to repeat "
             "(3)")  # fmt: skip
    add("--top", type=positive_int, default=8, metavar="N",
        help="documents to show (default: 8)")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help='write the result as JSON; "-" for stdout')
    add("--check", action="store_true", help="exit with 1 unless the step matches the log bitwise")
    add("--capsule", metavar="FILE.zip", type=Path, help="new file for the capsule of the run")
    add("--from", dest="start", metavar="RUN",
        help="of a capsule: start from this checkpoint, or from the newest suitable checkpoint of "
             "this run (default: from the first step)")  # fmt: skip
    return parser


def _mode(args: argparse.Namespace) -> str:
    """Return what is asked for: a key of `_OPTIONS`.

    Raises:
        UserError: nothing is.
    """
    path = Path(args.run)
    # A misspelt capsule is reported as a missing file and not as a missing run.
    if path.is_file() or (path.suffix == _CAPSULE_SUFFIX and not path.exists()):
        return "file"
    for mode in ("capsule", "steps"):
        if getattr(args, mode) is not None:
            return mode
    if args.step is None:
        raise UserError("--step N, --steps A:B or --capsule FILE is required")
    return "step"


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UserError(f"--steps {text}: must be A:B, the first and last step, from 1")
    return int(first), int(last)


entry = functools.partial(run_main, main, uses_devices=True)
