"""Contents of a run's checkpoint in any format: readers produce it, writers consume it.

Parameters, moments and non-trainable state have jaxforge's names, with one entry per layer and
expert (`stacking`), such as `layers.3.attention.q_proj.weight`. No operation needs more than the
entries of one layer at a time.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxforge.checkpoint.paths import EMA, no_average
from jaxforge.config.job import JobConfig
from jaxforge.config.model import MODELS
from jaxforge.config.optimizer import EXPERT_FIELD
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from torch_compat.checkpoint.optimizer_state import LAYOUTS, OptimizerLayout
from torch_compat.checkpoint.shapes import Shape, parameters, untrained
from torch_compat.checkpoint.stacking import Stacking, layer_of
from torch_compat.formats.lazy import LazyTensor

Tensors = Mapping[str, LazyTensor]
"""Our name -> tensor."""


@dataclasses.dataclass(frozen=True)
class CheckpointState:
    """Opened checkpoint.

    Attributes:
        params: parameters.
        moments: field of the optimizer state ("mu", "nu", ...) -> a tensor per parameter; None if
            the checkpoint has no optimizer.
        scalars: scalar fields of the optimizer state ("updates", ...).
        progress: progress of the run; None if the checkpoint does not record it.
        guard: counts of bad steps, and normal losses.
        settings: recorded settings of optimizer and schedule ("lr", "betas", ...).
        dialect: dialect of the names in the checkpoint.
        notes: notes for the user.
        model_state: non-trainable state; empty if the checkpoint has none.
        ema: average of the parameters (`train.ema_decay`); empty if the checkpoint has none.
    """

    params: Tensors
    moments: Mapping[str, Tensors] | None = None
    scalars: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    progress: Progress | None = None
    guard: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dialect: str = "jaxforge"
    notes: tuple[str, ...] = ()
    model_state: Tensors = dataclasses.field(default_factory=dict)
    ema: Tensors = dataclasses.field(default_factory=dict)

    @property
    def counts_experts(self) -> bool:
        """True if the optimizer has counted the updates of each expert."""
        return EXPERT_FIELD + "updates" in (self.moments or {})

    @property
    def variables(self) -> Tensors:
        """Parameters and non-trainable state of the model."""
        return {**self.params, **self.model_state}

    def without_layers_from(self, first: int) -> "CheckpointState":
        """Return the checkpoint without layers from an index on."""

        def retained(tensors: Tensors) -> Tensors:
            layers = {name: layer_of(name) for name in tensors}
            return {n: t for n, t in tensors.items() if (i := layers[n]) is None or i < first}

        return dataclasses.replace(
            self,
            params=retained(self.params),
            model_state=retained(self.model_state),
            ema=retained(self.ema),
            moments=self.moments and {field: retained(t) for field, t in self.moments.items()},
        )

    def averaged(self, where: str) -> "CheckpointState":
        """Return the checkpoint with the average of the parameters in their place.

        The moments are left out, because they belong to the parameters.

        Args:
            where: path of the checkpoint, for the message.

        Raises:
            UserError: the checkpoint has no average.
        """
        if not self.ema:
            raise UserError(no_average(where))
        params = {**self.params, **self.ema}  # frozen parameters have no average
        return dataclasses.replace(self, params=params, ema={}, moments=None, scalars={})

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yield all tensors: `params.norm.weight`, `optimizer.mu.norm.weight`."""
        yield from self.model_tensors()
        yield from ((f"{EMA}.{name}", tensor) for name, tensor in self.ema.items())
        for field, of_field in (self.moments or {}).items():
            yield from ((f"optimizer.{field}.{name}", t) for name, t in of_field.items())

    def model_tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the model's tensors: `params.norm.weight`, `model_state.layers.0.router.bias`."""
        yield from ((f"params.{name}", tensor) for name, tensor in self.params.items())
        yield from ((f"model_state.{name}", tensor) for name, tensor in self.model_state.items())


@dataclasses.dataclass(frozen=True)
class AbstractTarget:
    """State that a config declares.

    Attributes:
        config: the config.
        params: our name -> shape of parameters.
        model_state: our name -> shape of non-trainable state.
    """

    config: JobConfig
    params: Mapping[str, Shape]
    model_state: Mapping[str, Shape] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def stacking(self) -> Stacking:
        """Stacking of layers and experts."""
        return Stacking(self.config.model)

    @functools.cached_property
    def trained(self) -> Mapping[str, Shape]:
        """Our name -> shape of the parameters that are not frozen."""
        freezes, array_of = self.config.optimizer.freezes, self.stacking.array_of
        return {name: shape for name, shape in self.params.items() if not freezes(array_of(name))}

    @property
    def moments(self) -> Mapping[str, Mapping[str, Shape]]:
        """Field of the optimizer state -> our name -> shape."""
        kind = LAYOUTS.get(self.config.optimizer.name)
        # Without JAX, whose import takes longer than a small conversion.
        if kind is not None and kind.covers_all_params:
            return {**dict.fromkeys(kind.fields, self.trained), **self._expert_counts(kind)}
        return self._fields[0]

    def _expert_counts(self, kind: OptimizerLayout) -> Mapping[str, Mapping[str, Shape]]:
        if not self.config.skips_idle_experts:
            return {}
        experts = {name: Shape() for name in self.trained if self.stacking.expert_of(name)}
        return {EXPERT_FIELD + field: experts for field in kind.scalars}

    def with_idle_experts_skipped(self) -> "AbstractTarget":
        """Return the target of a run that counts the updates of each expert."""
        config = self.config.with_values({"optimizer.skip_idle_experts": True})
        return dataclasses.replace(self, config=config)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Scalar fields of the optimizer state."""
        kind = LAYOUTS.get(self.config.optimizer.name)
        return self._fields[1] if kind is None else kind.scalars

    @functools.cached_property
    def _fields(self) -> tuple[dict[str, dict[str, Shape]], tuple[str, ...]]:
        from torch_compat.checkpoint.training_state import fields  # imports JAX: two seconds

        return fields(self.config)


def abstract_target(config: JobConfig) -> AbstractTarget:
    """Return the state that a checkpoint must contain to continue with a config.

    Nothing is allocated.

    Raises:
        UserError: a pattern of the optimizer section matches no name.
    """
    params, model_state = _shapes(config)
    target = AbstractTarget(config, params, model_state)
    config.optimizer.check_patterns({target.stacking.array_of(name) for name in params})
    return target


def _shapes(config: JobConfig) -> tuple[Mapping[str, Shape], Mapping[str, Shape]]:
    """Return the shapes of parameters and of non-trainable state."""
    if config.model.model_type in MODELS.built_in:
        return parameters(config.model), untrained(config.model)
    from torch_compat.checkpoint.training_state import model_shapes  # imports JAX: two seconds

    return model_shapes(config)
