"""Commands `jaxforge convert`, `inspect` and `verify`, and their common options.

Commands import their other modules when they run: importing all of them takes half a second.
"""

import argparse
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_compat.checkpoint.dcp_state import ReadOptions

DIALECTS = "such as kempnerforge, torchtitan or hf-llama (docs/torch_compat.md lists all of them)"

_SIZE = re.compile(r"([\d.]+) *([kmgt]?)(i?)b?", re.IGNORECASE)


class Size:
    """Number of bytes, parsed from text such as 5GB or 256MiB.

    Raises:
        ValueError: the text is not a size.
    """

    def __init__(self, text: str) -> None:
        match = _SIZE.fullmatch(text.strip())
        if not match:
            raise ValueError(f"{text}: not a size such as 256MiB")
        base = 1024 if match[3] else 1000
        size = float(match[1]) * base ** " kmgt".index(match[2].lower() or " ")
        if not 1 <= size < 2**63:
            raise ValueError(f"{text}: not a size such as 256MiB")
        self.bytes = int(size)


def prepare_process() -> None:
    """Set up JAX, memory and logs of a process before it imports JAX."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no command computes on an accelerator
    from jaxforge.parallel import host_memory

    host_memory.share_heaps()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step at WARNING


def add_reading_options(parser: argparse.ArgumentParser, dialect: str) -> None:
    """Add the options of reading a checkpoint, with `dialect` as the name of that option."""
    parser.add_argument(
        "--config", type=Path, help="the TOML file of the run (required for DCP and .pt)"
    )
    parser.add_argument(dialect, metavar="NAME", dest="from_dialect",
                        help=f"detected from the keys by default: {DIALECTS}")  # fmt: skip
    parser.add_argument("--weights-only", action="store_true", help="read no optimizer state")
    parser.add_argument("--resize-vocab", action="store_true",
                        help="truncate a padded vocabulary, or pad it with zeros")  # fmt: skip
    parser.add_argument("--max-memory", type=Size, default=Size("256MiB"),
                        help="memory for tensors in transit (256MiB)")  # fmt: skip


def reading_options(args: argparse.Namespace) -> "ReadOptions":
    """Return the options of reading a checkpoint."""
    from torch_compat.checkpoint.dcp_state import ReadOptions

    return ReadOptions(
        dialect=args.from_dialect,
        weights_only=args.weights_only,
        fill_optimizer=getattr(args, "fill_optimizer", False),
        resize_vocab=args.resize_vocab,
        weights=getattr(args, "weights", "raw"),
    )
