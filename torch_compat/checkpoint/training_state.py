"""Abstract training state of a config, built with JAX."""

from collections.abc import Iterator
from typing import Any

from flax.traverse_util import flatten_dict

from jaxforge.checkpoint import layout
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.program import Program
from torch_compat.checkpoint.shapes import Shape
from torch_compat.checkpoint.stacking import Stacking


def program_of(config: JobConfig) -> Program:
    """Return the program of a config, for the shapes and dtypes of its state.

    Rounding compensations are omitted: no other framework has them, and runs begin with zeros. So
    are groups that train apart: other frameworks have one state.
    """
    values = {"train.param_rounding": "nearest", "train.outer_interval": 0}
    return Program.without_devices(config.with_values(values))


def model_shapes(config: JobConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return our name -> shape of parameters and of non-trainable state."""
    model = Program.without_devices(config).model
    abstract = (model.abstract, model.state.abstract)
    params, model_state = (dict(shapes(tree, config.model)) for tree in abstract)
    return params, model_state


def fields(config: JobConfig) -> tuple[dict[str, dict[str, Shape]], tuple[str, ...]]:
    """Return the moments, as field -> our name -> shape, and the names of the scalar fields.

    Fields that only jaxforge has are omitted: scales of 8-bit moments, and rounding compensations.
    """
    tree = layout.drop_precision_specific(layout.to_tree(program_of(config).shapes)["optimizer"])
    tree = {name: part for name, part in tree.items() if not name.endswith("_scales")}
    moments = {
        name: dict(shapes(part, config.model))
        for name, part in tree.items()
        if isinstance(part, dict)
    }
    return moments, tuple(name for name in tree if name not in moments)


def shapes(tree: dict[str, Any], model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of each entry; layers and experts have entries of their own."""
    stacking = Stacking(model)
    for name, leaf in flatten_dict(tree, sep=".").items():
        for entry, index in stacking.entries(name, tuple(leaf.shape)):
            yield entry, tuple(leaf.shape[len(index) :])
