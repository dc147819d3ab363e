"""The model, the optimizer and one update of a config on a mesh."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jaxforge.config import rules
from jaxforge.config.job import JobConfig
from jaxforge.config.model import MODELS
from jaxforge.model.runtime import kernel_target
from jaxforge.model.transformer import Model, Params, build_model, matmul_precision
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.optim.outer import build_outer_optimizer
from jaxforge.parallel.groups import OnMesh, group_view, read_groups
from jaxforge.parallel.mesh import STAGES, data_parallel_size, make_mesh
from jaxforge.parallel.sharding import batch_shardings
from jaxforge.state.train_state import TrainState
from jaxforge.step.collect import check_collect
from jaxforge.step.diloco import make_diloco_step
from jaxforge.step.execution import with_execution
from jaxforge.step.gradients import Gradients, make_gradients
from jaxforge.step.initial_state import (
    shapes_of_state,
    shardings_of_state,
    state_before_steps,
    with_shardings,
)
from jaxforge.step.objectives import with_frozen_fields
from jaxforge.step.padded_batch import MAX_PROGRAMS, N_MICROBATCHES, pad_batch
from jaxforge.step.train_step import Controls, make_train_step
from jaxforge.step.update_loss import Batch

AbstractBatch = dict[str, jax.ShapeDtypeStruct]


class Program:
    """The model, the optimizer and one update of a config on a mesh.

    Each part is built when it is first used. An `AbstractMesh` requires `model`; then shapes and
    shardings are available, and `step` can be traced.

    Attributes:
        collect: metrics that the step computes, from `step.collect.COLLECTED`.

    Args:
        config: a config that `rules.check` has passed for the mesh.
        mesh: the devices; by default all devices, for which the config is then checked.
        model: by default the model of `[model]`, with the kernels of the mesh's devices. A given
            model recomputes what its `runtime.save` says.
        collect: metrics in addition to `metrics.collect`.

    Raises:
        UserError: a name in `collect` is unknown. The parts raise it when they are built: the
            config does not fit the devices, a kernel does not support the model or the device, a
            decay pattern matches no parameter, the mesh splits a parameter into unequal parts, or
            the memory of the devices is unknown.
    """

    def __init__(
        self,
        config: JobConfig,
        mesh: Mesh | AbstractMesh | None = None,
        *,
        model: Model | None = None,
        collect: Iterable[str] = (),
    ) -> None:
        self._unresolved = config  # for parts that no execution changes
        self.collect = check_collect((*config.metrics.collect, *collect))
        if mesh is not None:
            self.mesh = cast(Mesh, mesh)
        if model is not None:
            self.model = model

    @classmethod
    def without_devices(cls, config: JobConfig) -> "Program":
        """Return a program that has model, optimizer and shapes, but no mesh."""
        build = MODELS[config.model.model_type]
        options: dict[str, Any] = {"adapters": config.lora} if config.lora.rank else {}
        param_dtype = jnp.dtype(config.train.param_dtype)
        model = build(config.model, param_dtype=param_dtype, **options)
        program = cls(config, model=model)
        program.config = config
        return program

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices and their axes."""
        # A program in a user's own loop has not passed `resolve_run`.
        rules.check(self._unresolved, jax.device_count())
        return make_mesh(self._unresolved)

    @functools.cached_property
    def config(self) -> JobConfig:
        """The config with the fastest execution that fits in place of "auto".

        The config of a run has no "auto" (`training.resolution`), and is returned as it is.
        Otherwise collective: all processes must access it.
        """
        # Of `vars`, or a model would be built for the estimate only.
        return with_execution(self._unresolved, self.mesh, model=vars(self).get("model"))[0]

    @functools.cached_property
    def model(self) -> Model:
        """The model, with the kernels of the mesh's devices."""
        return build_model(self.config, *kernel_target(self.mesh))

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer of `[optimizer]` and `[scheduler]`."""
        # The optimizer must not depend on the execution: its state is in checkpoints.
        return build_optimizer(self._unresolved, self.model.axes)

    @functools.cached_property
    def shapes(self) -> TrainState:
        """The shape and dtype of every array of the state, as `ShapeDtypeStruct`."""
        return shapes_of_state(self._unresolved, self.model, self.optimizer)

    @functools.cached_property
    def shardings(self) -> TrainState:
        """The `NamedSharding` of every array of the state."""
        return shardings_of_state(self._unresolved, self.model, self.optimizer, self.mesh)

    def abstract_state(self) -> TrainState:
        """Return the shape, dtype and sharding of every array of the state."""
        return with_shardings(self.shapes, self.shardings)

    def abstract_batch(self) -> AbstractBatch:
        """Return shapes and shardings of a batch: [microbatches, sequences, tokens]."""
        train, data = self.config.train, self.config.data
        rows = train.microbatch_size(data_parallel_size(self.mesh))
        shape: tuple[int, ...] = (train.grad_accum_steps, rows, train.seq_len)
        # [microbatches, sequences of all ranks, tokens]
        shapes = {"input_ids": shape, "labels": shape}
        has_pairs = train.objective == "dpo"
        shapes |= {"segment_ids": shape} if data.pack_sequences or has_pairs else {}
        shapes |= {"is_padding": shape} if has_pairs else {}
        shapes |= {"dataset_idx": shape[:2]} if data.datasets else {}
        batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
        split = batch_shardings(self.mesh, batch)
        return {name: leaf.update(sharding=split[name]) for name, leaf in batch.items()}

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Set the mesh and the precision of products. Calls of `step` must be inside."""
        with jax.set_mesh(self.mesh), matmul_precision(self.config):
            yield

    def state_before_steps(self, params: Params, model_state: Params | None = None) -> TrainState:
        """Return the state before the first step for given parameters; may be traced.

        Args:
            params: the parameters.
            model_state: non-trainable state; by default the initial one.
        """
        return state_before_steps(self._unresolved, self.model, self.optimizer, params, model_state)

    def init(self, seed: int | None = None) -> TrainState:
        """Return a new state, each array on its devices. The values do not depend on the mesh.

        Args:
            seed: seed of the parameters; by default `train.seed`.
        """
        make: Any = jax.jit(
            lambda key: self.state_before_steps(self.model.init(key)),
            out_shardings=self.shardings,
        )
        with self.context():
            return make(jax.random.key(self.config.train.seed if seed is None else seed))

    def init_from(self, variables: Params) -> TrainState:
        """Return the state before the first step for given parameters.

        Args:
            variables: `params`, and optionally `model_state`; arrays with the shardings of the
                state. They are donated.
        """
        make: Any = jax.jit(
            lambda x: self.state_before_steps(x["params"], x.get("model_state")),
            donate_argnums=0,
            out_shardings=self.shardings,
        )
        return make(variables)

    @functools.cached_property
    def gradients(self) -> Gradients:
        """The function that computes gradients and loss, as `step.gradients.Gradients`.

        It is that of one group, if groups train apart.
        """
        config, mesh = group_view(self.config, self.mesh)
        return make_gradients(self.model, config, mesh)

    @functools.cached_property
    def step(self) -> jax.stages.Wrapped:
        """The jitted update `(state, batch, controls) -> (state, metrics)`; donates the state."""
        config, mesh = group_view(self.config, self.mesh)
        step = make_train_step(config, self.model, self.optimizer, self.gradients, self.collect)
        if self.config.train.trains_apart:
            outer = build_outer_optimizer(self.config, self.model.axes)
            step = make_diloco_step(self.config, self.model, outer, step, self.shardings, mesh)
        # The new state reuses the buffers of the old one, so memory holds one state.
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, None))
        return OnMesh(jitted, mesh) if self.config.train.trains_apart else jitted

    def read_metrics(self, metrics: PyTree) -> PyTree:
        """Return metrics of the step on the host; those of groups that train apart are merged.

        Waits for the step. With groups, all processes must call it for the same metrics.
        """
        return (read_groups if self.config.train.trains_apart else jax.device_get)(metrics)

    def lower(self, batch: Batch | AbstractBatch | None = None) -> jax.stages.Lowered:
        """Return the update as a run compiles it, without creating arrays.

        Args:
            batch: arrays or their shapes and shardings; by default `abstract_batch()`. Fields of a
                frozen model (`train.objective`) are added.
        """
        batch = self.abstract_batch() if batch is None else batch
        controls = Controls(next_lr_scale=1.0)  # as `TrainingData.controls` passes them
        # The reference or teacher adds its fields in a program of its own, before the step.
        batch = with_frozen_fields(self.config, self.mesh, batch)
        with self.context():
            return self.step.lower(self.abstract_state(), batch, controls)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of microbatches of the run's batches, in increasing order."""
        return tuple(sorted({stage.accum for stage in self._unresolved.train.stages()}))

    @functools.cached_property
    def pads_batches(self) -> bool:
        """True if one program runs all sizes of a batch ramp (`step.padded_batch`).

        The schedule of a pipeline is made for a number of microbatches, so that there each size has
        its own program. Set it to False for a step of your own.
        """
        return len(self.sizes) > MAX_PROGRAMS and self.mesh.shape[STAGES] == 1

    def padded(self, batch: Batch) -> Batch:
        """Return the batch as `step` takes it in this run."""
        if not self.pads_batches:
            return batch
        return pad_batch(batch, largest=self.sizes[-1], mesh=self.mesh)

    def lower_sizes(
        self, batch: Batch | AbstractBatch | None = None
    ) -> dict[int, jax.stages.Lowered]:
        """Return the programs of the run's updates, by their number of microbatches.

        A program for padded batches is that of the largest number.

        Args:
            batch: as in `lower`, with any number of microbatches.
        """
        batch = self.abstract_batch() if batch is None else batch
        if not self.pads_batches:
            return {n: self.lower(_resized(batch, n)) for n in self.sizes}
        # One program for all sizes: the traced number tells how many microbatches are real.
        largest = self.sizes[-1]
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, P()))
        return {largest: self.lower(_resized(batch, largest) | {N_MICROBATCHES: count})}

    def lower_paddings(
        self, batch: Batch | AbstractBatch | None = None
    ) -> dict[int, jax.stages.Lowered]:
        """Return the programs of `padded` by the number of microbatches; none without padding.

        Args:
            batch: as in `lower_sizes`.
        """
        if not self.pads_batches:
            return {}
        lower = functools.partial(pad_batch.lower, largest=self.sizes[-1], mesh=self.mesh)
        return {
            n: lower(with_frozen_fields(self.config, self.mesh, resized))
            for n, resized in self.abstract_batches(batch).items()
        }

    def abstract_batches(
        self, batch: Batch | AbstractBatch | None = None
    ) -> dict[int, AbstractBatch]:
        """Return shapes and shardings of the run's batches, by their number of microbatches.

        Args:
            batch: as in `lower_sizes`.
        """
        batch = self.abstract_batch() if batch is None else batch
        return {n: _resized(batch, n) for n in self.sizes}


def _resized(batch: Batch | AbstractBatch, n: int) -> AbstractBatch:
    """Return the shapes of a batch with `n` microbatches."""
    return {
        name: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype, sharding=x.sharding)
        for name, x in batch.items()
    }
