"""Optimizers compared at equal numbers of tokens, each at its best learning rate.

    python benchmarks/optimizers.py [--quick] [--cases WORDS] [--jobs N] [--seconds N] [--data DIR]

Every optimizer trains the same model on the data of the quickstart (`make data/quickstart`), with
warm-up and a cosine schedule. Learning rates are powers of two. The search starts at a usual rate
and ends when the rates on both sides of the best one are worse. Each optimizer has a process of its
own that compiles one step: the learning rate is an argument. On a GPU, steps are timed while the
other processes wait. Nothing is downloaded.

Not in `make bench`: takes hours.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import results

import jaxforge as jf
from jaxforge.training import own_loop
from jaxforge.training.own_loop import Controls, Progress

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax", "flax", "optax")
MOST_RATES = 7
WINDOWS = 25  # points of a curve: means of the training loss


class Size(NamedTuple):
    """Size of the model and the run; the model has the vocabulary of the quickstart.

    `timed` is the number of timed steps.
    """

    dim: int
    n_layers: int
    batch: int
    seq: int
    steps: int
    dtype: str
    timed: int

    @property
    def settings(self) -> list[str]:
        """The settings of a run."""
        return [
            f"--model.dim={self.dim}", f"--model.n_layers={self.n_layers}",
            f"--model.n_heads={self.dim // 64}", f"--model.n_kv_heads={max(1, self.dim // 128)}",
            f"--train.batch_size={self.batch}", f"--train.seq_len={self.seq}",
            f"--train.max_steps={self.steps}", f'--train.mixed_precision="{self.dtype}"',
            f"--scheduler.warmup_steps={self.steps // 10}",
        ]  # fmt: skip


SIZES = {
    "quick": Size(64, 2, 4, 64, 8, "fp32", 2),
    "cpu": Size(64, 2, 8, 64, 200, "fp32", 0),
    "gpu": Size(384, 6, 16, 256, 500, "bf16", 30),
}


class Case(NamedTuple):
    """Settings of an optimizer, and the rate at which the search starts."""

    centre: float
    settings: Sequence[str] = ()


RMS = ("--optimizer.name=muon", "--optimizer.muon.nesterov=true", "--optimizer.muon.scale=rms")
CASES = {
    "AdamW": Case(2**-8),
    "AdamW, cautious decay": Case(2**-8, ("--optimizer.cautious_weight_decay=true",)),
    "AdEMAMix": Case(2**-9, ("--optimizer.name=optax.contrib.ademamix",
                             "--optimizer.options={b2 = 0.95, b3 = 0.99, alpha = 2.0}")),
    "Lion": Case(2**-11, ("--optimizer.name=lion", "--optimizer.betas=[0.9, 0.99]",
                          "--optimizer.weight_decay=0.5")),
    "Muon": Case(2**-8, RMS),
    "NorMuon": Case(2**-8, (*RMS, "--optimizer.muon.variant=normuon")),
    "SOAP": Case(2**-8, ("--optimizer.name=soap", "--optimizer.betas=[0.95, 0.95]",
                         "--optimizer.soap.max_precond_dim=2048")),
    "schedule-free AdamW": Case(2**-8, ("--optimizer.name=schedule_free_adamw",
                                        "--scheduler.name=none")),
}  # fmt: skip


class Plan(NamedTuple):
    """Work of one process.

    Attributes:
        name: the case.
        size: size of the model and the run.
        data: directory of the prepared data.
        most_rates: number of learning rates at most.
        deadline: time after which no rate may end.
    """

    name: str
    size: Size
    data: Path
    most_rates: int
    deadline: float


def settings_of(plan: Plan) -> list[str]:
    """Return the settings of a case over `configs/quickstart.toml`."""
    case = CASES[plan.name]
    warm_up = [f"--optimizer.schedule_free_adamw.warmup_steps={plan.size.steps // 10}"]
    return [
        *plan.size.settings, f"--data.dataset_path={plan.data / 'train'}",
        f"--data.tokenizer_path={plan.data / 'tokenizer'}",
        f"--eval.dataset_path={plan.data / 'validation'}",
        f"--optimizer.lr={case.centre}", *case.settings,
        *(warm_up if "schedule_free" in " ".join(case.settings) else ()),
    ]  # fmt: skip


class Trial:
    """A compiled step, the batches of the run, and the state from which every trial starts."""

    def __init__(self, plan: Plan) -> None:
        self._centre = CASES[plan.name].centre
        config = jf.load_config(ROOT / "configs" / "quickstart.toml", settings_of(plan))
        self.program = jf.Program(config)
        with self.program.context():
            self._step = self.program.lower().compile()
            self._evaluate = own_loop.open_evaluator(self.program)
            self._batches = list(own_loop.open_batches(self.program, Progress()))
            self._start = self.program.init()

    def milliseconds(self, steps: int) -> float | None:
        """Return the median time of some steps, or None for no steps."""
        if not steps:
            return None
        with self.program.context():
            state, seconds = self._fresh(), []
            for batch in self._batches[: steps + 1]:
                started = time.perf_counter()
                state, metrics = self._step(state, batch, Controls(1.0, next_lr_scale=1.0))
                jax.block_until_ready(metrics)
                seconds.append(time.perf_counter() - started)
        return 1e3 * statistics.median(seconds[1:])

    def train(self, lr: float) -> tuple[float, list[float]]:
        """Return the validation loss at the end, and the training loss of each step."""
        with self.program.context():
            state, losses = self._fresh(), []
            for batch in self._batches:
                controls = Controls(lr / self._centre, next_lr_scale=1.0)
                state, metrics = self._step(state, batch, controls)
                losses.append(metrics["loss"])
            final = own_loop.summary(self._evaluate(state.params))["eval/loss"]
        return final, [float(loss) for loss in jax.device_get(losses)]

    def state_bytes(self) -> float:
        """Return the bytes of the optimizer's state per parameter."""
        shapes = self.program.shapes
        stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.opt_state))
        return stored / sum(x.size for x in jax.tree.leaves(shapes.params))

    def _fresh(self) -> Any:  # noqa: ANN401 (a train state, which a step consumes)
        return jax.tree.map(lambda leaf: leaf.copy(), self._start)


