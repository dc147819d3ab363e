"""Optimizer state keyed by parameter number, as in `optimizer.state_dict()` of torch.

Numbers count the parameters of all groups in order. The parameters of a group are in the order of
the model's state dict, because both traverse the modules in the same order.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxforge.errors import UserError
from torch_compat.formats.dcp_reader import Dcp
from torch_compat.formats.lazy import LazyTensor

State = Mapping[str, Mapping[str, Any]]

_MEMBERS = re.compile(r"(?:.*\.)?param_groups\.(\d+)\.params")


def is_numbered(state: State) -> bool:
    """Return whether state is keyed by numbers."""
    return bool(state) and all(owner.isdecimal() for owner in state)


def state_by_name(state: State, params: Mapping[str, LazyTensor], dcp: Dcp) -> dict[str, Any]:
    """Return the state keyed by parameter name.

    Args:
        state: number -> field -> tensor or number, in the order of the checkpoint.
        params: trained parameters by name, in the order of the checkpoint.
        dcp: the checkpoint, which holds the sizes of the groups.

    Raises:
        UserError: the assignment of numbers to parameters is ambiguous.
    """
    numbers = [int(owner) for owner in state]
    if numbers != sorted(numbers):  # names have no order then either
        raise UserError(_refusal(dcp, "the file does not keep their order"))
    sizes = [len(members) for members in _groups(dcp)]
    if sum(sizes) != len(params):
        raise UserError(
            _refusal(dcp, f"its groups have {sum(sizes)} parameters, the model {len(params)}")
        )
    fits = [
        order for groups in _orders(params, len(sizes))
        if [len(group) for group in groups] == sizes
        and _has_shapes(state, params, order := [name for group in groups for name in group])
    ]  # fmt: skip
    if not fits or any(order != fits[0] for order in fits):
        raise UserError(_refusal(dcp, "shapes do not tell which group has which parameters"))
    return {fits[0][int(owner)]: fields for owner, fields in state.items()}


def _groups(dcp: Dcp) -> list[list[Any]]:
    """Return the members of each group in order."""
    groups = {int(match[1]): key for key in dcp.objects if (match := _MEMBERS.fullmatch(key))}
    members = [dcp.objects(groups[number]) for number in sorted(groups)]
    if not members or not all(isinstance(member, list) for member in members):
        raise UserError(_refusal(dcp, "it has no list of each group's parameters"))
    return members


def _orders(params: Mapping[str, LazyTensor], groups: int) -> Iterator[list[list[str]]]:
    """Yield possible orders of parameters: one group, or one of matrices and one of vectors."""
    if groups == 1:
        yield [list(params)]
    elif groups == 2:
        matrices = [name for name, tensor in params.items() if len(tensor.shape) > 1]
        vectors = [name for name, tensor in params.items() if len(tensor.shape) <= 1]
        yield from ([matrices, vectors], [vectors, matrices])


def _has_shapes(state: State, params: Mapping[str, LazyTensor], order: list[str]) -> bool:
    """Return whether each moment has the shape of its parameter in an order."""
    return all(
        int(owner) < len(order) and field.shape in ((), params[order[int(owner)]].shape)
        for owner, fields in state.items()
        for field in fields.values()
        if isinstance(field, LazyTensor)
    )


def _refusal(dcp: Dcp, why: str) -> str:
    return (
        f"{dcp.where}: its optimizer state is keyed by numbers instead of names, and {why}. "
        "Save it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or import "
        "with --weights-only"
    )
