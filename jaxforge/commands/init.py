"""`jaxforge init`: write a config for a preset, a depth or a compute budget.

`jaxforge prepare` writes a config that suits its data.
"""

import argparse
import datetime
import functools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import STDOUT, run_main, wide_console
from jaxforge.commands.command_line import CommandParser, positive_float, positive_int
from jaxforge.commands.plan import topology_of
from jaxforge.errors import UserError
from jaxforge.tools.plan.topology import FORMS
from jaxforge.tools.starting.config import config_of_preset
from jaxforge.tools.starting.machine import Machine
from jaxforge.tools.starting.prepared import PreparedData
from jaxforge.tools.starting.presets import PRESETS
from jaxforge.tools.starting.sizing import TOKENS_PER_PARAMETER


def main(argv: Sequence[str] | None = None) -> int:
    """Write a config, or list the presets.

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
    if args.list:
        print("\n".join(rows()))
        return 0
    if args.preset is None and args.depth is None and args.flops is None:
        line.error("--preset NAME, --depth N or --flops C is required; --list shows the presets")
    if args.preset is None:
        return _dial(line, args, settings)
    for option in ("topology", "ratio", "tokens_per_second", "price", "plan"):
        if getattr(args, option):
            line.error(f"--{option.replace('_', '-')} needs --depth or --flops")
    if settings:
        raise UserError(f"{settings[0]} needs --depth or --flops. Pass it to `jaxforge train`")
    prepared = PreparedData.read(args.data) if args.data else None
    text = config_of_preset(args.preset, PRESETS[args.preset], prepared)
    output = args.output or Path(f"{args.preset}.toml")
    if output == STDOUT:
        print(text, end="")
        return 0
    _write(output, text)
    print(f"wrote {output}: {PRESETS[args.preset].about}")
    _print_next(output, prepared)
    return 0


def _dial(line: CommandParser, args: argparse.Namespace, settings: Sequence[str]) -> int:
    """Write the config of --depth or --flops; print its choices and its cost."""
    if args.flops is not None and "train.max_steps" in " ".join(settings):
        line.error("--flops and --train.max_steps both set the length. Remove one of them")
    topology = topology_of(args.topology) if args.topology else None
    prepared = PreparedData.read(args.data) if args.data else None
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
    compiled = dial_target.compile_plan(run.config, target) if args.plan else None
    output = args.output or Path(f"d{sizes.depth}.toml")
    console = wide_console(sys.stderr if output == STDOUT else sys.stdout)
    cost = dial_config.table_of_cost(
        run,
        datetime.datetime.now(datetime.UTC),
        compiled=compiled,
        tokens_per_second=args.tokens_per_second,
        price=args.price,
    )
    text = dial_config.file_text(run)
    if output != STDOUT:
        _write(output, text)
    console.print(dial_config.table_of_choices(run), "", cost, "", highlight=False)
    if output == STDOUT:
        print(text, end="")
        return 0
    print(f"wrote {output}")
    _print_next(output, prepared)
    return 0


def _print_next(output: Path, prepared: PreparedData | None) -> None:
    if prepared is None:
        print("set data.dataset_path to your data (jaxforge prepare), or pass --data DIR")
    train = f"jaxforge train --config {shlex.quote(str(output))}"
    print(f"Next:\n  {train} --dry-run\n  {train}")


def rows() -> list[str]:
    """Return a line for each preset."""
    wide = max(map(len, PRESETS))
    return [f"{name:{wide}}  {preset.about}; {preset.machine}" for name, preset in PRESETS.items()]


def _write(output: Path, text: str) -> None:
    try:
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
        "compute budget (docs/dial.md). With --depth and --flops, settings such as "
        "--train.seq_len=1024 override what follows from them.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--preset", choices=PRESETS, help="model size; --list describes the presets")
    size.add_argument(
        "--depth", type=positive_int, metavar="N", help="number of layers, from which all follows"
    )
    size.add_argument(
        "--flops", type=positive_float, metavar="C",
        help="compute of the run in model FLOPs, such as 1e20, from which depth and tokens follow",
    )  # fmt: skip
    size.add_argument("--list", action="store_true", help="list the presets")
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
        "--plan", action="store_true",
        help="compile the step as `jaxforge plan` does, for its memory and time",
    )  # fmt: skip
    parser.add_argument(
        "--tokens-per-second", type=positive_float, metavar="N",
        help="measured speed of all devices, which replaces the estimate",
    )  # fmt: skip
    parser.add_argument(
        "--price", type=positive_float, metavar="N", help="price per device and hour"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: NAME.toml, dN.toml); - for standard output",
    )
    return parser


entry = functools.partial(run_main, main, outlives_reader=True)
