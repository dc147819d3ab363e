"""The training state that a config declares, as JAX knows it: for what needs more than shapes."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxforge.checkpoint import layout
from jaxforge.config.job import JobConfig
from jaxforge.config.model import MODELS, ModelConfig
from jaxforge.model.transformer import Model
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.state.train_state import TrainState, state_shapes
from torch_compat.checkpoint.shapes import Shape
from torch_compat.checkpoint.stacking import Stacking


def declared(config: JobConfig) -> tuple[Model, TrainState]:
    """Return the model, and shapes and dtypes of all arrays; nothing is allocated.

    Compensations of rounding are left out: no other framework has them, and runs begin with zeros.
    """
    model, train = _model(config), config.train.model_copy(update={"param_rounding": "nearest"})
    optimizer = build_optimizer(config.model_copy(update={"train": train}), model.axes)
    return model, state_shapes(model, optimizer)


def model_shapes(config: JobConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Our name -> shape of parameters, and of what no gradient moves."""
    model = _model(config)
    abstract = (model.abstract, model.state.abstract)
    params, model_state = (dict(shapes(tree, config.model)) for tree in abstract)
    return params, model_state


def _model(config: JobConfig) -> Model:
    build = MODELS[config.model.model_type]
    return build(config.model, param_dtype=jnp.dtype(config.train.param_dtype))


def fields(config: JobConfig) -> tuple[dict[str, dict[str, Shape]], tuple[str, ...]]:
    """The optimizer's moments, as field -> our name -> shape, and the names of its other fields.

    Without what only jaxforge has: scales of moments in eight bits, and compensations.
    """
    tree = layout.of_any_precision(layout.to_tree(declared(config)[1])["optimizer"])
    tree = {name: part for name, part in tree.items() if not name.endswith("_scales")}
    moments = {
        name: dict(shapes(part, config.model))
        for name, part in tree.items()
        if isinstance(part, dict)
    }
    return moments, tuple(name for name in tree if name not in moments)


def shapes(tree: dict[str, Any], model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Name and shape of each array, an entry per layer and expert."""
    stacking = Stacking(model)
    for name, leaf in flatten_dict(tree, sep=".").items():
        for entry, place in stacking.entries(name, tuple(leaf.shape)):
            yield entry, tuple(leaf.shape[len(place) :])
