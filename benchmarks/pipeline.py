"""Time of pipelined steps against theory, and memory by number of microbatches.

    python benchmarks/pipeline.py [--quick]

Time: an update with N stages is compared with the same data-parallel update on as many devices,
both with full rematerialisation. In theory, the ratio is (M + N - 1) / M. Virtual devices share the
cores, so that idle ticks of a stage have the same cost as on a real device; other rows are of two
processes over loopback. Memory: temporary bytes of a device from `memory_analysis()`, compared with
a differentiated pipeline as most JAX frameworks write it (`rolled_gradients`).
"""

import itertools
import json
import operator
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=" + os.environ.get("DEVICES", "8")

import jax
import jax.numpy as jnp
import numpy as np
import results
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxforge.aux_outputs import LossWeights
from jaxforge.config.job import JobConfig
from jaxforge.model.layer import LayerSettings
from jaxforge.model.remat import block
from jaxforge.model.transformer import Params
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import batch_shardings, param_shardings
from jaxforge.program import Program
from jaxforge.step.cross_entropy import weighted_loss
from jaxforge.step.logit_tiles import tiles_of
from jaxforge.step.train_step import Controls
from jaxforge.step.update_loss import Batch

ROWS, SEQ = 4, 128  # of a microbatch, over all devices
MODEL = {"dim": 256, "n_layers": 8, "n_heads": 4, "vocab_size": 4096, "ffn_hidden_dim": 1024}
PROCESSES = 2


def config_of(microbatches: int, **distributed: Any) -> JobConfig:  # noqa: ANN401
    """Return a config with this many microbatches on any mesh."""
    axes = {"dp_shard": 1, **distributed}
    train = {
        "seq_len": SEQ,
        "batch_size": ROWS // axes["dp_shard"],
        "grad_accum_steps": microbatches,
        "activation_checkpointing": "full",
        "mixed_precision": "fp32",
    }
    model = {**MODEL, "max_seq_len": SEQ}
    return JobConfig.model_validate({"model": model, "train": train, "distributed": axes})


