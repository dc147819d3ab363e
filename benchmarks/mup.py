"""Coordinate check and learning-rate transfer of muP: `python benchmarks/mup.py` (15 minutes).

The coordinate check (Tensor Programs V, appendix D.1) measures the size of values by the width of
the model, after a few steps at one learning rate. The transfer test measures the loss by learning
rate of a narrow and a wide model on the bytes of Python's source. `--only coordinates` runs only
the coordinate check, in two minutes.
"""

import functools
import os
import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from figures import DOCS
from jaxtyping import Array, Float, Int
from pictures import picture, power_of_two
from results import ELSEWHERE, arguments, write_json

from jaxforge.config.eval import STREAM
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import make_config
from jaxforge.model.layer import Capture
from jaxforge.model.transformer import Model, Params, build_model
from jaxforge.program import Program

BASE = 128
WIDTHS = (64, 128, 256, 512, 1024)
POINTS = ("embedding", "attention", "mlp", "residual", "logits")
INIT_STD = 0.08  # about 1/√BASE
RATES = tuple(2.0**n for n in range(-11, -5))
STEPS, BATCH, SEQ_LEN = 120, 8, 64
CORPUS = 4 << 20  # bytes
PACKAGES = ("jax", "flax", "optax")


def config(
    width: int,
    *,
    mup: bool,
    lr: float,
    steps: int,
    **model: Any,  # noqa: ANN401
) -> JobConfig:
    """Return a config of two layers whose head size grows with the width."""
    shape = {
        "dim": width, "n_layers": 2, "n_heads": 4, "ffn_hidden_dim": 2 * width, "vocab_size": 256,
        "max_seq_len": SEQ_LEN, "init_std": INIT_STD,
    }  # fmt: skip
    base = {"mup_base_width": BASE, "mup_base_head_dim": BASE // 4} if mup else {}
    return make_config({
        "model": {**shape, **base, **model},
        "train": {"max_steps": steps, "seq_len": SEQ_LEN, "mixed_precision": "fp32"},
        "optimizer": {"lr": lr},
        "scheduler": {"name": "linear", "warmup_steps": steps // 10},
    })  # fmt: skip


@functools.cache
def corpus() -> np.ndarray:
    """Return the first bytes of the standard library's modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:CORPUS]
    return np.frombuffer(text, np.uint8)


def batches(steps: int, rows: int = BATCH) -> Iterator[Int[np.ndarray, "b s+1"]]:
    """Yield the same batches for every model."""
    rng, text = np.random.default_rng(0), corpus()
    for _ in range(steps):
        starts = rng.integers(0, len(text) - SEQ_LEN - 1, rows)
        yield np.stack([text[at : at + SEQ_LEN + 1] for at in starts]).astype(np.int32)


def trained(
    of: JobConfig, batches: Iterator[Int[np.ndarray, "b s+1"]]
) -> tuple[Model, Params, list[float]]:
    """Return a model, its parameters after a step on each batch, and the losses of the steps."""
    model = build_model(of)
    optimizer = Program(of, model=model).optimizer

    def loss(params: Params, tokens: Int[Array, "b s+1"]) -> Float[Array, ""]:
        logits = model.logits(params, model.hidden(params, tokens[:, :-1]))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, tokens: Array) -> tuple[Params, Any, Array]:  # noqa: ANN401
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.jit(model.init)(jax.random.key(0))
    state, losses = jax.jit(optimizer.init)(params), []
    for tokens in batches:
        params, state, value = step(params, state, tokens)
        losses.append(value)
    return model, params, [float(value) for value in losses]


def sizes(model: Model, params: Params, tokens: Int[np.ndarray, "b s"]) -> dict[str, float]:
    """Return mean |x| by `POINTS`, for layers in the last one."""

    def seen(params: Params, tokens: Array) -> dict[str, Array]:
        capture = Capture(STREAM, lambda name, x: jnp.mean(jnp.abs(x)))
        hidden, out = model.forward(params, {"input_ids": tokens}, capture=capture)
        of_layers = {name: value[-1] for name, value in out.activations.items()}
        logits = jnp.mean(jnp.abs(model.logits(params, hidden)))
        embedded = jnp.mean(jnp.abs(model.embed(params, {"input_ids": tokens})))
        return {"embedding": embedded, **of_layers, "logits": logits}

    return {name: float(value) for name, value in jax.jit(seen)(params, tokens).items()}


def coordinates(
    widths: Sequence[int],
    *,
    mup: bool,
    steps: int = 5,
    rows: int = BATCH,
    **model: Any,  # noqa: ANN401
) -> dict[str, list[float]]:
    """Return mean |x| by `POINTS` and width, after some steps at the same learning rate."""
    result: dict[str, list[float]] = {name: [] for name in POINTS}
    for width in widths:
        of = config(width, mup=mup, lr=2**-6, steps=10 * steps, **model)
        *steps_of, last = batches(steps + 1, rows)
        output, params, _ = trained(of, iter(steps_of))
        for name, value in sizes(output, params, last[:, :-1]).items():
            result[name].append(value)
    return result


def growth(values: Sequence[float]) -> float:
    """Return the ratio of a value at the last width to that at the first."""
    return values[-1] / values[0]


def final_loss(width: int, *, mup: bool, lr: float, steps: int) -> float:
    """Return the mean loss over the last tenth of a training."""
    _, _, losses = trained(config(width, mup=mup, lr=lr, steps=steps), batches(steps))
    return statistics.fmean(losses[-max(1, steps // 10) :])


def check_coordinates(widths: Sequence[int], *, write: bool) -> None:
    """Run the coordinate check; write and plot its results."""
    result = {how: coordinates(widths, mup=how == "muP") for how in ("standard", "muP")}
    rows = [
        {"": how, "mean abs. of": name,
         **{f"width {w}": round(v, 3) for w, v in zip(widths, of[name], strict=True)},
         "last / first": round(growth(of[name]), 2)}
        for how, of in result.items()
        for name in POINTS
    ]  # fmt: skip
    print(*rows, sep="\n")
    if not write:
        return
    write_json("mup", rows, PACKAGES)
    if ELSEWHERE not in os.environ:
        by_width = {
            how: {name: list(zip(widths, of[name], strict=True)) for name in POINTS}
            for how, of in result.items()
        }
        (DOCS / "mup-coordinates.svg").write_text(picture(by_width, "width", log_y=True))


def compare_rates(
    narrow: int, wide: int, rates: Sequence[float], steps: int, *, write: bool
) -> None:
    """Compare losses by learning rate."""
    by_rate: dict[str, dict[str, list[tuple[float, float]]]] = {"standard": {}, "muP": {}}
    for how, width in (("standard", narrow), ("muP", wide), ("standard", wide)):
        curve = by_rate[how].setdefault(f"width {width}", [])
        for lr in rates:
            curve.append((lr, final_loss(width, mup=how == "muP", lr=lr, steps=steps)))
            print(how, width, power_of_two(lr), f"{curve[-1][1]:.3f}", flush=True)
    base = f"width {narrow}"  # muP equals the standard there
    by_rate["muP"] = {base: by_rate["standard"][base], **by_rate["muP"]}
    rows = [
        {"": how, "of": name, **{power_of_two(lr): round(loss, 3) for lr, loss in curve},
         "best": power_of_two(min(curve, key=lambda point: point[1])[0])}
        for how, curves in by_rate.items()
        for name, curve in curves.items()
    ]  # fmt: skip
    print(*rows, sep="\n")
    if not write:
        return
    write_json("mup_rates", rows, PACKAGES)
    if ELSEWHERE not in os.environ:
        (DOCS / "mup-rates.svg").write_text(picture(by_rate, "learning rate", log_y=False))


def main() -> None:
    """Run the measurements; write and plot the results."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("coordinates", "rates"), help="one of the two")
    args = parser.parse_args()
    if args.only != "rates":
        check_coordinates(WIDTHS[:3] if args.quick else WIDTHS, write=not args.quick)
    if args.only != "coordinates":
        steps, rates = (10, RATES[2:4]) if args.quick else (STEPS, RATES)
        narrow, wide = (64, BASE) if args.quick else (BASE, 512)
        compare_rates(narrow, wide, rates, steps, write=not args.quick)


if __name__ == "__main__":
    main()
