"""Explanation of out-of-memory errors: what needs the memory, and settings that need less."""

import contextlib
import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.config.train import EIGHT_BIT
from jaxforge.errors import UserError
from jaxforge.parallel import device_memory
from jaxforge.parallel.device_memory import bytes_per_device, gigabytes
from jaxforge.parallel.mesh import data_parallel_size, token_parallel_size
from jaxforge.program import Program


@contextlib.contextmanager
def explained(program: Program) -> Iterator[None]:
    """Turn out-of-memory errors within the block into an explanation.

    Raises:
        UserError: a device or the host is out of memory. Another start would fail the same way.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not device_memory.is_out_of_memory(error):
            raise
        raise UserError(explanation(str(error), program)) from error


def explanation(message: str, program: Program) -> str:
    """Return what needs the memory, and remedies, the cheapest first."""
    config, mesh, state = program.config, program.mesh, program.abstract_state()
    params = bytes_per_device(state.params)
    moments = bytes_per_device((state.opt_state, state.ema))
    limit = device_memory.capacity()
    # Parameters and gradients have one size; the average is with the moments.
    whole = 2 * params + moments
    dp = data_parallel_size(mesh)
    rows, length = config.train.microbatch_size(dp) // dp, config.train.seq_len
    average = " and average of parameters" if config.train.averages_weights else ""
    needs = (
        f"each device holds {gigabytes(params)} of parameters, as much of gradients and "
        f"{gigabytes(moments)} of optimizer state{average}: {gigabytes(whole)} of "
        f"{gigabytes(limit)}. The remaining memory is for the activations of {rows:,} sequences "
        f"of {length:,} tokens"
    )
    reduces_whole = config.train.grad_sync == "update" and token_parallel_size(mesh) > 1
    advice = (
        smaller_state(config, whole, limit)
        if whole > limit
        else smaller_step(config, rows, reduces_whole=reduces_whole)
    )
    listed = "".join(f"\n  - {remedy}" for remedy in (*fewer_copies(config, mesh), *advice))
    return f"out of memory: {device_memory.first_line(message)}\n{needs}. What helps:{listed}"


def fewer_copies(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Yield a remedy if dp_shard could not split all of the state (`axes.with_equal_shards`)."""
    copies = mesh.shape["dp_replicate"] // config.distributed.dp_replicate
    if copies > 1:
        yield (
            f"a distributed.dp_shard that divides model.dim = {config.model.dim}: the current "
            f"value does not, so each device holds {copies} times as much of the state"
        )


def smaller_state(config: JobConfig, whole: int, limit: int) -> Iterator[str]:
    """Yield remedies for a state that does not fit with any batch size."""
    times = math.ceil(whole / (0.8 * limit))  # a fifth of the memory is for activations
    yield (
        f"{times} times as many devices to split the state (distributed.dp_shard, tp or pp), or a "
        "smaller model: the state alone does not fit"
    )
    yield from _narrower(config)


def smaller_step(config: JobConfig, rows: int, *, reduces_whole: bool) -> Iterator[str]:
    """Yield changes that shrink a step of `rows` sequences per device, the cheapest first."""
    train = config.train
    if reduces_whole:
        yield 'train.grad_sync = "microbatch": weights and gradients are whole for one layer only'
    if rows > 1:
        # Fewer rows and more microbatches make the same update.
        half = rows // 2
        accum = math.ceil(train.grad_accum_steps * rows / half)
        key = "" if train.global_batch_size else f"train.batch_size = {half} and "
        yield f"{key}train.grad_accum_steps = {accum}: half the activations, the same update"
    if train.activation_checkpointing != "full":
        yield 'train.activation_checkpointing = "full": activations are recomputed block by block'
    elif "activations" not in train.offload and config.distributed.pp == 1:
        yield 'train.offload = ["activations"]: saved activations move to host memory'
    if train.loss_fn == "cross_entropy":
        yield 'train.loss_fn = "chunked_cross_entropy": logits are computed in chunks'
    yield from _narrower(config)
    yield "more devices (distributed.dp_shard), or a shorter train.seq_len"


def _narrower(config: JobConfig) -> Iterator[str]:
    train = config.train
    if train.mixed_precision == "fp32":
        yield 'train.mixed_precision = "bf16": activations of half the size'
    if not train.offload and config.optimizer.traits.updates_by_rows and config.distributed.pp == 1:
        yield 'train.offload = ["optimizer"]: moments stay in host memory'
    if train.opt_state_dtype == "float32":
        yield 'train.opt_state_dtype = "bfloat16": moments of half the size'
    if train.opt_state_dtype != EIGHT_BIT and config.optimizer.traits.updates_by_rows:
        yield 'train.opt_state_dtype = "8bit": moments of a quarter of float32\'s size'
