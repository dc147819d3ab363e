"""Cost per step, without any fault, of what finds and survives faults.

    python -m benchmarks.faults.cost [--quick]

Jobs of two processes train the drill's model, alternately with and without hang detection, the
endpoint for Prometheus and replicas in memory. A long job less a short one leaves its steps: CPU
seconds of both processes, as the steps of so small a model are mostly work of the host.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks import one another by their names

import results

from benchmarks.faults.case import Run, Shared, require
from jaxforge.supervision.processes import free_port

OFF = ["--train.hang_timeout=0"]
QUIET = ["--metrics.log_interval=100", "--checkpoint.interval=1000000", "--eval.enabled=false"]


def cpu_seconds(run: Run, steps: int, settings: Sequence[str]) -> float:
    """Train two processes, and return the CPU seconds of both."""
    before = os.times()
    job = run.start(*QUIET, f"--train.max_steps={steps}", *settings, n=2)
    require(set(job.wait()) == {0}, job.tail())
    after = os.times()
    return (
        after.children_user
        + after.children_system
        - (before.children_user + before.children_system)
    )


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    short, long, rounds = (50, 150, 1) if quick else (200, 2200, 3)
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        shared = Shared(Path(directory))
        replicas = ["--checkpoint.replica_interval=100", f"--checkpoint.replica_dir={memory}"]
        endpoint = [f"--metrics.prometheus_port={free_port()}"]
        settings = {
            "nothing": OFF,
            "hang detection and Prometheus": endpoint,
            "the same and replicas every 100 steps": [*endpoint, *replicas],
        }
        times: dict[str, list[float]] = {name: [] for name in settings}
        for round_ in range(rounds + 1):  # the first round compiles
            for name, options in settings.items():
                seconds = [
                    cpu_seconds(
                        Run(Path(directory) / f"{name} {round_} {steps}" / "run",
                            shared.root / "compiled", shared.tokens()), steps, options,
                    )
                    for steps in (short, long)
                ]  # fmt: skip
                times[name].append((seconds[1] - seconds[0]) / (long - short))
    medians = {name: 1e3 * statistics.median(each[1:]) for name, each in times.items()}
    base = medians.pop("nothing")
    rows = [
        results.Row(name, round(value, 3), "without", round(base, 3), "ms of CPU per step",
                    smaller_is_better=True)
        for name, value in medians.items()
    ]  # fmt: skip
    spread = statistics.pstdev(times["nothing"][1:]) * 1e3
    notes = [
        f"two processes together; standard deviation of the {rounds} rounds without: {spread:.3f}"
    ]
    results.report("fault_cost", rows, ("jax",), notes=notes, write=not quick)


if __name__ == "__main__":
    main()
