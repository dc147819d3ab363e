"""Groups that train apart (DiLoCo), compared with synchronous training of the same batches.

    python benchmarks/diloco.py [--quick] [--steps N] [--seeds N] [--cases WORDS] [--jobs N]
    python benchmarks/diloco.py --link [--quick]

Trains `configs/quickstart.toml` on two groups of one CPU device and compares validation losses at
equal numbers of tokens. With --link, the groups are processes in two network namespaces, and the
link between them carries 10 Mbit/s in each direction (tc); the updates per second are compared.
This needs root. Needs the data of the quickstart (`make data/quickstart`); nothing is downloaded.

Not in `make bench`: takes an hour.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import results

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "flax", "optax")
SYNCHRONOUS = "synchronous"
STREAMING = ("--outer_optimizer.fragments=2", "--outer_optimizer.overlap=1",
             "--train.outer_dtype=int4")  # fmt: skip

MEAN = ("--outer_optimizer.name=optax.sgd", "--outer_optimizer.lr=1")
CASES: Mapping[str, Sequence[str]] = {
    SYNCHRONOUS: (),
    "H = 1": ("--train.outer_interval=1",),
    "H = 10": ("--train.outer_interval=10",),
    "H = 50": ("--train.outer_interval=50",),
    "H = 1, mean": ("--train.outer_interval=1", *MEAN),
    "H = 10, mean": ("--train.outer_interval=10", *MEAN),
    "H = 50, mean": ("--train.outer_interval=50", *MEAN),
    "H = 10, int4": ("--train.outer_interval=10", "--train.outer_dtype=int4"),
    "H = 10, streaming, int4": ("--train.outer_interval=10", *STREAMING),
}
LINKED = (SYNCHRONOUS, "H = 10", "H = 50", "H = 10, int4")
BITS_PER_SECOND = 10e6
_WARM_UP = 0.13  # of the updates of a run
_INTERVAL = 75  # exit code of a run that `train.exit_interval` stops


def command(case: str, directory: Path, seed: int, steps: int, *more: str) -> list[str]:
    """Return the command of a run."""
    return [
        sys.executable, "-m", "jaxforge.train", f"--config={ROOT / 'configs/quickstart.toml'}",
        "--distributed.dp_replicate=2", "--train.batch_size=4", f"--train.seed={seed}",
        f"--train.max_steps={steps}", f"--scheduler.warmup_steps={round(_WARM_UP * steps)}",
        f"--checkpoint.dir={directory}", "--checkpoint.interval=100000", *CASES[case], *more,
    ]  # fmt: skip


def environment(devices: int, **more: str) -> dict[str, str]:
    """Return the environment of a process with a number of CPU devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **more}


