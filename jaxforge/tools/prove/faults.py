"""Known faults of parallel training, which the proof must find: the proof of the proof."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from jaxforge.config.axes import BATCH_AXES, data_parallel, declared_sizes
from jaxforge.config.job import JobConfig
from jaxforge.config.model import EXPERTS
from jaxforge.data.packing import IGNORE
from jaxforge.model.transformer import Params
from jaxforge.parallel.stages import is_stack
from jaxforge.state.train_state import TrainState
from jaxforge.step.gradients import Gradients
from jaxforge.step.update_loss import Batch, Loss
from jaxforge.tools.prove.smaller import device_count

HostBatch = dict[str, np.ndarray]
"""Fields of a batch [microbatches, sequences, tokens] on the host."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and where it is planted; one of the functions is set.

    Attributes:
        about: the fault, in words.
        applies: whether a config of a mesh can have it.
        batch: changes a batch on the host.
        gradients: wraps the function that computes gradients.
        optimizer: (config) -> settings of another config, whose optimizer is used.
        restored: changes a restored state.
    """

    about: str
    applies: Callable[[JobConfig], bool]
    batch: Callable[[HostBatch, JobConfig], HostBatch] | None = None
    gradients: Callable[[Gradients, JobConfig], Gradients] | None = None
    optimizer: Callable[[JobConfig], Mapping[str, Any]] | None = None
    restored: Callable[[TrainState], TrainState] | None = None

    @property
    def changes_program(self) -> bool:
        """True if a trainer must compile its update again."""
        return bool(self.gradients or self.optimizer)


def _always(config: JobConfig) -> bool:
    return True


def _has(axis: str) -> Callable[[JobConfig], bool]:
    return lambda config: getattr(config.distributed, axis) > 1


def _without_labels(batch: Any, rows: slice) -> Any:  # noqa: ANN401  # of host or device
    labels = jnp.asarray(batch["labels"]).at[:, rows].set(IGNORE)
    return {**batch, "labels": labels}


def _lose_rows_of_one_rank(batch: HostBatch, config: JobConfig) -> HostBatch:
    rows = batch["labels"].shape[1] // data_parallel(declared_sizes(config))
    return {**batch, "labels": np.asarray(_without_labels(batch, slice(-rows, None))["labels"])}


def _repeat_first_microbatch(batch: HostBatch, config: JobConfig) -> HostBatch:
    return {name: np.concatenate([x[:1], x[:1], x[2:]]) for name, x in batch.items()}


def _drop_borders(batch: HostBatch, config: JobConfig) -> HostBatch:
    """Let the last row attend over the borders of its documents."""
    segments = batch["segment_ids"].copy()
    segments[:, -1] = 0
    return {**batch, "segment_ids": segments}


def _attend_within_parts(batch: HostBatch, config: JobConfig) -> HostBatch:
    """Let no token attend to the part of a sequence that another device holds."""
    shape, parts = batch["labels"].shape, config.distributed.cp
    part = np.broadcast_to(np.arange(shape[2]) * parts // shape[2], shape)
    segments = batch.get("segment_ids", np.zeros_like(part))
    return {**batch, "segment_ids": (segments * parts + part).astype(np.int32)}


def _changing(change: Callable[[Params, Loss], tuple[Params, Loss]]) -> Callable[..., Gradients]:
    """Return a wrapper of `Gradients` that changes their result."""

    def wrap(gradients: Gradients, config: JobConfig) -> Gradients:
        def changed(
            params: Params, state: Params, batch: Batch, scale: Array | None = None
        ) -> tuple[Params, Loss]:
            return change(*gradients(params, state, batch, scale))

        return changed

    return wrap


def _sum_twice(gradients: Gradients, config: JobConfig) -> Gradients:
    """Multiply the gradient of one parameter by the number of devices of an axis."""
    size = next(size for size in declared_sizes(config).values() if size > 1)

    def change(grads: Params, loss: Loss) -> tuple[Params, Loss]:
        leaves = flatten_dict(grads)
        first = min(leaves, key=lambda path: (leaves[path].ndim, path))
        return unflatten_dict({**leaves, first: leaves[first] * size}), loss

    return _changing(change)(gradients, config)


def _lose_half_of_columns(grads: Params, loss: Loss) -> tuple[Params, Loss]:
    leaves = flatten_dict(grads)
    path = max(leaves, key=lambda path: (leaves[path].ndim, is_stack(path[0]), path))
    leaf = leaves[path]
    is_first_half = jnp.arange(leaf.shape[-1]) < leaf.shape[-1] // 2
    return unflatten_dict({**leaves, path: leaf * is_first_half}), loss


def _lose_last_expert(grads: Params, loss: Loss) -> tuple[Params, Loss]:
    """Set the gradients [layers, experts, ...] of the last expert to zero."""
    leaves = flatten_dict(grads)
    lost = {path: x.at[:, -1].set(0) for path, x in leaves.items() if EXPERTS in path}
    return unflatten_dict({**leaves, **lost}), loss


def _exchange_counts(grads: Params, loss: Loss) -> tuple[Params, Loss]:
    """Give each expert the count of tokens of its neighbour."""
    layers = loss.layers
    rolled = jax.tree.map(lambda x: jnp.roll(x, 1, axis=-1), layers.statistics)
    return grads, loss._replace(layers=layers._replace(statistics=rolled))


def _normalize_per_rank(gradients: Gradients, config: JobConfig) -> Gradients:
    """Average the gradients of two halves of the rows, each divided by its own tokens."""

    def changed(
        params: Params, state: Params, batch: Batch, scale: Array | None = None
    ) -> tuple[Params, Loss]:
        half = batch["labels"].shape[1] // 2
        (first, loss), (second, _) = (
            gradients(params, state, _without_labels(batch, rows), scale)
            for rows in (slice(half), slice(half, None))
        )
        return jax.tree.map(lambda a, b: (a + b) / 2, first, second), loss

    return changed


def _roll_layers(state: TrainState) -> TrainState:
    """Move each layer of one parameter to the place of the next."""
    leaves = flatten_dict(state.params)
    stacked = [path for path, leaf in leaves.items() if is_stack(path[0]) and leaf.ndim > 1]
    path = max(stacked, key=lambda path: (leaves[path].shape[0], path))
    leaf = leaves[path]
    rolled = jax.device_put(jnp.roll(leaf, 1, axis=0), leaf.sharding)
    return dataclasses.replace(state, params=unflatten_dict({**leaves, path: rolled}))


def _forget_moments(state: TrainState) -> TrainState:
    def zeros(leaf: Array) -> Array:
        keep = leaf.ndim == 0  # the number of updates
        return leaf if keep else jax.device_put(jnp.zeros_like(leaf), leaf.sharding)

    return dataclasses.replace(state, opt_state=jax.tree.map(zeros, state.opt_state))


def _is_packed(config: JobConfig) -> bool:
    return config.data.pack_sequences or config.train.objective == "dpo"


FAULTS = (
    Fault("a gradient is summed once too often over an axis", _always, gradients=_sum_twice),
    Fault(
        "gradients are clipped by the norm of a device's part of them", _always,
        optimizer=lambda config: {
            "train.grad_clip_norm": config.train.grad_clip_norm * device_count(config) ** 0.5
        },
    ),
    Fault(
        "the gradients of one rank's sequences are lost",
        lambda config: any(_has(axis)(config) for axis in BATCH_AXES),
        batch=_lose_rows_of_one_rank,
    ),
    Fault(
        "the loss is divided by the tokens of a rank, not of the batch",
        lambda config: config.train.objective == "next_token"
        and any(_has(axis)(config) for axis in BATCH_AXES),
        gradients=_normalize_per_rank,
    ),
    Fault(
        "a microbatch is used twice, and the next one never",
        lambda config: config.train.grad_accum_steps > 1, batch=_repeat_first_microbatch,
    ),
    Fault("attention crosses the border of documents", _is_packed, batch=_drop_borders),
    Fault(
        "tokens do not attend to another device's part of the sequence", _has("cp"),
        batch=_attend_within_parts,
    ),
    Fault(
        "the sum over tp lacks a device for one parameter", _has("tp"),
        gradients=_changing(_lose_half_of_columns),
    ),
    Fault(
        "the gradients of an expert are lost", _has("ep"), gradients=_changing(_lose_last_expert)
    ),
    Fault(
        "the load of experts is counted for their neighbours",
        lambda config: config.model.is_moe and config.model.bias_update == "sign",
        gradients=_changing(_exchange_counts),
    ),
    Fault(
        "weights do not decay", lambda config: config.optimizer.weight_decay > 0,
        optimizer=lambda config: {"optimizer.weight_decay": 0.0},
    ),
    Fault("a checkpoint restores a parameter with its layers moved by one",
          lambda config: not config.lora.rank, restored=_roll_layers),
    Fault("a checkpoint restores moments of zero", _always, restored=_forget_moments),
)  # fmt: skip
"""The faults, each of which a config with its features must show."""