def search(
    loss_of: Callable[[float], float], centre: float, most: int, has_time: Callable[[], bool]
) -> dict[float, float]:
    """Return losses by rate: the best rate has worse ones on both sides, if rates and time suffice.

    Args:
        loss_of: the loss of a rate; infinite if the training diverges.
        centre: the first rate.
        most: number of rates at most.
        has_time: whether there is time for another rate.
    """
    losses = {centre: loss_of(centre)}
    while len(losses) < most and has_time():
        best = min(losses, key=lambda rate: losses[rate])
        missing = [rate for rate in (best / 2, best * 2) if rate not in losses]
        if not missing:
            break
        losses[missing[0]] = loss_of(missing[0])
    return dict(sorted(losses.items()))


def share(barrier: threading.Barrier, turn: Any) -> None:  # noqa: ANN401 (a lock of processes)
    """Store what the processes of a wave share."""
    globals().update(BARRIER=barrier, TURN=turn)


def measure(plan: Plan) -> dict[str, Any]:
    """Return the results of one case, in a process of its own."""
    barrier, turn = (globals()[name] for name in ("BARRIER", "TURN"))
    try:
        trial = Trial(plan)
        barrier.wait()
        with turn:  # steps are timed by one process after the other
            milliseconds = trial.milliseconds(plan.size.timed)
        barrier.wait()
    except BaseException:
        barrier.abort()  # the others would wait forever
        raise
    curves, took = {}, [0.0]

    def loss_of(lr: float) -> float:
        started = time.time()
        loss, curves[lr] = trial.train(lr)
        took[0] = time.time() - started
        loss = loss if math.isfinite(loss) else math.inf
        print(f"{plan.name}: {lr:g}: {loss:.4f} ({took[0]:.1f} s)", flush=True)
        return loss

    losses = search(loss_of, CASES[plan.name].centre, plan.most_rates,
                    lambda: time.time() + 1.1 * took[0] < plan.deadline)  # fmt: skip
    best = min(losses, key=lambda rate: losses[rate])
    return {
        "optimizer": plan.name, "milliseconds": milliseconds, "bytes": trial.state_bytes(),
        "losses": losses, "best": best, "is_bracketed": {best / 2, best * 2} <= losses.keys(),
        "curve": smoothed(curves[best], plan.size.batch * plan.size.seq),
    }  # fmt: skip


