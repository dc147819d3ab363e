"""Conversion of non-trainable state: it goes with the parameters and has no moments."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxforge.errors import UserError
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState, Tensors
from torch_compat.formats.lazy import LazyTensor
from torch_compat.names.table import NameMap
from torch_compat.names.translation import Translation, summarize_names, translate

_DTYPE = np.dtype(np.float32)  # as `model.linear.Declare.untrained` has it


def translate_model(
    theirs: Mapping[str, LazyTensor], target: AbstractTarget, by: Translation, *, goes_on: bool
) -> tuple[Tensors, Tensors, list[str]]:
    """Parameters and untrained state by our names, and what the user should know.

    Both are keys of one state dict: whether PyTorch has a buffer or a frozen parameter, its name
    does not tell.

    Args:
        theirs: key -> tensor, prefixes taken off.
        target: what the config declares.
        by: what to go by.
        goes_on: whether the run continues at its step, with its optimizer.

    Raises:
        UserError: tensors are missing, left over, or of another shape; or there is no untrained
            state, and the run would go on without its own.
    """
    theirs, more = _needed(theirs, target, by)
    names = {name for name in target.model_state if by.dialect.find_key(name) in theirs}
    wanted = {**target.params, **(target.model_state if names else {})}
    translated = translate(theirs, wanted, by)
    notes = more + ([] if names else missing(target, by.where, goes_on=goes_on))
    state = {name: translated.pop(name) for name in (target.model_state if names else ())}
    if wide := [name for name, tensor in state.items() if tensor.dtype == np.float64]:
        notes.append(
            f"{summarize_names(wide)}: float64, and what no gradient moves is float32 here"
        )
    return translated, {name: tensor.cast(_DTYPE) for name, tensor in state.items()}, notes


def _needed(
    theirs: Mapping[str, LazyTensor], target: AbstractTarget, by: Translation
) -> tuple[Mapping[str, LazyTensor], list[str]]:
    """Return the parameters without state that this model lacks, and notes about it."""
    declared = {by.dialect.find_key(name) for name in target.model_state}
    spare = {
        key: why
        for key in theirs
        if key not in declared and (why := by.dialect.group_of_optional(key)) is not None
    }
    if not spare:
        return theirs, []
    needed = {key: tensor for key, tensor in theirs.items() if key not in spare}
    return needed, [f"left out: {summarize_names(spare)}; {next(iter(spare.values()))}"]


def of_trained(
    states: Mapping[str, Mapping[str, Any]], target: AbstractTarget, dialect: NameMap
) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Optimizer state of what a gradient moves here, and what to say of any other.

    Args:
        states: parameter of theirs -> field -> value.
        target: what the config declares.
        dialect: whose names they have.
    """
    untrained = {dialect.find_key(name) for name in target.model_state}
    spare = [key for key in states if key in untrained]
    if not spare:
        return dict(states), []
    names = {key: state for key, state in states.items() if key not in untrained}
    return names, [f"left out: the moments of {summarize_names(spare)}: no gradient moves it here"]


def check_present(checkpoint: CheckpointState, target: AbstractTarget, where: str) -> list[str]:
    """Check that a run of jaxforge has all non-trainable state or none; return notes.

    Args:
        checkpoint: what the run has stored.
        target: what the config declares.
        where: the checkpoint, for messages.

    Raises:
        UserError: it has none, and an optimizer.
    """
    if checkpoint.model_state:
        return []
    return missing(target, where, goes_on=checkpoint.moments is not None)


def missing(target: AbstractTarget, where: str, *, goes_on: bool) -> list[str]:
    """Return notes about absent non-trainable state; empty if the model declares none.

    Weights alone begin a run, and a run begins with initial values. A run that goes on would go on
    as another one: its biases of a router, say, would be zero under weights that learned with them.

    Raises:
        UserError: the run continues.
    """
    if not target.model_state:
        return []
    what = f"what no gradient moves is not in it ({summarize_names(target.model_state)})"
    if goes_on:
        raise UserError(
            f"{where}: {what}, and the run cannot continue without; --weights-only starts one at "
            "step 0, with its initial values"
        )
    return [f"{what}: a run that starts from it has the initial values"]
