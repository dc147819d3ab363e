"""Influence of documents on the gradient of an update.

With g = Σ g_d over documents d, each weighted as in the update's loss:

    norm        ‖g_d‖
    without     ‖g - g_d‖, the gradient norm without the document

The sum is exact, except for loss terms that do not belong to tokens (the balance of experts), which
no document contains.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxforge.data.packing import IGNORE
from jaxforge.model.transformer import Params
from jaxforge.optim.optimizer import global_norm
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.parallel.sharding import batch_specs
from jaxforge.step.context import spread_sequences
from jaxforge.step.mtp import with_further_tokens
from jaxforge.step.token_weights import token_weights, valid_tokens
from jaxforge.step.update_loss import Batch, with_dataset_mask
from jaxforge.tools.replay.documents import Document
from jaxforge.tools.replay.past import PastRun, Walk


class Influence(NamedTuple):
    """Influence of a part of a batch on its gradient.

    Attributes:
        norm: norm of the part's own gradient, ‖g_d‖.
        without: norm of the gradient without the part; NaN if either is not finite.
    """

    norm: float
    without: float

    @classmethod
    def of(cls, whole: float, square: float, product: float) -> "Influence":
        """Return the influence for ‖g‖, ‖g_d‖² and <g, g_d>."""
        # ‖g - g_d‖² = ‖g‖² - 2 <g, g_d> + ‖g_d‖²
        if not (math.isfinite(square) and math.isfinite(product)):
            return cls(math.sqrt(square) if math.isfinite(square) else math.inf, math.nan)
        return cls(math.sqrt(square), math.sqrt(max(0.0, whole**2 - 2 * product + square)))


class Influences:
    """Influences of the parts of a batch.

    Args:
        past: the run.
        walk: walk that stands before the step of the batch.
        whole: gradient g of the batch, float32.
    """

    def __init__(self, past: PastRun, walk: Walk, whole: Params) -> None:
        self._batch, self._state, self._whole = walk.batch, walk.state, whole
        self._norm = float(global_norm(whole))
        self._gradients = past.gradients
        counts = valid_tokens(walk.batch["labels"])
        self._weights = np.asarray(token_weights(counts, past.config.train.loss_norm))
        self._rows = walk.batch["labels"].shape[1]
        self._n_datasets, self._model = len(past.config.data.datasets), past.model
        self._measure = jax.jit(functools.partial(self._measured, data_parallel_size(past.mesh)))
        self._remake = jax.jit(self._remade)

    def of_rows(self) -> list[Influence]:
        """Return the influence of every row, in order."""
        rows, length = self._batch["labels"].shape[0] * self._rows, self._batch["labels"].shape[2]
        return [self.of(row, 0, length) for row in range(rows)]

    def of(self, row: int, start: int, end: int) -> Influence:
        """Return the influence of tokens `start` to `end` of a row, numbered over microbatches."""
        microbatch = row // self._rows
        part = np.array([microbatch, row % self._rows, start, end], np.int32)
        weight = self._weights[microbatch]
        square, product = self._measure(
            self._state.params, self._state.model_state, self._batch, self._whole, part, weight
        )
        return Influence.of(self._norm, float(square), float(product))

    def without(self, documents: Iterable[Document]) -> tuple[float, float]:
        """Return loss and gradient norm of the update without the loss of these documents."""
        keep = np.ones(self._batch["labels"].shape, bool)
        for document in documents:
            keep[
                document.row // self._rows, document.row % self._rows, document.start : document.end
            ] = False
        loss, norm = self._remake(self._state.params, self._state.model_state, self._batch, keep)
        return float(loss), float(norm)

    def _measured(
        self,
        groups: int,
        params: Params,
        model_state: Params,
        batch: Batch,
        whole: Params,
        part: Int[Array, "4"],
        weight: Float[Array, ""],
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return ‖g_d‖² and <g, g_d>."""
        # The row is repeated for each data-parallel group, since a batch has a row for each. Only
        # the first copy has labels.
        microbatch, row, start, end = part
        specs = batch_specs(batch)

        def repeated(name: str, x: Array) -> Array:
            row_ = jnp.broadcast_to(x[microbatch, row], (1, groups, *x.shape[2:]))
            return jax.lax.with_sharding_constraint(row_, specs[name])

        rows = {name: repeated(name, x) for name, x in batch.items()}
        position = jnp.arange(rows["labels"].shape[-1])
        is_in = (position >= start) & (position < end) & (jnp.arange(groups) == 0)[:, None]
        labels = jnp.where(is_in, rows["labels"], IGNORE)
        grads, _ = self._of({**rows, "labels": labels}, params, model_state)
        share = weight * jnp.sum(labels != IGNORE)  # scales the document's mean to its part of g
        square = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads))
        products = jax.tree.map(lambda part_g, g: jnp.sum(part_g * g), grads, whole)
        return square * share**2, sum(jax.tree.leaves(products)) * share

    def _remade(
        self, params: Params, model_state: Params, batch: Batch, keep: Array
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        labels = jnp.where(keep, batch["labels"], IGNORE)
        grads, loss = self._of({**batch, "labels": labels}, params, model_state)
        return loss, global_norm(grads)

    def _of(
        self, batch: Batch, params: Params, model_state: Params
    ) -> tuple[Params, Float[Array, ""]]:
        batch = with_dataset_mask(batch, self._n_datasets)
        batch = with_further_tokens(batch, self._model.config)
        batch = spread_sequences(self._model, batch)
        grads, loss = self._gradients(params, model_state, batch, None)
        return grads, loss.value
