"""Checks that a checkpoint matches a model config, and that it was written correctly."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from jaxforge.config.model import ModelConfig
from jaxforge.config.section import Constant, Invisible, Structure, facts
from jaxforge.errors import StorageError, UserError
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.formats.lazy import LazyTensor
from torch_compat.names.table import differences
from torch_compat.names.translation import shorten_problems


def check_fits(
    checkpoint: CheckpointState, target: AbstractTarget, trained: ModelConfig, where: str
) -> None:
    """Check that the state of a run matches a config that the user may have changed.

    Args:
        checkpoint: the state.
        target: state that the config declares.
        trained: model section of the run's own config.
        where: path of the checkpoint, for messages.

    Raises:
        UserError: the config is of another model or optimizer; the message lists the differences.
    """
    # Absent non-trainable state is the subject of `untrained.check_present`.
    expected = {**target.params, **(target.model_state if checkpoint.model_state else {})}
    problems = list(
        differences(expected, checkpoint.variables, checkpoint.variables.keys() - expected.keys())
    )
    problems += invisible_differences(trained, target.config.model, Structure)
    if checkpoint.moments is not None and checkpoint.moments.keys() != target.moments.keys():
        fields = [", ".join(sorted(moments)) for moments in (checkpoint.moments, target.moments)]
        name = target.config.optimizer.name
        problems.append(f'its optimizer has {fields[0]}; optimizer.name = "{name}" has {fields[1]}')
    if problems:
        listed = "\n  ".join(shorten_problems(problems))
        raise UserError(
            f"{where} does not match this config; the config that is stored in it does:\n  {listed}"
        )


def invisible_differences(
    trained: ModelConfig, model: ModelConfig, kind: type[Invisible] = Constant
) -> Iterator[str]:
    """Yield the differences of two models that do not affect the shapes of their weights.

    Args:
        trained: model in which the weights were trained.
        model: model that will use the weights.
        kind: kind of the compared keys; by default constants that a user may change.
    """
    values = invisible_values(trained)
    for key, now in invisible_values(model, kind).items():
        # A key that the model does not use has no effect, whatever its value.
        if values[key] != now and model.uses(key):
            yield f"model.{key} is {now} and the weights were trained with {values[key]}"


def invisible_values(model: ModelConfig, kind: type[Invisible] = Invisible) -> dict[str, Any]:
    """Return the values that apply of the keys that do not affect the shapes of the weights."""
    keys = facts(ModelConfig, kind)
    return {key: attrgetter(fact.resolved or key)(model) for key, fact in keys}


def check_written(
    opened: Mapping[str, LazyTensor], written: Mapping[str, LazyTensor], where: str
) -> None:
    """Check that a checkpoint has the names, shapes and dtypes that were written.

    Args:
        opened: tensors read from the checkpoint.
        written: tensors that were written.
        where: path of the checkpoint, for messages.

    Raises:
        StorageError: a tensor differs or is missing.
    """
    specs = [{n: (t.shape, t.dtype) for n, t in each.items()} for each in (opened, written)]
    if wrong := sorted(name for name, _ in specs[0].items() ^ specs[1].items()):
        raise StorageError(f"{where}: {wrong[0]} differs from what was written")
