"""`jaxforge init`: write a config for a preset, a depth or a compute budget.

`jaxforge prepare` writes a config that suits its data.
"""

import argparse
import functools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType

from jaxforge.cli.running import STDOUT, run_main, wide_console
from jaxforge.commands.command_line import CommandParser, positive_float, positive_int
from jaxforge.commands.plan import topology_of
from jaxforge.errors import UserError
from jaxforge.tools.plan.topology import FORMS
from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.sizes import PRESETS, TOKENS_PER_PARAMETER, PreparedData


def main(argv: Sequence[str] | None = None) -> int:
    """Write a config.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        0.

    Raises:
        UserError: the file exists or cannot be written, --data was not prepared, or the model does
            not fit the machine.
        SystemExit: `--help`.
    """
    line = parser()
    args, settings = line.parse(argv)
    if args.preset is None and args.depth is None and args.flops is None:
        line.error("--preset NAME, --depth N or --flops C is required")
    if args.preset is not None:
        for option in ("topology", "ratio"):
            if getattr(args, option):
                line.error(f"--{option} needs --depth or --flops")
    if args.flops is not None and "train.max_steps" in " ".join(settings):
        line.error("--flops and --train.max_steps both set the length. Remove one of them")
    prepared = PreparedData.read(args.data) if args.data else None
    choose = _dial if args.preset is None else _preset
    name, text, notes = choose(args, settings, prepared)
    output = args.output or Path(f"{name}.toml")
    if output != STDOUT:
        _write(output, text)
    # Standard output then holds the config alone.
    wide_console(sys.stderr if output == STDOUT else sys.stdout).print(*notes, highlight=False)
    if output == STDOUT:
        print(text, end="")
        return 0
    print(f"wrote {output}")
    if prepared is None:
        print("set data.dataset_path to your data (jaxforge prepare), or pass --data DIR")
    train = f"jaxforge train --config {shlex.quote(str(output))}"
    print(f"Next:\n  {train} --dry-run\n  {train}")
    return 0


_Choice = tuple[str, str, Sequence[RenderableType]]
"""Name of a run, the text of its config, and what is said about it."""


def _preset(
    args: argparse.Namespace, settings: Sequence[str], prepared: PreparedData | None
) -> _Choice:
    # Imported here, because the tables of the config are slow to declare.
    from jaxforge.config.reading.load import make_config
    from jaxforge.tools.starting.config import (
        tables_of_preset,
        to_text,
        values_of,
        with_settings,
    )

    name, preset = args.preset, PRESETS[args.preset]
    tables = tables_of_preset(name, preset, prepared)
    make_config(values_of(tables), settings)  # refuses invalid settings
    about = f"{name}: {preset.about}, on {preset.machine}"
    text = to_text(f"{about} (jaxforge init --preset {name}).", with_settings(tables, settings))
    return name, text, [about]


def _dial(
    args: argparse.Namespace, settings: Sequence[str], prepared: PreparedData | None
) -> _Choice:
    topology = topology_of(args.topology) if args.topology else None
    machine = Machine.here()
    os.environ["JAX_PLATFORMS"] = "cpu"  # accelerators stay free; JAX reads it when imported
    from jaxforge.tools.starting import dial, dial_config, dial_target

    of_machine = dial_target.Target.of_machine
    target = dial_target.Target.of_topology(topology) if topology else of_machine(machine)
    wish = dial.Wish.of(prepared, is_on_cpu=target.is_cpu, ratio=args.ratio, settings=settings)
    sizes = (
        dial.dial_depth(args.depth, wish)
        if args.flops is None
        else dial.dial_flops(args.flops, wish)
    )
    run = dial_config.dialled_run(sizes, wish, target, prepared)
    cost: list[RenderableType] = [dial_config.table_of_cost(run), ""]
    return f"d{sizes.depth}", dial_config.file_text(run), cost


def _write(output: Path, text: str) -> None:
    try:
        # Never overwrites a config, which the user may have edited.
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{output} exists; choose another --output, or remove it") from None
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from error


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "init",
        takes_settings=True,
        description="Write a complete, commented config: for a preset, or sized from a depth or a "
        "compute budget (docs/dial.md). Settings such as --optimizer.lr=1e-3 override its "
        "values; with --depth and --flops, values that depend on them follow.",
    )
    size = parser.add_mutually_exclusive_group()
    about = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    size.add_argument("--preset", choices=PRESETS, help=f"model size. {about}")
    size.add_argument(
        "--depth", type=positive_int, metavar="N", help="number of layers, from which all follows"
    )
    size.add_argument(
        "--flops", type=positive_float, metavar="C",
        help="compute of the run in model FLOPs, such as 1e20, from which depth and tokens follow",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="output of `jaxforge prepare`, for paths, vocabulary size and run length",
    )  # fmt: skip
    parser.add_argument(
        "--topology", help=f"machine of --depth and --flops (default: this one): {FORMS}"
    )
    parser.add_argument(
        "--ratio", type=positive_float, metavar="R",
        help=f"tokens per parameter (default: {TOKENS_PER_PARAMETER})",
    )  # fmt: skip
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: NAME.toml, dN.toml); - for standard output",
    )
    return parser


entry = functools.partial(run_main, main, outlives_reader=True)
