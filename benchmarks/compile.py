"""Time to the first step of a run, and compile time by depth.

    python benchmarks/compile.py [--quick]

First step: a new process trains until the first loss is printed, with an empty compilation cache
and with the cache of the previous process. Depth: tracing, lowering and compiling the whole step
with 4, 16 and 64 layers, compared with the same decoder with its layers in a Python loop.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import results

from jaxforge.config.job import JobConfig
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program

ROOT = Path(__file__).parents[1]
DIM, HEADS, FFN, VOCABULARY = 128, 4, 512, 1024
BATCH, SEQ = 2, 128
Weights = dict[str, jax.Array]


def seconds_to_first_step(cache: Path) -> float:
    """Return the seconds from the start of a process to its first loss."""
    with tempfile.TemporaryDirectory() as run:
        command = [
            sys.executable, "-m", "jaxforge.train", "--config", "configs/quickstart.toml",
            "--data.dataset_path=", "--data.tokenizer_path=", "--data.pack_sequences=false",
            "--eval.enabled=false", "--train.max_steps=1", "--metrics.log_interval=1",
            f"--checkpoint.dir={run}", f"--train.compilation_cache_dir={cache}",
        ]  # fmt: skip
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if line.startswith("[step 1]"):
                seconds = time.perf_counter() - started
                process.communicate()
                return seconds
    raise RuntimeError("".join(output))


def start_row(rounds: int) -> results.Row:
    """Compare a second start with a first one; medians over new caches."""
    first, second = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            first.append(seconds_to_first_step(Path(cache)))
            second.append(seconds_to_first_step(Path(cache)))
    medians = (round(statistics.median(times), 2) for times in (second, first))
    warm, cold = medians
    return results.Row("second start, to the first step", warm, "first start", cold, "s",
                       smaller_is_better=True)  # fmt: skip


def scanned_seconds(layers: int) -> float:
    """Return the compile time of jaxforge's step."""
    config = JobConfig.model_validate(
        {
            "model": {"dim": DIM, "n_heads": HEADS, "ffn_hidden_dim": FFN, "n_layers": layers,
                      "vocab_size": VOCABULARY},
            "train": {"batch_size": BATCH, "seq_len": SEQ, "mixed_precision": "fp32"},
        }
    )  # fmt: skip
    program = Program(config, make_mesh(config, jax.devices()[:1]))
    return _seconds(program.lower)


def unrolled_seconds(layers: int) -> float:
    """Return the compile time of the same update with the layers in a Python loop."""
    square, wide = (DIM, DIM), (FFN, DIM)
    shapes = {"q": square, "k": square, "v": square, "o": square,
              "gate": wide, "up": wide, "down": wide[::-1], "n1": (DIM,), "n2": (DIM,)}  # fmt: skip
    leaf = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    table = jax.ShapeDtypeStruct((VOCABULARY, DIM), jnp.float32)
    params = {"embedding": table, "head": table, "norm": leaf["n1"], "layers": [leaf] * layers}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(params: dict, moments: optax.OptState, tokens: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(_loss)(params, tokens)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    moments = jax.eval_shape(optimizer.init, params)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return _seconds(lambda: jitted.lower(params, moments, tokens))


def _loss(params: dict, tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = _block(x, layer)
    logits = _norm(x, params["norm"]) @ params["head"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1)).mean()


def _block(x: jax.Array, w: Weights) -> jax.Array:
    y = _norm(x, w["n1"])
    q, k, v = ((y @ w[n].T).reshape(BATCH, SEQ, HEADS, -1) for n in "qkv")
    y = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
    x = x + y.reshape(x.shape) @ w["o"].T
    y = _norm(x, w["n2"])
    return x + (jax.nn.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def _rotate(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(SEQ), 10000.0 ** (-jnp.arange(half) / half))[:, None]
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _seconds(lower: Callable[[], jax.stages.Lowered]) -> float:
    started = time.perf_counter()
    lower().compile()
    return time.perf_counter() - started


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    jax.config.update("jax_enable_compilation_cache", False)
    rows = [start_row(rounds=1 if quick else 3)]
    scanned_seconds(1)  # the first compilation of a process pays for its start
    for layers in (4, 16) if quick else (4, 16, 64):
        ours, theirs = scanned_seconds(layers), unrolled_seconds(layers)
        case = f"compile, {layers} layers"
        rows.append(results.Row(case, round(ours, 2), "layers in a Python loop",
                                round(theirs, 2), "s", smaller_is_better=True))  # fmt: skip
    results.report("compile", rows, ("jax", "flax", "optax"), write=not quick)


if __name__ == "__main__":
    main()
