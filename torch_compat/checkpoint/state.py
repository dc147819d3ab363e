"""Contents of a run's checkpoint in any format: readers produce it, writers consume it.

Parameters, moments and what no gradient moves go by jaxforge's names, one entry per layer and
expert (`stacking`), so that a layer is the most that is ever looked at:
`layers.3.attention.q_proj.weight`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.config.model import MODELS
from jaxforge.config.optimizer import EXPERT_FIELD
from jaxforge.state.progress import Progress
from torch_compat.checkpoint.optimizer_state import KINDS, Kind
from torch_compat.checkpoint.shapes import Shape, parameters, untrained
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.formats.lazy import LazyTensor

Tensors = Mapping[str, LazyTensor]
"""Our names -> tensors."""


@dataclasses.dataclass(frozen=True)
class CheckpointState:
    """A checkpoint that has been opened.

    Attributes:
        params: the parameters.
        moments: field of the optimizer's state ("mu", "nu", ...) -> a tensor per parameter; None
            where the checkpoint has no optimizer.
        scalars: the optimizer's other fields ("updates", ...).
        progress: where the run stands; None where the checkpoint does not say.
        guard: counts of bad steps, and normal losses.
        settings: what the checkpoint says of its optimizer and schedule ("lr", "betas", ...).
        dialect: whose names it had.
        notes: what the user should know.
        model_state: what no gradient moves; empty where the checkpoint has none.
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

    @property
    def counts_experts(self) -> bool:
        """Return whether the optimizer has counted the updates of each expert."""
        return EXPERT_FIELD + "updates" in (self.moments or {})

    @property
    def variables(self) -> Tensors:
        """The model's part: parameters, and what no gradient moves among them."""
        return {**self.params, **self.model_state}

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Every tensor, by section and name: `params.norm.weight`, `optimizer.mu.norm.weight`."""
        yield from self.model_tensors()
        for field, of_field in (self.moments or {}).items():
            yield from ((f"optimizer.{field}.{name}", t) for name, t in of_field.items())

    def model_tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the model's tensors: `params.norm.weight`, `model_state.layers.0.router.bias`."""
        yield from ((f"params.{name}", tensor) for name, tensor in self.params.items())
        yield from ((f"model_state.{name}", tensor) for name, tensor in self.model_state.items())


@dataclasses.dataclass(frozen=True)
class AbstractTarget:
    """The state that a config declares.

    Attributes:
        config: the config.
        params: our name -> shape.
        model_state: the same of what no gradient moves.
    """

    config: JobConfig
    params: Mapping[str, Shape]
    model_state: Mapping[str, Shape] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def stacking(self) -> Stacking:
        """Return how layers and experts are stacked."""
        return Stacking(self.config.model)

    @property
    def moments(self) -> Mapping[str, Mapping[str, Shape]]:
        """Field of the optimizer's state -> our name -> shape."""
        kind = KINDS.get(self.config.optimizer.name)
        if kind is not None and kind.is_everywhere:
            return {**dict.fromkeys(kind.fields, self.params), **self._counts_of_experts(kind)}
        return self._fields[0]

    def _counts_of_experts(self, kind: Kind) -> Mapping[str, Mapping[str, Shape]]:
        if not self.config.skips_idle_experts:
            return {}
        experts = {name: Shape() for name in self.params if self.stacking.expert_of(name)}
        return {EXPERT_FIELD + field: experts for field in kind.scalars}

    def with_idle_experts_skipped(self) -> "AbstractTarget":
        """Return the state of a run that counts the updates of each expert."""
        return dataclasses.replace(self, config=self.config.with_idle_experts_skipped())

    @property
    def scalars(self) -> tuple[str, ...]:
        """The optimizer's other fields."""
        kind = KINDS.get(self.config.optimizer.name)
        return self._fields[1] if kind is None else kind.scalars

    @functools.cached_property
    def _fields(self) -> tuple[dict[str, dict[str, Shape]], tuple[str, ...]]:
        from torch_compat.checkpoint.training_state import (
            fields,  # here, as it imports JAX: two seconds
        )

        return fields(self.config)


def abstract_target(config: JobConfig) -> AbstractTarget:
    """Return what a checkpoint must contain to continue as `config` says; nothing is allocated.

    Raises:
        UserError: a pattern is in no name.
    """
    params, model_state = _shapes(config)
    target = AbstractTarget(config, params, model_state)
    config.optimizer.check_patterns({target.stacking.array_of(name) for name in params})
    return target


def _shapes(config: JobConfig) -> tuple[Mapping[str, Shape], Mapping[str, Shape]]:
    """Parameters, and what no gradient moves; of a registered model as it declares them."""
    if config.model.model_type in MODELS.ours:
        return parameters(config.model), untrained(config.model)
    from torch_compat.checkpoint.training_state import (
        model_shapes,  # here, as it imports JAX: two seconds
    )

    return model_shapes(config)
