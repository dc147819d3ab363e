"""Optimizer state keyed by parameter number, as in `optimizer.state_dict()` of torch.

Numbers count the parameters of all groups in order. The parameters of a group are in the order of
the model's state dict, because both traverse the modules in the same order.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxforge.errors import UserError
from torch_compat.checkpoint.model_keys import shared_prefixes
from torch_compat.formats.dcp_reader import Dcp
from torch_compat.formats.lazy import LazyTensor
from torch_compat.formats.limits import is_name
from torch_compat.names.table import strip_wrappers

State = Mapping[str, Mapping[str, Any]]

_GROUP = re.compile(r"(?:.*\.)?param_groups\.(\d+)\.(params|param_names|weight_decay)")
_BY_NAME: tuple[Callable[[str], object], ...] = (
    re.compile(r"bias|LayerNorm\.weight").search,
    re.compile(r"bias|(?i:norm|\bln_)").search,
)
"""Usual rules for names without weight decay: that of the textbooks, and that of all norms."""


class Assigned(NamedTuple):
    """Optimizer state by parameter name.

    Attributes:
        state: parameter -> field -> tensor or number.
        decays: parameter -> whether its group has a weight decay; empty if groups record none.
    """

    state: dict[str, Any]
    decays: dict[str, bool]


def is_numbered(state: State) -> bool:
    """Return whether state is keyed by numbers."""
    return bool(state) and all(owner.isdecimal() for owner in state)


def state_by_name(state: State, params: Mapping[str, LazyTensor], dcp: Dcp) -> Assigned:
    """Return the state keyed by parameter name.

    Args:
        state: number -> field -> tensor or number, in the order of the checkpoint.
        params: trained parameters by name, in the order of the checkpoint.
        dcp: the checkpoint, which holds the members of the groups.

    Raises:
        UserError: the assignment of numbers to parameters is ambiguous.
    """
    numbers = [int(owner) for owner in state]
    if numbers != sorted(numbers):  # names have no order then either
        raise UserError(_refusal(dcp, "the file does not keep their order"))
    groups = _groups(dcp)
    sizes = [len(group["params"]) for group in groups]
    if sum(sizes) != len(params):
        raise UserError(
            _refusal(dcp, f"its groups have {sum(sizes)} parameters, the model {len(params)}")
        )
    named = _by_recorded_names(groups, params)
    # Shapes decide between the orders that group sizes allow. Two orders that fit both are
    # ambiguous.
    fits = [
        order for order in ([named] if named else _orders(params, [n for n in sizes if n]))
        if _has_shapes(state, params, order)
    ]  # fmt: skip
    if not fits or any(order != fits[0] for order in fits):
        raise UserError(_refusal(dcp, "shapes do not tell which group has which parameters"))
    decays = [group.get("weight_decay") for group, n in zip(groups, sizes, strict=True)
              for _ in range(n)]  # fmt: skip
    is_known = all(isinstance(value, int | float) for value in decays)
    return Assigned(
        {fits[0][int(owner)]: fields for owner, fields in state.items()},
        dict(zip(fits[0], map(bool, decays), strict=True)) if is_known else {},
    )


def _groups(dcp: Dcp) -> list[dict[str, Any]]:
    """Return members, their names and the weight decay of each group in order."""
    groups: dict[int, dict[str, Any]] = {}
    for key in dcp.objects:
        if match := _GROUP.fullmatch(key):
            groups.setdefault(int(match[1]), {})[match[2]] = dcp.objects(key)
    ordered = [group for _, group in sorted(groups.items())]
    if not ordered or not all(isinstance(group.get("params"), list) for group in ordered):
        raise UserError(_refusal(dcp, "it has no list of each group's parameters"))
    return ordered


def _by_recorded_names(
    groups: Sequence[Mapping[str, Any]], params: Mapping[str, LazyTensor]
) -> list[str] | None:
    """Return the parameters in the order of `param_names` of the groups; None if these differ.

    torch records the names that an optimizer was constructed with.
    """
    lists = [group.get("param_names") for group in groups]
    if not all(isinstance(names, list) and all(map(is_name, names)) for names in lists):
        return None
    names = [strip_wrappers(name) for names in lists if names for name in names]
    for prefix in ("", *shared_prefixes(names)):
        order = [name.removeprefix(prefix) for name in names]
        if sorted(order) == sorted(params):
            return order
    return None


def _orders(params: Mapping[str, LazyTensor], sizes: Sequence[int]) -> Iterator[list[str]]:
    """Yield possible orders of parameters: one group, or groups with and without weight decay."""
    if len(sizes) == 1:
        yield list(params)
    # Other numbers of groups, as with rates per layer, follow no usual rule.
    if len(sizes) != 2:
        return
    vectors = {name for name, tensor in params.items() if len(tensor.shape) <= 1}
    for chosen in (vectors, *({*filter(rule, params)} for rule in _BY_NAME)):
        first = [name for name in params if name in chosen]
        second = [name for name in params if name not in chosen]
        orders = {len(first): first + second, len(second): second + first}
        if sizes[0] in orders:
            yield orders[sizes[0]]
            # Equal sizes do not tell which group is first: the shapes of moments decide.
            if len(first) == len(second):
                yield first + second


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
