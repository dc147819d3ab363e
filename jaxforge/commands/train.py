"""`jaxforge train --config FILE [--section.key=value ...]`: train or resume a run."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxforge.cli.process import began_env, note_process_start
from jaxforge.cli.running import leave, run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.config.reading import help, load
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.errors import UserError
from jaxforge.storage import trust

_ABOUT = """\
A run is one directory, `checkpoint.dir`: `config.toml` (resolved), `metrics.jsonl`, `logs/`,
`tokenizer/`, `checkpoints/`. The same command on the same directory resumes from its newest
checkpoint; docs/launching.md has the exit codes.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or report a dry run; return the exit code."""
    args, overrides = _parse(sys.argv[1:] if argv is None else argv)
    if args.devices and not args.dry_run:
        raise UserError(
            f"--devices {args.devices} requires --dry-run: add --dry-run, or remove --devices"
        )
    if args.trust_plugins and not args.dry_run:
        raise UserError("--trust-plugins requires --dry-run: training always imports the plugins")
    config = (_config_of_dry_run if args.dry_run else _config)(args, overrides)
    if args.dry_run:
        return _dry_run(config, args.devices or "")
    from jaxforge.training import launch  # JAX takes two seconds to import

    return launch.fit(config).code


def parse_command_line(argv: Sequence[str]) -> UnresolvedConfig:
    """Return the config of a command line.

    Raises:
        UserError: an argument or the config is invalid.
        SystemExit: the arguments were `--help` (code 0).
    """
    args, overrides = _parse(argv)
    if args.dry_run:
        raise UserError("--dry-run is for `jaxforge train`: remove it here")
    return _config(args, overrides)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return options and settings; `--branch-from` is a setting."""
    args, overrides = parser().parse(argv)
    branch = [f"--checkpoint.branch_from={args.branch_from}"] if args.branch_from else []
    return args, [*overrides, *branch]


def _config(args: argparse.Namespace, overrides: Sequence[str]) -> UnresolvedConfig:
    if args.config is None:
        raise UserError("--config FILE is required (configs/quickstart.toml is an example)")
    trust.use_working_directory()
    return load.load_unresolved(args.config, overrides)


def _config_of_dry_run(args: argparse.Namespace, overrides: Sequence[str]) -> UnresolvedConfig:
    """Load the config; import plugins only if they are trusted or named in `overrides`."""
    shown = load.load_unresolved(args.config, overrides, trust.never) if args.config else None
    if shown is None or not shown.known.plugins.names.all_modules():
        return _config(args, overrides)
    return load.load_unresolved(args.config, overrides, trust.of_run(shown.known.checkpoint.dir))


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "train",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s --config FILE [--section.key=value ...]",
        description=_ABOUT,
        epilog=help.contents(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="config of the run (TOML)")
    parser.add_argument(
        "--branch-from", metavar="RUN@STEP",
        help="start a new run from the full state of another run's checkpoint (or RUN@latest), "
        "with the schedule of this config; sets checkpoint.branch_from",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="report what the run would do, and whether it fits in memory; write nothing",
    )  # fmt: skip
    parser.add_argument(
        "--devices",
        metavar="N",
        help="with --dry-run: number of devices, or a machine such as h100:64x8",
    )
    return parser


def _dry_run(config: UnresolvedConfig, devices: str) -> int:
    if devices:  # local devices are not used
        os.environ["JAX_PLATFORMS"] = "cpu"
    from jaxforge.tools.plan import dry_run

    return dry_run.run(config, devices)


def entry() -> NoReturn:
    """Run the command of this process and exit."""
    # This process and those that it starts read the start time from the environment.
    os.environ.update(began_env())
    note_process_start()
    leave(run_main(main, uses_devices=True, outlives_reader=True))
