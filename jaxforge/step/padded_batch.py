"""Batches of several sizes in arrays of one size, so that one program runs all of them.

A batch of n microbatches is padded to the largest number of microbatches of the run, and n goes
into the program as a number. Padding contributes nothing: the loop over microbatches ends after n
(`step.gradients.accumulate`), and no padded label is valid.

    input_ids       [n, b, s]  ->  [largest, b, s]
    labels          [n, b, s]  ->  [largest, b, s], IGNORE after the first n
    n_microbatches             ->  int32

Only the n microbatches are sent to the devices, where they are padded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Shaped

from jaxforge.data.packing import IGNORE
from jaxforge.parallel.sharding import batch_shardings

N_MICROBATCHES = "n_microbatches"
"""Field of a padded batch: number of its microbatches, int32."""

MAX_PROGRAMS = 4
"""Sizes of a batch ramp up to which each size has its own program.

A program of one size has a loop whose length XLA knows, which it may unroll or pipeline, and the
time to compile a few of them is small. Time and memory of compiled programs grow with their number.
"""

_PADDING = {"labels": IGNORE, "is_padding": 1}
"""Values of padding; 0 in all other fields."""


@functools.partial(jax.jit, static_argnames=("largest", "mesh"))
def pad_batch(
    batch: dict[str, Shaped[Array, "m b ..."]], *, largest: int, mesh: Mesh
) -> dict[str, Shaped[Array, "..."]]:
    """Return the batch with arrays of `largest` microbatches, and its `n_microbatches`.

    Args:
        batch: a batch of at most `largest` microbatches.
        largest: microbatches of the result.
        mesh: mesh of the batch.
    """
    n = batch["labels"].shape[0]

    def padded(name: str, x: Array) -> Array:
        widths = [(0, largest - n)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, widths, constant_values=_PADDING.get(name, 0))

    result = {name: padded(name, x) for name, x in batch.items()} | {N_MICROBATCHES: jnp.int32(n)}
    return jax.lax.with_sharding_constraint(result, batch_shardings(mesh, result))


def microbatch_count(batch: dict[str, Array]) -> Int[Array, ""] | int:
    """Return the number of microbatches of a batch, without padding."""
    return batch.get(N_MICROBATCHES, batch["labels"].shape[0])


def reciprocal(microbatches: Int[Array, ""] | int, largest: int, size: int) -> Array | float:
    """Return 1 / (microbatches * size), with the same bits for a known and a traced number."""
    if isinstance(microbatches, int):
        return 1 / (microbatches * size)
    # From a table, because float32 has not every product that Python divides by.
    table = np.array([1 / (n * size) for n in range(1, largest + 1)], np.float32)
    return jnp.asarray(table)[microbatches - 1]
