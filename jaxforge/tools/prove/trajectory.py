"""Updates of a small config on a mesh, and all that they compute, on the host in one order."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxforge.checkpoint.layout import stored_state
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.relayout import by_layer, by_stage
from jaxforge.config.job import JobConfig
from jaxforge.data.packing import IGNORE
from jaxforge.errors import UserError
from jaxforge.model.runtime import kernel_target
from jaxforge.model.transformer import Model, Params
from jaxforge.optim.trees import join
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import batch_shardings
from jaxforge.parallel.stages import Stack, is_stack
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.frozen_model import FrozenModel, frozen_config
from jaxforge.step.train_step import Controls
from jaxforge.tools.prove.faults import Fault, HostBatch
from jaxforge.tools.prove.smaller import device_count

_METRICS = ("losses", "side", "logits", "dataset_nll")
"""Groups of metrics that a step computes from its numbers."""

_DOCUMENTS = 4  # of a packed sequence: two pairs of answers

T = TypeVar("T")

Arrays = dict[str, np.ndarray]
"""Name of an array -> its values on the host; stacked parameters are [layers, ...], in order."""


@dataclasses.dataclass(frozen=True)
class Update:
    """Results of one update.

    Attributes:
        scalars: the loss, its terms, the norm of the gradient and further metrics.
        gradients: gradients before clipping.
        changes: change of each array of the state, by what it is.
    """

    scalars: Arrays
    gradients: Arrays
    changes: Mapping[str, Arrays]

    @property
    def quantities(self) -> dict[str, Arrays]:
        """All results, in the order in which an update computes them."""
        scalars = {name: {"": value} for name, value in self.scalars.items()}
        return {**scalars, "gradients": self.gradients, **self.changes}


class Trainer:
    """A small config on its mesh.

    Args:
        config: a small config.

    Attributes:
        program: its program.
    """

    def __init__(self, config: JobConfig) -> None:
        devices = jax.devices()[: device_count(config)]
        self.config = config
        self.program = Program(config, make_mesh(config, devices), collect=("grads",))
        self._fault: Fault | None = None

    def with_fault(self, fault: Fault) -> "Trainer":
        """Return a trainer that has a fault, with the same program if that does not change."""
        trainer = Trainer(self.config) if fault.changes_program else copy.copy(self)
        program, config = trainer.program, self.config
        if fault.gradients:
            program.gradients = fault.gradients(program.gradients, config)
        if fault.optimizer:
            other = config.with_values(fault.optimizer(config))
            program.optimizer = Program(other, program.mesh, model=program.model).optimizer
        trainer._fault = fault
        return trainer

    def start(self, variables: Params) -> TrainState:
        """Return the state on the host before the first update. One device only."""
        return jax.device_get(self.program.init_from(variables))

    def update(
        self, before: TrainState, batch: HostBatch, placed: TrainState | None = None
    ) -> tuple[TrainState, Update]:
        """Return the state after an update, and the results of the update.

        Args:
            before: a state on the host, with layers in order.
            batch: the batch.
            placed: that state on the devices; by default it is placed. It is donated.

        Raises:
            UserError: a plugin needs a field that batches do not have.
        """
        if self._fault and self._fault.batch:
            batch = self._fault.batch(batch, self.config)
        placed = self.put(before) if placed is None else placed
        fields = self._with_fields(batch)
        try:
            with self.program.context():
                state, metrics = self.program.step(placed, fields, Controls())
        except KeyError as error:
            if not self.config.plugins.modules:
                raise
            raise UserError(
                f"plugins.modules: the update needs {error} of its batches, which the random data "
                "of a proof do not have. Prove the config without the plugin that reads it"
            ) from error
        stack = self.program.model.stack
        gradients = named(metrics.pop("grads"), stack)
        old, new = by_kind(before), by_kind(state, stack)
        changes = {
            what: {name: array.astype(np.float64) - old[what][name] for name, array in part.items()}
            for what, part in new.items()
        }
        return state, Update(_scalars(metrics), gradients, changes)

    def put(self, state: TrainState) -> TrainState:
        """Return a state of the host on the devices."""
        return _on_devices(state, self.program.abstract_state(), self.program.model.stack)

    def save(self, state: TrainState, directory: Path) -> None:
        """Save a state as a run does."""
        model, resolved = self.program.model, self.config.model_dump(mode="json")
        section = self.config.checkpoint
        saves = Checkpoints(directory, section, model.axes, resolved, stack=model.stack)
        with contextlib.closing(saves):
            saves.save(Progress(step=int(state.step)), state)

    def restore(self, frozen: Params, directory: Path, step: int) -> TrainState:
        """Restore a state, perhaps of another mesh, as a run does.

        Args:
            frozen: parameters of the host, for those that are not in checkpoints.
            directory: directory of `save`.
            step: the step.
        """
        stack, like = self.program.model.stack, self.program.abstract_state()
        stored, section = stored_state(like), self.config.checkpoint
        with contextlib.closing(Checkpoints(directory, section)) as saves:
            restored, _ = saves.restore(by_layer(stored, stack), step)
        state = by_stage(restored, stack, stored)
        params = join(_on_devices(frozen, like.params, stack), state.params)
        state = dataclasses.replace(state, params=params)
        return self._fault.restored(state) if self._fault and self._fault.restored else state

    def _with_fields(self, batch: HostBatch) -> dict[str, jax.Array]:
        mesh = self.program.mesh
        placed = jax.device_put(batch, batch_shardings(mesh, batch))
        if self.config.train.objective == "next_token":
            return placed
        with self.program.context():
            return self._frozen_fields(placed)

    @functools.cached_property
    def _frozen_fields(self) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
        """Return the function that adds the fields of a reference or teacher of other weights."""
        mesh = self.program.mesh
        frozen = FrozenModel(frozen_config(self.config), self.config, mesh, kernel_target(mesh))
        weights = Model(self.config.model).init(jax.random.key(self.config.train.seed + 1))
        params = _on_devices(jax.device_get(weights), frozen.like, frozen.model.stack)
        add = jax.jit(frozen.add_fields)
        return lambda batch: add(params, batch)


def random_variables(config: JobConfig) -> Params:
    """Return parameters and non-trainable state on the host, in order.

    Each array is random: with zeros or ones, as biases, norms and adapters begin, some gradients
    would be zero, and arrays could be exchanged without a difference.
    """
    program = Program.without_devices(config)
    rng = np.random.default_rng(config.train.seed)
    model = program.model
    params = jax.device_get(jax.jit(model.init)(jax.random.key(config.train.seed)))

    def moved(leaf: np.ndarray) -> np.ndarray:
        scale = 0.1 * (float(np.std(leaf)) or 1.0)
        return (leaf + scale * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    state = jax.eval_shape(lambda params: program.state_before_steps(params), params).model_state
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    return {"params": jax.tree.map(moved, params), "model_state": zeros}


def rounded(state: TrainState, seed: int) -> TrainState:
    """Return a state whose parameters differ by at most one unit in the last place."""
    rng = np.random.default_rng(seed)
    unit = np.finfo(np.float32).eps

    def changed(leaf: np.ndarray) -> np.ndarray:
        return (leaf * (1 + unit * rng.choice([-1, 0, 1], leaf.shape))).astype(leaf.dtype)

    return dataclasses.replace(state, params=jax.tree.map(changed, state.params))


def by_kind(state: TrainState, stack: Stack | None = None) -> dict[str, Arrays]:
    """Return the arrays of a state by what they are.

    Args:
        state: the state.
        stack: order of its layers; None: in order.
    """
    parts = {
        "parameters": state.params,
        "optimizer state": state.opt_state,
        "non-trainable state": state.model_state,
        "average": state.ema,
    }
    arrays = {what: named(part, stack) for what, part in parts.items()}
    # SOAP's eigenvectors are determined up to their sign.
    optimizer = arrays["optimizer state"]
    optimizer |= {name: np.abs(optimizer[name]) for name in optimizer if "_basis." in name}
    return arrays


def random_batches(config: JobConfig, n: int) -> list[HostBatch]:
    """Return batches of random tokens with the fields of the config's data.

    A seventh of the labels is ignored. Documents, pairs of answers and sources are random.
    """
    train = config.train
    shape = train.grad_accum_steps, train.microbatch_size(1), train.seq_len
    return [_random_batch(config, shape, seed) for seed in range(n)]


def _random_batch(config: JobConfig, shape: tuple[int, int, int], seed: int) -> HostBatch:
    rng = np.random.default_rng([config.train.seed, seed])
    tokens = rng.integers(0, config.model.vocab_size, (*shape[:2], shape[2] + 1))
    labels = np.where(rng.random(shape) < 1 / 7, IGNORE, tokens[..., 1:])
    batch: dict[str, np.ndarray] = {"input_ids": tokens[..., :-1]}
    has_pairs = config.train.objective == "dpo"
    if config.data.pack_sequences or has_pairs:
        segments = np.sort(rng.integers(0, _DOCUMENTS + has_pairs, shape), axis=-1)
        batch["segment_ids"] = segments
        labels = np.where(np.roll(segments, -1, axis=-1) != segments, IGNORE, labels)
        if has_pairs:  # the last segment is padding
            batch["is_padding"] = segments == _DOCUMENTS
            labels = np.where(segments == _DOCUMENTS, IGNORE, labels)
    if n := len(config.data.datasets):
        batch["dataset_idx"] = rng.integers(0, n, shape[:2])
    return {name: leaf.astype(np.int32) for name, leaf in {**batch, "labels": labels}.items()}


def named(tree: Any, stack: Stack | None) -> Arrays:  # noqa: ANN401  # any pytree
    """Return the arrays of a tree on the host, with the layers of stacked ones in order."""
    result = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = np.asarray(jax.device_get(leaf))
        groups = [key.key for key in path if is_stack(str(getattr(key, "key", "")))]
        if stack and groups:
            value = np.asarray(stack.of(groups[0]).unstack(cast("Any", value)))
        result[jax.tree_util.keystr(path, simple=True, separator=".")] = value
    return result


def _scalars(metrics: Mapping[str, Any]) -> Arrays:
    """Return the metrics of a step that depend on its numbers, by name."""
    first = {"loss": metrics["loss"], "gradient norm": metrics["grad_norm"]}
    further = named({name: metrics[name] for name in _METRICS if name in metrics}, None)
    # Means of layers without experts are 0/0.
    of_layers = {
        name.rpartition(".")[2]: np.nan_to_num(jax.device_get(value), nan=0.0)
        for name, value in further.items()
    }
    return {name: np.asarray(jax.device_get(value)) for name, value in first.items()} | of_layers


def _on_devices(tree: T, like: T, stack: Stack) -> T:
    """Return arrays of the host, with layers in order, on the devices as stages have them."""
    ordered = by_layer(like, stack)
    placed = jax.tree.map(
        lambda value, leaf: jax.device_put(np.asarray(value, leaf.dtype), leaf.sharding),
        tree, ordered,
    )  # fmt: skip
    return by_stage(placed, stack, like)
