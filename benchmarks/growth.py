"""Growth of costs with size: models, meshes, data and logs.

    python benchmarks/growth.py [--quick] [--cases WORDS]

A cost c is fitted as c ~ size^e by least squares on logarithms. Nothing is subtracted, so a cost
that is constant at small sizes has a smaller exponent than its growing part: the largest sizes
are those of the largest known runs. An exponent of 1 means proportional costs, 0 constant costs.
`ratio` is 1 / e; `floors.toml` gives the largest exponent, with its reason.

Each size is measured in a new process. Times are CPU seconds of all its threads and children, so
that other processes on the machine matter little. Token files are sparse: 10^12 tokens occupy no
disk, and have hashes in their manifest like any others.
"""

import base64
import contextlib
import gc
import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

if "--measure" in sys.argv:  # before JAX is imported: devices for pipeline stages
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
import results

from jaxforge.commands import report, train
from jaxforge.config.job import JobConfig
from jaxforge.data import sources
from jaxforge.data.corpus.manifest import BLOCK_BYTES, VERSION, Manifest, Shard
from jaxforge.data.fingerprint import fingerprints
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from jaxforge.telemetry.sinks import JsonlSink, as_json
from jaxforge.training.training_data import Phases, batch_ramp, batches_from

SEQ, ROWS = 1024, 8
SHARD_TOKENS = 10_000_000
BATCHES = 50

Costs = dict[str, float]
"""Measured values by unit."""


class Case(NamedTuple):
    """Costs by size.

    Attributes:
        name: name of the case, with the unit of the sizes.
        sizes: sizes of a complete benchmark.
        quick: sizes of `--quick`.
        measure: returns the costs of one size.
        write: writes the input of one size into a new directory.
    """

    name: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    measure: Callable[[int, Path], Costs]
    write: Callable[[int, Path], None] = lambda size, directory: None


@contextlib.contextmanager
def timed(costs: Costs, unit: str, per: int = 1) -> Iterator[None]:
    """Record the CPU milliseconds of a block under `unit`, divided by `per`."""
    start = cpu_seconds()
    yield
    costs[unit] = 1000 * (cpu_seconds() - start) / per


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def memory() -> Costs:
    """Return the largest resident memory of this process so far."""
    # `ru_maxrss` would include the memory of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return {"MiB of memory": int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 1024}


def compiled_step(layers: int, microbatches: int, stages: int = 1) -> Costs:
    """Return the costs of tracing and compiling a step."""

    def lowered(layers: int, microbatches: int) -> jax.stages.Lowered:
        config = JobConfig.model_validate(
            {
                "model": {"dim": 64, "n_heads": 2, "ffn_hidden_dim": 128, "n_layers": layers,
                          "vocab_size": 256, "max_seq_len": 64},
                "train": {"batch_size": 2, "seq_len": 64, "mixed_precision": "fp32",
                          "grad_accum_steps": microbatches},
                "distributed": {"pp": stages, "dp_shard": 1},
            }
        )  # fmt: skip
        return Program(config, make_mesh(config, jax.devices()[:stages])).lower()

    jax.config.update("jax_enable_compilation_cache", False)
    lowered(stages, stages).compile()  # the first step of a process pays for its start
    costs: Costs = {}
    with timed(costs, "ms to trace"):
        step = lowered(layers, microbatches)
    with timed(costs, "ms to compile"):
        step.compile()
    return {**costs, "KB of program": len(step.as_text()) / 1000}