def smoothed(losses: Sequence[float], tokens: int) -> list[tuple[int, float]]:
    """Return (tokens, mean loss) of consecutive windows."""
    length = math.ceil(len(losses) / WINDOWS)
    return [
        ((at + len(window)) * tokens, round(statistics.fmean(window), 4))
        for at in range(0, len(losses), length)
        for window in (losses[at : at + length],)
    ]


def measure_all(plans: Sequence[Plan], jobs: int) -> Iterator[dict[str, Any]]:
    """Yield the results of all cases, `jobs` of them at once."""
    processes = multiprocessing.get_context("spawn")
    for wave in (plans[at : at + jobs] for at in range(0, len(plans), jobs)):
        shared = processes.Barrier(len(wave)), processes.Lock()
        with ProcessPoolExecutor(len(wave), processes, share, shared) as pool:
            yield from pool.map(measure, wave)


def rows_of(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table, the best first."""
    first = measured[0]
    reference = first["losses"][first["best"]]
    rows = []
    for case in sorted(measured, key=lambda case: min(case["losses"].values())):
        loss = case["losses"][case["best"]]
        rows.append({
            "optimizer": case["optimizer"],
            "validation loss": round(loss, 4),
            f"above {first['optimizer']}": f"{loss - reference:+.3f}",
            "best rate": f"{case['best']:.2g}" + ("" if case["is_bracketed"] else " (last tried)"),
            "rates": len(case["losses"]),
            **_time_of(case["milliseconds"]),
            "bytes of state per parameter": round(case["bytes"], 2),
        })  # fmt: skip
    return rows


def _time_of(milliseconds: float | None) -> dict[str, float]:
    return {} if milliseconds is None else {"ms per step": round(milliseconds, 2)}


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = results.arguments(__doc__, cases=True)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes at once (default: 1 on "
                        "CPUs, all on a GPU)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="N",
                        help="start no further rate that would end later than this")  # fmt: skip
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "quickstart", metavar="DIR",
                        help="prepared data (default: %(default)s)")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    """Print the table; write results, figures and curves."""
    args, started = parse(), time.time()
    if not (args.data / "train").is_dir():
        raise SystemExit(f"{args.data} has no prepared data. Run `make data/quickstart`")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes share the GPU
    names = [name for name in CASES if args.cases.lower() in name.lower()]
    platform = jax.default_backend()
    size = SIZES["quick" if args.quick else platform]
    jobs = args.jobs or (1 if platform == "cpu" else len(names))
    run = args.data.resolve(), 2 if args.quick else MOST_RATES, started + args.seconds
    plans = [Plan(name, size, *run) for name in names]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        measured = list(measure_all(plans, jobs))
    rows = rows_of(measured)
    print(*rows, sep="\n")
    if args.quick and results.ELSEWHERE not in os.environ:
        return
    notes = [
        f"{size.n_layers} layers of {size.dim}, {size.steps} steps of {size.batch} x {size.seq} "
        f"tokens, {size.dtype}; {time.time() - started:.0f} s in {jobs} processes at once",
    ]
    rates = {case["optimizer"]: list(case["losses"].items()) for case in measured}
    curves = {case["optimizer"]: case["curve"] for case in measured}
    results.write_json("optimizers", rows, PACKAGES, notes=notes, platform=platform,
                       rates=rates, curves=curves)  # fmt: skip


if __name__ == "__main__":
    main()
