"""Memory and time of every `train.activation_checkpointing`, compared with saving everything.

    python benchmarks/remat.py [--quick]

All policies use the same model and batch, and alternate in one run. Memory is what the compiled
step needs in addition to its arguments (`memory_analysis`).
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import results

from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.model.transformer import parameter_count
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.step.train_step import Controls

POLICIES = get_args(TrainConfig.model_fields["activation_checkpointing"].annotation)
# Enough layers that CPUs scan them too: unrolled, XLA:CPU saves nothing by recomputing.
MODEL = {"dim": 192, "n_layers": 16, "n_heads": 6, "n_kv_heads": 6, "vocab_size": 4096}
SHAPES = {True: (2, 128), False: (4, 512)}  # quick -> sequences, tokens of each


class Case(NamedTuple):
    """Compiled step of a `[train]` section.

    Attributes:
        megabytes: temporary memory of the step.
        parameters: number of parameters.
        step: function that runs one update.
    """

    megabytes: float
    parameters: int
    step: Callable[[], None]


def compile_case(batch: int, seq: int, **train: Any) -> Case:  # noqa: ANN401
    """Compile the step with settings of `[train]` on one device, in float32."""
    size = {"batch_size": batch, "seq_len": seq, "mixed_precision": "fp32"}
    config = JobConfig.model_validate({"model": MODEL, "train": {**size, **train}})
    program = Program(config, make_mesh(config, jax.devices()[:1]))
    tokens = jax.random.randint(jax.random.key(1), (1, batch, seq), 0, MODEL["vocab_size"])
    data = {"input_ids": tokens, "labels": jnp.roll(tokens, -1, -1)}
    with program.context():
        state = [program.init(0)]
        compiled = program.step.lower(state[0], data, Controls()).compile()

    def run() -> None:
        state[0], metrics = compiled(state[0], data, Controls())
        jax.block_until_ready(metrics)

    megabytes = compiled.memory_analysis().temp_size_in_bytes / 1e6
    return Case(megabytes, parameter_count(program.model.abstract), run)


def measure(
    cases: dict[str, Case], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median milliseconds of a step of each, alternating, after a warm-up round."""
    seconds: dict[str, list[float]] = {policy: [] for policy in cases}
    for _ in range(rounds + 1):
        for policy, case in cases.items():
            started = clock()
            case.step()
            seconds[policy].append(clock() - started)
    return {policy: 1e3 * statistics.median(times[1:]) for policy, times in seconds.items()}


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    batch, seq = SHAPES[quick]
    cases = {
        policy: compile_case(batch, seq, activation_checkpointing=policy) for policy in POLICIES
    }
    times = measure(cases, rounds=2 if quick else 7)
    base = cases["none"]
    rows = []
    for policy in POLICIES:
        memory = round(cases[policy].megabytes, 1), "none", round(base.megabytes, 1)
        rows.append(results.Row(f"{policy}: memory", *memory, "MB", smaller_is_better=True))
        speed = round(times[policy]), "none", round(times["none"])
        rows.append(results.Row(f"{policy}: time", *speed, "ms", smaller_is_better=True))
    size = f"{base.parameters / 1e6:.1f}M parameters, {batch} x {seq} tokens, float32"
    results.report("remat", rows, ("jax",), notes=[size], write=not quick)


if __name__ == "__main__":
    main()