def dry_run(devices: int, directory: Path) -> Costs:
    """Return the costs of a dry run of an 8B model for a cluster of H100s."""
    config = directory / "config.toml"
    config.write_text(
        "[model]\ndim = 4096\nn_layers = 32\nn_heads = 32\nvocab_size = 128256\n"
        '[distributed]\ndp_replicate = 8\ndp_shard = -1\n[data]\ndataset_type = "synthetic"\n'
        f'[checkpoint]\ndir = "{directory / "run"}"\n'
    )

    def run(devices: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(
                ["--config", str(config), "--dry-run", "--devices", f"h100:{devices // 8}x8"]
            )

    run(64)
    costs: Costs = {}
    with timed(costs, "ms"):
        run(devices)
    return costs


def write_shards(shards: int, directory: Path, shard_tokens: int = SHARD_TOKENS) -> None:
    """Write sparse token files of zeros, and their manifest with block hashes."""
    directory.mkdir(parents=True)
    head = io.BytesIO()
    layout = {"descr": "<u2", "fortran_order": False, "shape": (shard_tokens,)}
    np.lib.format.write_array_header_1_0(head, layout)
    blocks, tail = divmod(2 * shard_tokens, BLOCK_BYTES)
    hashes = [zlib.crc32(bytes(size)) for size in [BLOCK_BYTES] * blocks + [tail] * bool(tail)]
    crc32 = base64.b64encode(np.array(hashes, "<u4").tobytes()).decode()
    names = [f"shard_{number:06}.npy" for number in range(shards)]
    for name in names:
        with (directory / name).open("wb") as file:
            file.write(head.getvalue())
            file.truncate(len(head.getvalue()) + 2 * shard_tokens)
    files = tuple(Shard(name, shard_tokens, 0, crc32) for name in names)
    tokens = shards * shard_tokens
    Manifest(VERSION, "uint16", tokens, shards, 0, 0, 256, "byte", "0", files).write(directory)


def config_of(**data: Any) -> JobConfig:  # noqa: ANN401
    """Return a config of a long run on some data."""
    return JobConfig.model_validate(
        {
            "model": {"vocab_size": 256, "max_seq_len": SEQ},
            "train": {"seq_len": SEQ, "batch_size": ROWS, "max_steps": 10**8},
            "data": {"num_workers": 0, **data},
        }
    )


def opened(config: JobConfig, step: int = 0) -> Costs:
    """Return the costs of opening data at a step, and of reading batches."""
    costs: Costs = {}
    mesh = make_mesh(config, jax.devices()[:1])
    gc.freeze()  # a collection of all that was imported takes 0.2 s, at one of the sizes
    with timed(costs, "ms to open"):
        dataset = sources.open_training_data(config)
        fingerprints(config.data, dataset, {})
    progress = Progress(step=step, samples=step * ROWS)
    phases, ramp = Phases.of(config.data), batch_ramp(config, mesh)
    next(batches_from(Progress(), config, mesh, dataset, phases, ramp))  # imports
    with timed(costs, "ms to the first batch"):
        batches = batches_from(progress, config, mesh, dataset, phases, ramp)
        next(batches)
    with timed(costs, "ms per batch", BATCHES):
        for _ in range(BATCHES):
            next(batches)
    return {**costs, **memory()}


def write_tokens(tokens: int, directory: Path) -> None:
    """Write tokens in shards of equal size."""
    write_shards(tokens // SHARD_TOKENS, directory / "train")


def read_tokens(tokens: int, directory: Path) -> Costs:
    """Return the costs of one dataset of many files."""
    return opened(config_of(dataset_path=str(directory / "train")))


def write_datasets(datasets: int, directory: Path) -> None:
    """Write many datasets of one shard."""
    for number in range(datasets):
        write_shards(1, directory / f"{number:04}", 1_000_000)


def mixture(directory: Path) -> list[dict[str, Any]]:
    """Return the tables of `data.datasets` with different weights."""
    paths = enumerate(sorted(path for path in directory.iterdir() if path.is_dir()))
    return [{"name": path.name, "path": str(path), "weight": 1 + n % 7} for n, path in paths]


def read_datasets(datasets: int, directory: Path) -> Costs:
    """Return the costs of a mixture with a phase in which all weights change."""
    tables = mixture(directory)
    weights = {table["name"]: 1 + n % 5 for n, table in enumerate(tables)}
    phases = [{"start_step": 10**5, "dataset_weights": weights}]
    return opened(config_of(datasets=tables, phases=phases))


def resume(step: int, directory: Path, *, order: str, mixes: bool) -> Costs:
    """Return the costs of continuing at a step."""
    data = {"datasets": mixture(directory)} if mixes else {"dataset_path": str(directory / "0000")}
    costs = opened(config_of(order=order, **data), step)
    return {unit: costs[unit] for unit in ("ms to the first batch", "ms per batch")}


def write_run(lines: int, directory: Path) -> None:
    """Write the directory of a run that logged many lines."""
    run = directory / "run"
    run.mkdir(parents=True)
    config = config_of(dataset_type="synthetic")
    (run / "config.toml").write_text(config.to_toml())
    names = [
        f"train/{name}" for name in ("grad_norm", "lr", "mfu", "skipped_steps", "tokens_per_sec")
    ]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            values = dict.fromkeys(names, step / 7)
            file.write(as_json(step, {
                "train/loss": 1 + 1 / step, "train/tokens": step * SEQ * ROWS,
                "train/step_time_sec": 0.5, **values,
            }) + "\n")  # fmt: skip


def read_run(lines: int, directory: Path) -> Costs:
    """Return the costs of a report, and of the start of a run that has logged lines."""
    run = directory / "run"
    costs: Costs = {}
    with contextlib.redirect_stdout(io.StringIO()):
        with timed(costs, "ms of a report"):
            report.main([str(run)])
        with timed(costs, "ms of a start without checkpoints"):
            run_directory.check_not_lost(run)
        with timed(costs, "ms of a resume"):
            JsonlSink(run / "metrics.jsonl", lines - 1).close(0)
    return {**costs, **memory()}


LARGEST_EXPONENT = 1.15
"""Limit of each row.

CPU seconds vary by about 10 % under load, which moves the exponent of four sizes with a factor of 8
between the first and the last by 0.06 (one standard error). n log n has an exponent of
1 + 1 / ln n, 1.07 at a million. A quadratic part that is a third of the cost at the largest of
these sizes gives 1.16.
"""
POWERS = (10**4, 10**5, 10**6, 10**7)
CASES = (
    Case("layers", (8, 32, 128, 512), (2, 4, 8, 16), lambda n, _: compiled_step(n, 1)),
    Case("microbatches", (8, 64, 512, 4096), (2, 4, 8, 16), lambda n, _: compiled_step(2, n)),
    Case("microbatches of 4 pipeline stages", (16, 64, 256, 1024), (4, 8, 16, 32),
         lambda n, _: compiled_step(4, n, 4)),
    Case("devices in a dry run", (64, 256, 1024, 4096), (8, 16, 32, 64), dry_run),
    Case("datasets of a mixture", (125, 250, 500, 1000), (5, 10, 20, 40), read_datasets,
         write_datasets),
    Case("tokens", (10**9, 10**10, 10**11, 10**12), (10**8, 2 * 10**8, 4 * 10**8, 8 * 10**8),
         read_tokens, write_tokens),
    *(
        Case(f"step of a resume, {name}", POWERS, POWERS,
             lambda n, d, order=order, mixes=mixes: resume(n, d, order=order, mixes=mixes),
             lambda _, d: write_datasets(4, d))
        for name, order, mixes in (("grain", "grain", False), ("torch", "torch", False),
                                   ("mixture", "grain", True), ("torch mixture", "torch", True))
    ),
    Case("logged lines", (125_000, 250_000, 500_000, 10**6), (1000, 2000, 4000, 8000), read_run,
         write_run),
)  # fmt: skip


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return e of the least-squares fit log c = e log n + constant."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def rows_of(case: Case, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Measure a case."""
    costs: dict[str, list[float]] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="growth-") as directory:
            case.write(size, Path(directory))
            command = [sys.executable, __file__, "--measure", case.name, str(size), directory]
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        for unit, cost in json.loads(run.stdout).items():
            costs.setdefault(unit, []).append(cost)
        shown = {unit: f"{values[-1]:.3g}" for unit, values in costs.items()}
        print(case.name, size, shown, flush=True)
    rows = []
    for unit, values in costs.items():
        fitted = round(exponent(sizes, values), 3)
        rows.append(
            {
                "case": case.name, "unit": unit, "peer": "linear",
                "sizes": [f"{size:,}" for size in sizes],
                "costs": [float(f"{value:.3g}") for value in values],
                "exponent": fitted, "ratio": round(1 / max(fitted, 0.01), 3),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Print the table and write the results."""
    parser = results.arguments(__doc__, cases=True)
    parser.add_argument("--measure", nargs=3, help="measure one size: CASE SIZE DIRECTORY")
    args = parser.parse_args()
    if args.measure:
        name, size, directory = args.measure
        (case,) = (case for case in CASES if case.name == name)
        print(json.dumps(case.measure(int(size), Path(directory))))
        return
    cases = [case for case in CASES if args.cases in case.name]
    with ThreadPoolExecutor(2) as pool:  # processes at a time, as CPU seconds do not count waiting
        sizes = (case.quick if args.quick else case.sizes for case in cases)
        rows = [row for of_case in pool.map(rows_of, cases, sizes) for row in of_case]
    for row in rows:
        print(f"{row['case']}, {row['unit']}: {row['costs']}, exponent {row['exponent']}")
    is_complete = not args.quick and len(cases) == len(CASES)
    results.publish("growth", rows, ("jax", "jaxlib", "numpy"), write=is_complete,
                    limits={"linear": 1 / LARGEST_EXPONENT})  # fmt: skip


if __name__ == "__main__":
    main()
