"""Cost per update, without any fault, of the loop and of what finds and survives faults.

    python -m benchmarks.faults.cost [--quick]

A run trains a tiny model whose host sleeps for 0.1 s per update (`pace.meter`), and measures blocks
of updates: usual ones, and between them blocks that lack a feature or have an event. A row is the
median difference of such blocks from their usual neighbours.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks import one another by their names

import results

from benchmarks.faults import pace
from benchmarks.faults.case import Run, Shared, require

SETTINGS = (
    "--model.dim=16", "--model.n_layers=1", "--model.n_heads=1", "--model.n_kv_heads=1",
    "--data.num_workers=4", "--metrics.log_interval=10", "--eval.enabled=false",
    "--checkpoint.interval=1000000",
)  # fmt: skip
"""A model that computes next to nothing, with the defaults that the drill has changed."""
Sample = tuple[str, float, float]


def samples_of(run: Run, plan: Sequence[str], *settings: str) -> list[Sample]:
    """Run the blocks of a plan, and return a sample of each."""
    path = run.directory.with_suffix(".json")
    steps = 1 + pace.BLOCK * sum(name != pace.LOOP for name in plan)
    measure = ("measure", {"path": str(path), "plan": plan})
    job = run.start(*SETTINGS, *settings, f"--train.max_steps={steps}", fault=measure)
    require(set(job.wait()) == {0}, job.tail())
    return json.loads(path.read_text())


def row(case: str, samples: Sequence[Sample], name: str, interval: int = 0) -> dict[str, Any]:
    """Return the cost of a feature, or of an event that takes place every `interval` updates."""
    cells: dict[str, Any] = {"case": case}
    scale = 1e3 * pace.COUNTED / interval if interval else -1e3
    for column, title in ((1, "ms of CPU per update"), (2, "ms per update")):
        extra = [
            scale * (sample[column] - statistics.mean(near[column] for near in neighbours))
            for i, sample in enumerate(samples)
            if sample[0] == name
            and (neighbours := [near for near in samples[i - 1 : i + 2] if not near[0]])
        ]
        median = statistics.median(extra)
        deviation = statistics.median(abs(value - median) for value in extra)
        cells[title] = f"{median:.3f} ± {deviation:.3f}"
    return cells


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    rounds = 1 if quick else 6
    features = ["", pace.LOOP, "metrics", "", "batches", "watching"]
    events = ["", "checkpoint", "", "replica"]
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        shared = Shared(Path(directory))
        run = Run(shared.root / "paced" / "run", shared.root / "compiled", shared.tokens())
        replicas = ["--checkpoint.replica_interval=1000000", f"--checkpoint.replica_dir={memory}"]
        plan = [*features * rounds, *events * (rounds - rounds // 2), ""]
        samples = samples_of(run, plan, *replicas)
    rows = [
        row("all of the loop but the step", samples, pace.LOOP),
        row("of it: batches, onto the device", samples, "batches"),
        row("metrics, every 10 updates", samples, "metrics"),
        row("run lock, watchdog and account of goodput", samples, "watching"),
        row("a checkpoint every 1,000 updates", samples, "checkpoint", 1000),
        row("a replica every 100 updates", samples, "replica", 100),
    ]
    for cells in rows:
        print(" | ".join(cells.values()))
    if not quick:
        notes = [
            f"medians of {rounds} blocks of {pace.COUNTED} updates, {rounds - rounds // 2} for "
            "events, with median absolute deviations"
        ]
        results.write_json("fault_cost", rows, ("jax", "orbax-checkpoint"), notes=notes)


if __name__ == "__main__":
    main()