def metrics(run: Path, name: str) -> list[tuple[int, float]]:
    """Return (update, value) of a metric."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]


def trained(case: str, seed: int, steps: int) -> list[tuple[int, float]]:
    """Train and return (tokens, validation loss)."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        every = f"--eval.interval={max(1, steps // 5)}"
        subprocess.run(
            command(case, run, seed, steps, every), check=True, env=environment(2), cwd=ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return [(step * 8 * 256, loss) for step, loss in metrics(run, "eval/loss")]


def compare_losses(args: argparse.Namespace) -> None:
    """Measure validation losses at equal tokens."""
    names = [name for name in CASES if args.cases in name]
    trials = [(name, seed) for seed in range(args.seeds) for name in names]
    with ThreadPoolExecutor(args.jobs) as pool:
        curves = dict(
            zip(trials, pool.map(lambda item: trained(*item, args.steps), trials), strict=True)
        )
    rows, mean_curves = [], {}
    for name in names:
        of_seeds = [curves[name, seed] for seed in range(args.seeds)]
        ends = [curve[-1][1] for curve in of_seeds]
        mean_curves[name] = [
            (points[0][0], statistics.mean(loss for _, loss in points))
            for points in zip(*of_seeds, strict=True)
        ]
        rows.append(
            {
                "case": name,
                "validation loss": f"{statistics.mean(ends):.3f}",
                "of each seed": ", ".join(f"{loss:.4f}" for loss in ends),
            }
        )
        print(name, [round(loss, 4) for loss in ends], flush=True)
    if not args.quick and not args.cases:
        tokens = args.steps * 8 * 256
        notes = [
            f"{args.steps} updates, {tokens:,} tokens, seeds 0 to {args.seeds - 1}",
            "mean: the outer optimizer is optax.sgd with rate 1, otherwise the default",
        ]
        results.write_json("diloco", rows, PACKAGES, notes=notes, curves=mean_curves)


def run(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True)


@contextmanager
def link() -> Iterator[list[tuple[str, str]]]:
    """Join two network namespaces by a slow link; yield the name and address of each."""
    ends = [("jaxforge-a", "10.77.0.1"), ("jaxforge-b", "10.77.0.2")]
    rate = ["rate", f"{BITS_PER_SECOND:.0f}bit", "burst", "32kbit", "latency", "400ms"]
    try:
        for name, _ in ends:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "end0", "type", "veth", "peer", "name", "end1")
        for i, (name, address) in enumerate(ends):
            run("ip", "link", "set", f"end{i}", "netns", name)
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "address", "add", f"{address}/24", "dev", f"end{i}")
            for device in (f"end{i}", "lo"):
                run(*inside, "ip", "link", "set", device, "up")
            run(*inside, "tc", "qdisc", "add", "dev", f"end{i}", "root", "tbf", *rate)
            # The name of this host is at the address that the other end reaches.
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        yield ends
    finally:
        for name, _ in ends:
            subprocess.run(("ip", "netns", "delete", name), check=False)


def seconds_over_link(case: str, ends: Sequence[tuple[str, str]], steps: int) -> float:
    """Return the seconds of an update of two processes, over the second half of a run."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        options = ("--eval.enabled=false", f"--metrics.log_interval={steps // 2}",
                   "--distributed.dp_shard=1", "--train.hang_timeout=0",
                   # The exchange at the end of a run is not that of an update.
                   f"--train.exit_interval={steps}")  # fmt: skip
        processes = []
        for i, (name, _) in enumerate(ends):
            job = {"JAX_COORDINATOR_ADDRESS": f"{ends[0][1]}:7377", "JAX_NUM_PROCESSES": "2",
                   "JAX_PROCESS_ID": str(i)}  # fmt: skip
            words = ("ip", "netns", "exec", name, *command(case, path, 0, 10 * steps, *options))
            processes.append(
                subprocess.Popen(
                    words, env=environment(1, **job), cwd=ROOT,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )
            )  # fmt: skip
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
        if set(codes) != {_INTERVAL}:
            raise SystemExit(f"{case}: exit codes {codes}")
        return metrics(path, "train/step_time_sec")[-1][1]


def compare_speeds(args: argparse.Namespace) -> None:
    """Measure the speed over a slow link."""
    seconds = {}
    with link() as ends:
        for case in LINKED:
            # Whole intervals in each half.
            interval = next((int(x.split("=")[1]) for x in CASES[case] if "interval" in x), 2)
            steps = 2 * interval
            seconds[case] = seconds_over_link(case, ends, steps)
            print(case, f"{seconds[case]:.2f} s an update", flush=True)
    rows = [
        results.Row(case, seconds[case], SYNCHRONOUS, seconds[SYNCHRONOUS], "s", True)
        for case in LINKED[1:]
    ]
    note = "two processes of one CPU core each, and 10 Mbit/s in each direction between them"
    results.report("diloco_link", rows, PACKAGES, notes=[note], write=not args.quick)


def main() -> None:
    """Run the benchmark."""
    parser = results.arguments(__doc__, cases=True)
    parser.add_argument("--link", action="store_true", help="measure the speed over a slow link")
    parser.add_argument("--steps", type=int, default=200, help="updates of a run")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 8, 1
    (compare_speeds if args.link else compare_losses)(args)


if __name__ == "__main__":
    main()
