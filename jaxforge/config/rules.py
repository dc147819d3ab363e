"""Check of all rules between sections, and between sections and the device mesh.

A rule is a function of the config and the size of each mesh axis. It yields a message for each
violation, or a `Problem`, whose changes `check` tries before it proposes them. The rules are in
`section_rules.py`, `eval_rules.py` and `axes.py`.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Set

from pydantic import ValidationError

from jaxforge.config import axes, eval_rules, section_rules
from jaxforge.config.axes import Mesh, Rule, declared_sizes
from jaxforge.config.job import JobConfig
from jaxforge.config.problems import (
    Change,
    Problem,
    describe_change,
    divisors,
    nearest,
    problems_by_message,
)
from jaxforge.errors import UserError

RULES: tuple[Rule, ...] = tuple(
    rule
    for module in (section_rules, eval_rules, axes)
    for name, rule in vars(module).items()
    if inspect.isgeneratorfunction(rule) and rule.__module__ == module.__name__ and name[0] != "_"
)
"""The public generator functions of these modules, in their order."""


def check(config: JobConfig, n_devices: int) -> None:
    """Refuse a configuration that cannot run on this number of devices of the whole job.

    Raises:
        UserError: If any rule is broken; one line each.
    """
    if lines := list(_lines(config, n_devices)):
        raise UserError("\n".join(lines))


def _lines(config: JobConfig, n_devices: int) -> Iterator[str]:
    """Yield a line per broken rule, and a line for each change that fixes several of them."""
    of_mesh = problems_by_message(_mesh_problems(config, n_devices))
    of_rules = _broken(config, declared_sizes(config) if of_mesh else mesh_shape(config, n_devices))
    change, fixed = _shared_fix(config, {**of_mesh, **of_rules}, n_devices)
    new = changed(config, change) if fixed else None
    if new is not None:
        yield from fixed
        yield f"these {len(fixed)} problems: change {describe_change(change)}"
        yield from _lines(new, n_devices)
        return
    yield from _broken_mesh(config, n_devices)
    for what, problem in of_rules.items():
        is_mended = functools.partial(_leaves_only, config, of_rules.keys() - {what}, n_devices)
        yield problem.message_with_fix(is_mended)


_TRIED = 24  # values of a key that may fix several problems


def _shared_fix(
    config: JobConfig, problems: Mapping[str, Problem], n_devices: int
) -> tuple[Change, list[str]]:
    """Return the proposed change that fixes most of the problems, and these; [] for fewer than two.

    The change causes no other problem.
    """
    best: tuple[Change, list[str]] = {}, []
    changes = {
        tuple(change.items()): change
        for problem in problems.values()
        for fix in problem.fixes
        for change in itertools.islice(fix, _TRIED)
    }
    for change in changes.values() if len(problems) > 1 else ():
        new = changed(config, change)
        if new is None or any(_mesh_problems(new, n_devices)):
            continue
        left = _broken(new, mesh_shape(new, n_devices)).keys()
        fixed = [what for what in problems if what not in left]
        if left <= problems.keys() and len(fixed) > max(1, len(best[1])):
            best = change, fixed
        if not left:
            break
    return best


def allows(config: JobConfig, n_devices: int) -> bool:
    """Return whether `check` accepts the config; faster, because no fixes are sought."""
    return _leaves_only(config, frozenset(), n_devices, {})


def mesh_shape(config: JobConfig, n_devices: int) -> dict[str, int]:
    """Return the size of each mesh axis, in the order of `AXES`, with dp_shard = -1 resolved.

    Raises:
        UserError: If the axes do not multiply to `n_devices`.
    """
    for problem in _broken_mesh(config, n_devices):
        raise UserError(problem)
    mesh = declared_sizes(config)
    if config.distributed.dp_shard == -1:
        mesh["dp_shard"] = n_devices // math.prod(mesh.values())
    return mesh


def _broken_mesh(config: JobConfig, n_devices: int) -> Iterator[str]:
    """Yield a message with changes that break no other rule, else changes that fix the mesh."""
    known = _broken(config, declared_sizes(config)).keys()
    for problem in _mesh_problems(config, n_devices):
        is_clean = functools.partial(_leaves_only, config, known, n_devices)
        is_mended = functools.partial(_leaves_only, config, None, n_devices)
        has_clean_fix = problem.effective_changes(is_clean)
        yield problem.message_with_fix(is_clean if has_clean_fix else is_mended)


def _leaves_only(config: JobConfig, known: Set[str] | None, n_devices: int, change: Change) -> bool:
    """Return whether a changed config breaks only the known rules.

    If `known` is None, return whether its mesh matches the devices.
    """
    new = changed(config, change)
    if new is None or any(_mesh_problems(new, n_devices)):
        return False
    return known is None or _broken(new, mesh_shape(new, n_devices)).keys() <= known


def _broken(config: JobConfig, mesh: Mesh) -> dict[str, Problem]:
    """Return the broken rules by their message."""
    return problems_by_message(problem for rule in RULES for problem in rule(config, mesh))


def _mesh_problems(config: JobConfig, n_devices: int) -> Iterator[Problem]:
    sizes = declared_sizes(config)
    total, is_open = math.prod(sizes.values()), config.distributed.dp_shard == -1
    if n_devices == total or (is_open and n_devices % total == 0):
        return
    axes = {axis: size for axis, size in sizes.items() if size > 1} or {"dp_shard": 1}
    product = " * ".join(f"distributed.{axis} = {size}" for axis, size in axes.items())
    needed = f"a multiple of {total}" if is_open else f"{total}"
    yield Problem(
        f"{product} needs {needed} devices, not {n_devices}", *other_axes(sizes, n_devices)
    )


def other_axes(sizes: dict[str, int], n_devices: int) -> tuple[tuple[Change, ...], ...]:
    """Return changes of one axis, or of all axes, after which the mesh may match the devices."""
    shard = math.prod(sizes.values()) // sizes["dp_shard"]
    takes_all = {"distributed.dp_shard": -1}
    above_one = [axis for axis, size in sizes.items() if size > 1 and axis != "dp_shard"]
    none_else = {f"distributed.{axis}": 1 for axis in above_one} | takes_all
    if n_devices % shard == 0:
        return ((takes_all,),)
    alone = [nearest(f"distributed.{axis}", sizes[axis], divisors(n_devices)) for axis in above_one]
    return tuple(
        (*sizes_of, *({**each, **takes_all} for each in sizes_of), none_else) for sizes_of in alone
    )


def changed(config: JobConfig, change: Change) -> JobConfig | None:
    """Return the config with other values; None if its sections do not accept them."""
    for key, value in change.items():
        name, _, field = key.partition(".")
        section = getattr(config, name)
        given = {key: getattr(section, key) for key in section.model_fields_set}
        try:
            section = type(section).model_validate({**given, field: value})
        except ValidationError:
            return None
        config = config.with_values({name: section})
    return config
