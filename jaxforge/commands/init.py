"""`python -m jaxforge.init --preset NAME`: write a config for a standard model size.

`jaxforge prepare` writes a config that suits its data.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import STDOUT, run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError
from jaxforge.tools.starting.config import config_of_preset
from jaxforge.tools.starting.prepared import PreparedData
from jaxforge.tools.starting.presets import PRESETS


def main(argv: Sequence[str] | None = None) -> int:
    """Write a config, or list the presets.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        0.

    Raises:
        UserError: the file exists or cannot be written, or --data was not prepared.
        SystemExit: `--help`.
    """
    line = parser()
    args = line.parse_args(argv)
    if args.list:
        print("\n".join(rows()))
        return 0
    if args.preset is None:
        line.error("--preset NAME is required; --list shows the presets")
    prepared = PreparedData.read(args.data) if args.data else None
    text = config_of_preset(args.preset, PRESETS[args.preset], prepared)
    output = args.output or Path(f"{args.preset}.toml")
    if output == STDOUT:
        print(text, end="")
        return 0
    _write(output, text)
    print(f"wrote {output}: {PRESETS[args.preset].about}")
    if prepared is None:
        print("set data.dataset_path to your data (jaxforge prepare), or pass --data DIR")
    train = f"jaxforge train --config {shlex.quote(str(output))}"
    print(f"Next:\n  {train} --dry-run\n  {train}")
    return 0


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
        "init", description="Write a complete, commented config for a standard model size."
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="model size; --list describes the presets"
    )
    parser.add_argument("--list", action="store_true", help="list the presets")
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="output of `jaxforge prepare`, for paths, vocabulary size and run length",
    )  # fmt: skip
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: NAME.toml); - for standard output",
    )
    return parser


def entry() -> int:
    """Run the command of this process; return its exit code."""
    return run_main(main, outlives_reader=True)


if __name__ == "__main__":
    raise SystemExit(entry())
