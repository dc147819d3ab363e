"""`python -m torch_compat COMMAND`: checkpoints to and from PyTorch.

    import SRC DST [--config FILE]       a DCP or Hugging Face checkpoint as a run of jaxforge
    export SRC DST --to dcp|hf           a run of jaxforge as a DCP or Hugging Face checkpoint
    inspect PATH [--json]                what a checkpoint of any format holds
    verify A B [--json]                  whether two hold the same (exit code 1 where they do not)
    lockstep --torch MODULE:FACTORY --checkpoint PATH
                                         a torch model and ours, run side by side: what differs

Tensors pass through in blocks: memory does not grow with the model. Settings such as
`--optimizer.lr=1e-4` go over the config. See docs/torch_compat.md.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here computes on a device

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import run_main
from jaxforge.config.reading.command_line import CommandParser, count
from torch_compat.formats.workers import Share

_SIZE = re.compile(r"([\d.]+) *([kmgt]?)(i?)b?", re.IGNORECASE)
_DIALECTS = "such as kempnerforge, torchtitan or hf-llama (docs/torch_compat.md has all of them)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args, overrides = parser().parse(argv)
    args.argv = argv
    from torch_compat import running  # here, as all that it needs takes half a second

    return running.run(args, overrides)


def parser() -> CommandParser:
    """Its subcommands and their options."""
    about, _, details = (__doc__ or "").partition("\n\n")
    parser = CommandParser(
        "torch_compat", description=about, epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_subparsers(required=True, metavar="COMMAND").add_parser
    importing = add(
        "import",
        help="a PyTorch checkpoint as a run of jaxforge",
        takes_settings=True,
        uses_runs=True,
    )
    importing.add_argument("source", help="a checkpoint, or a directory with `latest` or steps")
    importing.add_argument("destination", help="the run directory to make")
    _add_reading(importing)
    importing.add_argument("--fill-optimizer", action="store_true",
                           help="start optimizer state that is missing from zero")  # fmt: skip
    _add_writing(importing)
    importing.set_defaults(command="import")
    exporting = add(
        "export",
        help="a run of jaxforge as a PyTorch checkpoint",
        takes_settings=True,
        uses_runs=True,
    )
    exporting.add_argument("source", help="a run directory, or one of its checkpoints")
    exporting.add_argument("destination", help="hf: the directory; dcp: where step_<n> appears")
    exporting.add_argument("--to", choices=["dcp", "hf"], required=True)
    exporting.add_argument("--config", type=Path, help="instead of the config in the checkpoint")
    exporting.add_argument("--dialect", metavar="NAME", help=f"whose names to use: {_DIALECTS}")
    exporting.add_argument("--layout", choices=["nested", "flat"],
                           help="of optimizer state in DCP; by default the dialect's")  # fmt: skip
    exporting.add_argument("--ranks", type=count, default=1,
                           help="data-parallel ranks that will go on with it (1)")  # fmt: skip
    exporting.add_argument("--stages", type=count, default=1,
                           help="pipeline stages that will, each with its own DCP (1)")  # fmt: skip
    exporting.add_argument("--weights-only", action="store_true", help="leave the optimizer out")
    exporting.add_argument("--max-shard-size", type=Size, default=Size("5GB"),
                           help="of a safetensors file (5GB)")  # fmt: skip
    _add_writing(exporting)
    exporting.set_defaults(command="export")
    inspecting = add("inspect", help="what a checkpoint holds")
    inspecting.add_argument("path")
    inspecting.add_argument("--json", action="store_true")
    inspecting.set_defaults(command="inspect")
    verifying = add(
        "verify", help="whether two checkpoints hold the same", takes_settings=True, uses_runs=True
    )
    verifying.add_argument("a")
    verifying.add_argument("b")
    _add_reading(verifying)
    verifying.add_argument("--max-memory", type=Size, default=Size("256MiB"))
    verifying.add_argument("--json", action="store_true")
    verifying.set_defaults(command="verify")
    _add_lockstep(
        add(
            "lockstep",
            help="a torch model and ours, run side by side: what differs",
            takes_settings=True,
            uses_runs=True,
        )
    )
    return parser


def _add_lockstep(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--torch", required=True, metavar="MODULE:FACTORY",
        help="what makes the torch module, and perhaps its optimizer and loss")  # fmt: skip
    add("--checkpoint", required=True, metavar="PATH", help="weights of both")
    add("--config", type=Path, help="the TOML file of the run (DCP needs one)")
    add("--dialect", metavar="NAME", help=f"the module's names; by default found: {_DIALECTS}")
    add("--loaded", action="store_true", help="the factory has loaded the weights itself")
    add("--batch", type=Path, metavar="FILE.npz",
        help="input_ids and labels, [b, s]; by default of the config's data")  # fmt: skip
    add("--rows", type=count, default=2, help="of a batch that is drawn (2)")
    add("--tokens", type=count, default=64, help="of each of its rows (64)")
    add("--json", action="store_true")
    parser.set_defaults(command="lockstep")


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="the TOML file of the run (DCP needs one)")
    parser.add_argument("--dialect", metavar="NAME",
                        help=f"by default found from the keys: {_DIALECTS}")  # fmt: skip
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer")
    parser.add_argument("--resize-vocab", action="store_true",
                        help="cut a padded vocabulary off, or pad with zeros")  # fmt: skip


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="of the weights; by default as they are")  # fmt: skip
    parser.add_argument("--max-memory", type=Size, default=Size("256MiB"),
                        help="for tensors on their way (256MiB)")  # fmt: skip
    parser.add_argument("--processes", type=count, default=1, help="work on so many cores (1)")
    parser.add_argument("--process", type=_share, default=Share(), metavar="I/N",
                        help="be process I of N, started elsewhere too")  # fmt: skip
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)  # of a process: its source
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")


class Size:
    """A number of bytes such as 5GB or 256MiB.

    Raises:
        ValueError: the text is none.
    """

    def __init__(self, text: str) -> None:
        match = _SIZE.fullmatch(text.strip())
        if not match:
            raise ValueError(f"{text}: no size such as 256MiB")
        base = 1024 if match[3] else 1000
        size = float(match[1]) * base ** " kmgt".index(match[2].lower() or " ")
        if not 1 <= size < 2**63:
            raise ValueError(f"{text}: no size such as 256MiB")
        self.bytes = int(size)


def _share(text: str) -> Share:
    process, _, processes = text.partition("/")
    share = Share(int(process), int(processes))
    if not 0 <= share.process < share.processes:
        raise ValueError(text)
    return share


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main)


if __name__ == "__main__":
    raise SystemExit(entry())
