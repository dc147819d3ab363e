"""Memory and cycles of pipelined steps of Llama 2 7B compiled for 16 chips of v5e, without a TPU.

    pip install "jax[tpu]"
    python benchmarks/pipeline_aot.py [--quick]

Four stages, microbatches of 4 x 2048, full rematerialisation, gradients reduced per microbatch.
Peak memory of a device and the compiler's estimate of cycles (`jaxforge/tools/plan/hlo.py`) are
measured by the number of microbatches, and compared with a differentiated pipeline as most JAX
frameworks write it (`pipeline.rolled_gradients`). Programs that do not fit are reported as notes.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

import dataclasses
from typing import Any

import aot  # sets the environment for compiling without a TPU
import jax
import optax
import pipeline
import results
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.parallel import targets, xla_flags
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import Controls
from jaxforge.step.update_loss import Batch

STAGES, ROWS, SEQ = 4, 4, 2048
TOPOLOGY = "v5e:4x4"
MESHES = {"dp_shard 4": {"dp_shard": 4}, "dp_shard 2 x tp 2": {"dp_shard": 2, "tp": 2}}


def config_of(microbatches: int, axes: dict[str, int]) -> JobConfig:
    """Return the config as a user would write it."""
    train = {
        "batch_size": ROWS // axes["dp_shard"],
        "seq_len": SEQ,
        "grad_accum_steps": microbatches,
        "activation_checkpointing": "full",
        "grad_sync": "microbatch",
    }
    model = {**aot.LLAMA_2_7B, "max_seq_len": SEQ}
    distributed = {"pp": STAGES, **axes}
    return JobConfig.model_validate({"model": model, "train": train, "distributed": distributed})


def rolled_step(program: Program) -> jax.stages.Lowered:
    """Return a step with the gradients of a differentiated pipeline."""
    gradients = pipeline.rolled_gradients(program)

    def step(state: TrainState, batch: Batch, controls: Controls) -> tuple:
        grads, loss = gradients(state.params, {}, batch)
        updates, opt_state = program.optimizer.update(
            grads, state.opt_state, state.params, lr_scale=controls.lr_scale
        )
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
        return new, loss

    with program.context():
        state, batch = program.abstract_state(), program.abstract_batch()
        return jax.jit(step, donate_argnums=0).lower(state, batch, Controls())


def measured(config: JobConfig, devices: list[jax.Device], *, rolled: bool) -> dict[str, Any] | str:
    """Return the compiler's figures, or the reason for its failure."""
    options = xla_flags.compiler_options(devices[0], {})
    lower = rolled_step if rolled else Program.lower
    try:
        program = Program(config, make_mesh(config, devices))
        return aot.measure(lower(program), options, config, program.mesh, TOPOLOGY)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return str(error).partition("\n")[0][:160]


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    if not targets.has_tpu_compiler():
        raise SystemExit('the compiler for TPU is missing: pip install "jax[tpu]"')
    devices = list(targets.tpus(TOPOLOGY))
    rows, notes = [], ["cycles leave out collectives and attention kernels"]
    for name, axes in list(MESHES.items())[: 1 if quick else None]:
        for microbatches in (8,) if quick else (8, 16, 32, 64):
            case = f"pp {STAGES} x {name}, {microbatches} microbatches"
            config = config_of(microbatches, axes)
            result = [measured(config, devices, rolled=rolled) for rolled in (False, True)]
            Console().print(case, *result, highlight=False)
            if troubles := [row for row in result if isinstance(row, str)]:
                notes.append(f"{case}: {result[0]}; differentiated: {troubles[0]}")
                continue
            ours, theirs = result
            rows += [
                results.Row(case, ours[unit], "differentiated pipeline",
                            theirs[unit], unit, smaller_is_better=True)
                for unit in (aot.CYCLES, aot.SECONDS, aot.ALONE, aot.MEMORY)
            ]  # fmt: skip
    results.report("pipeline", rows, ("jax", "jaxlib", "libtpu"), device="tpu", notes=notes,
                   write=not quick)  # fmt: skip


if __name__ == "__main__":
    main()