def rolled_gradients(program: Program) -> Callable[..., tuple[Params, Array]]:
    """Differentiate a forward pipeline, so that the first microbatch goes backward last.

    Stages are a leading dimension of the activations, split over `pp`. In each tick all stages run
    at once by `vmap`, then the dimension is rolled by one. Autodiff goes through the scan over M +
    N - 1 ticks and saves the input of each; the backward pass recomputes stages and saves their
    matrix products, as jaxforge does.
    """
    model, mesh = program.model, program.mesh
    stages, train = mesh.shape["pp"], program.config.train

    def stage(layers: Params, x: Array) -> Array:
        context = model.context(x)

        def layer_step(x: Array, layer: Params) -> tuple[Array, None]:
            settings = LayerSettings(model.plan.layers[0], model.plan, model.runtime)
            return model.module("layers", layer)(x, context, settings=settings)[0], None

        return jax.lax.scan(block("dots_saveable", layer_step), x, layers)[0]

    def split(x: Array) -> Array:
        spec = P("pp", ("dp_replicate", "dp_shard"))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    every_stage = block("full", jax.vmap(stage, spmd_axis_name="pp"))

    def loss(params: Params, batch: Batch) -> Array:
        tokens = batch["input_ids"]
        count = tokens.shape[0]
        layers = jax.tree.map(lambda p: p.reshape(stages, -1, *p.shape[1:]), params["layers"])

        def tick(x: Array, t: Array) -> tuple[Array, Array]:
            entering = model.embed_tokens(params, tokens[jnp.minimum(t, count - 1)])
            y = every_stage(layers, split(x.at[0].set(entering)))
            return split(jnp.roll(y, 1, axis=0)), y[-1]

        x = model.embed_tokens(params, tokens[0])
        empty = split(jnp.zeros((stages, *x.shape), x.dtype))
        _, outputs = jax.lax.scan(tick, empty, jnp.arange(count + stages - 1))

        def leave(total: Array, of_one: tuple[Array, Array]) -> tuple[Array, None]:
            hidden, labels = model.final_norm(params, of_one[0]), of_one[1]
            tiles = tiles_of(train, labels, model.head(params), model)
            loss_weights = LossWeights(jnp.float32(1 / batch["labels"].size), 0.0)
            loss = weighted_loss(tiles, hidden, model.head(params), labels, loss_weights)
            return total + loss.value, None

        checkpointed = block("full", leave)
        return jax.lax.scan(checkpointed, 0.0, (outputs[stages - 1 :], batch["labels"]))[0]

    shardings = param_shardings(model.abstract, model.axes, mesh)

    def gradients(params: Params, state: Params, batch: Batch) -> tuple[Params, Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.lax.with_sharding_constraint(grads, shardings), value

    return gradients


def batch_of(config: JobConfig, mesh: Mesh) -> Batch:
    """Return a batch of random tokens."""
    shape = (config.train.grad_accum_steps, ROWS, SEQ)
    tokens = np.random.default_rng(0).integers(0, MODEL["vocab_size"], shape, np.int32)
    batch = {"input_ids": tokens, "labels": tokens}
    return jax.device_put(batch, batch_shardings(mesh, batch))


def temporary_megabytes(
    gradients: Callable[[Program], Callable], config: JobConfig, devices: Sequence[jax.Device]
) -> float:
    """Return the temporary memory of a device while gradients are computed."""
    program = Program(config, make_mesh(config, list(devices)))
    params, batch = program.abstract_state().params, batch_of(config, program.mesh)
    with program.context():
        lowered = jax.jit(gradients(program)).lower(params, {}, batch)
        return lowered.compile().memory_analysis().temp_size_in_bytes / 1e6


class Timed:
    """Job whose updates can be timed."""

    def __init__(self, config: JobConfig, devices: Sequence[jax.Device]) -> None:
        program = Program(config, make_mesh(config, list(devices)))
        with program.context():
            self.state = program.init(0)
            self.batch = batch_of(config, program.mesh)
            self.step = program.step.lower(self.state, self.batch, Controls()).compile()

    def seconds(self) -> float:
        """Return the seconds of one update."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch, Controls())
        jax.block_until_ready(metrics)
        return time.perf_counter() - start


def times(configs: dict[str, JobConfig], repeats: int) -> dict[str, float]:
    """Return the median seconds of an update of each, alternating."""
    n = jax.device_count() if jax.process_count() > 1 else 4
    jobs = {name: Timed(config, jax.devices()[:n]) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn, (name, job) in itertools.product(range(repeats + 1), jobs.items()):
        took = job.seconds()
        if turn:
            seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def time_rows(where: str, stages: int, microbatches: int, result: dict[str, float]) -> list:
    """Return rows against the data-parallel step, plain and with theory's idle ticks."""
    case = f"{where}: {stages} stages, {microbatches} microbatches"
    theory = (microbatches + stages - 1) / microbatches
    peers = {
        "data-parallel": result["plain"],
        "data-parallel x (M + N - 1) / M": result["plain"] * theory,
    }
    return [
        results.Row(case, round(result["pipelined"], 3), peer, round(seconds, 3), "s",
                    smaller_is_better=True)
        for peer, seconds in peers.items()
    ]  # fmt: skip


def jobs_of(stages: int, microbatches: int) -> dict[str, JobConfig]:
    """Return the two jobs to compare."""
    return {
        "pipelined": config_of(microbatches, pp=stages),
        "plain": config_of(microbatches, dp_shard=stages),
    }


def two_processes(microbatches: int, repeats: int) -> dict[str, float]:
    """Return `times` of two stages, each in its own process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    command = [sys.executable, __file__, "--worker", str(microbatches), str(repeats)]
    env = {**os.environ, "DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen([*command, address, str(i)], env=env, stdout=subprocess.PIPE, text=True)
        for i in range(PROCESSES)
    ]
    outputs = [worker.communicate(timeout=900)[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("\n".join(outputs))
    return json.loads(outputs[0].splitlines()[-1])


def run_process(microbatches: int, repeats: int, address: str, index: int) -> None:
    """Run one of the processes."""
    jax.distributed.initialize(address, PROCESSES, index)
    print(json.dumps(times(jobs_of(PROCESSES, microbatches), repeats)))


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    repeats = 1 if quick else 3
    rows = []
    for microbatches in (8,) if quick else (8, 32):
        result = times(jobs_of(4, microbatches), repeats)
        rows += time_rows("virtual devices", 4, microbatches, result)
        result = two_processes(microbatches, repeats)
        rows += time_rows("two processes", PROCESSES, microbatches, result)
    devices, of_step = jax.devices()[:4], operator.attrgetter("gradients")
    for microbatches in (8, 16) if quick else (8, 16, 32, 64):
        memory = {
            "1f1b": (of_step, config_of(microbatches, pp=4)),
            "gpipe": (of_step, config_of(microbatches, pp=4, pp_schedule="gpipe")),
            "differentiated": (rolled_gradients, config_of(microbatches, pp=4)),
        }
        result = {
            name: round(temporary_megabytes(gradients, config, devices), 1)
            for name, (gradients, config) in memory.items()
        }
        rows += [
            results.Row(f"memory of 1f1b, {microbatches} microbatches", result["1f1b"], peer,
                        result[peer], "MB", smaller_is_better=True)
            for peer in ("gpipe", "differentiated")
        ]  # fmt: skip
    notes = [
        f"{MODEL['n_layers']} layers of {MODEL['dim']}, microbatches of {ROWS} x {SEQ}, float32",
        "gpipe is ours; differentiated: vmap over stages and a roll, through jax.grad",
    ]
    results.report("pipeline", rows, ("jax", "jaxlib"), notes=notes, write=not quick)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        given = sys.argv[2:]
        run_process(int(given[0]), int(given[1]), given[2], int(given[3]))
    else:
        main()
