"""Conversion of non-trainable state, which belongs to the model and has no moments."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxforge.errors import UserError
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState, Tensors
from torch_compat.formats.lazy import LazyTensor
from torch_compat.names.table import NameMap
from torch_compat.names.translation import Translation, summarize_names, translate

_DTYPE = np.dtype(np.float32)  # dtype of `model.linear.Declare.untrained`


def translate_model(
    theirs: Mapping[str, LazyTensor], target: AbstractTarget, by: Translation, *, goes_on: bool
) -> tuple[Tensors, Tensors, list[str]]:
    """Translate parameters and non-trainable state to our names; also return notes for the user.

    Both are keys of one state dict: a name does not tell whether PyTorch has a parameter or a
    buffer.

    Args:
        theirs: key without prefixes -> tensor.
        target: state that the config declares.
        by: the translation.
        goes_on: whether the run resumes at its step, with its optimizer.

    Raises:
        UserError: tensors are missing, left over, or of another shape; or a run that resumes has no
            non-trainable state.
    """
    theirs, more = _needed(theirs, target, by)
    # All or nothing: with one name present, `translate` reports the others as missing.
    names = {name for name in target.model_state if by.dialect.find_key(name) in theirs}
    declared = {**target.params, **(target.model_state if names else {})}
    translated = translate(theirs, declared, by)
    notes = more + ([] if names else missing(target, by.where, goes_on=goes_on))
    state = {name: translated.pop(name) for name in target.model_state if name in translated}
    if wide := [name for name, tensor in state.items() if tensor.dtype == np.float64]:
        notes.append(f"{summarize_names(wide)}: float64, but non-trainable state is float32 here")
    return translated, {name: tensor.cast(_DTYPE) for name, tensor in state.items()}, notes


def _needed(
    theirs: Mapping[str, LazyTensor], target: AbstractTarget, by: Translation
) -> tuple[Mapping[str, LazyTensor], list[str]]:
    """Return the tensors without state that this model lacks, and notes about it."""
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


def drop_untrained_moments(
    states: Mapping[str, Mapping[str, Any]], target: AbstractTarget, dialect: NameMap
) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Drop optimizer state of parameters that are not trained here; also return notes.

    Args:
        states: their parameter name -> field -> value.
        target: state that the config declares.
        dialect: dialect of the names.
    """
    untrained = {dialect.find_key(name) for name in target.model_state}
    spare = [key for key in states if key in untrained]
    if not spare:
        return dict(states), []
    needed = {key: state for key, state in states.items() if key not in untrained}
    return needed, [f"left out: the moments of {summarize_names(spare)}, which is not trained here"]


def check_present(checkpoint: CheckpointState, target: AbstractTarget, where: str) -> list[str]:
    """Check that a checkpoint of jaxforge has the non-trainable state it needs; return notes.

    Args:
        checkpoint: the checkpoint.
        target: state that the config declares.
        where: path of the checkpoint, for messages.

    Raises:
        UserError: the checkpoint has an optimizer but no non-trainable state.
    """
    if checkpoint.model_state:
        return []
    return missing(target, where, goes_on=checkpoint.moments is not None)


def missing(target: AbstractTarget, where: str, *, goes_on: bool) -> list[str]:
    """Return notes about absent non-trainable state; empty if the model declares none.

    A new run may start with weights and initial values of this state. A run that resumes may not:
    router biases, for example, would be zero although the weights were trained with others.

    Raises:
        UserError: the run resumes (`goes_on`).
    """
    if not target.model_state:
        return []
    what = f"non-trainable state is missing ({summarize_names(target.model_state)})"
    if goes_on:
        raise UserError(
            f"{where}: {what}, and the run cannot resume without it; --weights-only starts a run "
            "at step 0, with initial values"
        )
    return [f"{what}: a run that starts from it has the initial values"]
