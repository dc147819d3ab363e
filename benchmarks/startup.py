"""Time until a command shows its help: `python benchmarks/startup.py [--quick]`.

Each command runs in a new process. It is compared with processes that only import JAX, or torch if
it is installed, as other tools do before they read their command line.
"""

import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import results

from jaxforge.commands import COMMANDS

PROGRAM = Path(sys.executable).with_name("jaxforge")


def seconds(command: Sequence[str | Path], rounds: int) -> float:
    """Return the median duration of a process, from its start to its end."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return round(statistics.median(times), 3)


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__).parse_args()
    rounds = 1 if args.quick else 7
    helps = {
        f"jaxforge {name} --help": seconds([PROGRAM, name, "--help"], rounds) for name in COMMANDS
    }
    peers = [name for name in ("jax", "torch") if importlib.util.find_spec(name)]
    imports = {name: seconds([sys.executable, "-c", f"import {name}"], rounds) for name in peers}
    rows = [
        results.Row(case, result, f"import {peer}", theirs, "s", smaller_is_better=True)
        for case, result in helps.items()
        for peer, theirs in imports.items()
    ]
    results.report("startup", rows, ["jax", "pydantic", "rich"], write=not args.quick)


if __name__ == "__main__":
    main()
