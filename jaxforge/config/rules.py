"""Check of all rules between sections, and between sections and the device mesh.

A rule is a function of the config and the size of each mesh axis, and yields a message for each
violation. The rules are in `section_rules.py`, `group_rules.py` and `axes.py`.
"""

import inspect
import math
from collections.abc import Iterator

from jaxforge.config import axes, group_rules, section_rules
from jaxforge.config.axes import Rule, declared_sizes
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError

RULES: tuple[Rule, ...] = tuple(
    rule
    for module in (section_rules, group_rules, axes)
    for name, rule in vars(module).items()
    if inspect.isgeneratorfunction(rule) and rule.__module__ == module.__name__ and name[0] != "_"
)
"""The public generator functions of these modules, in their order."""


def check(config: JobConfig, n_devices: int) -> None:
    """Refuse a configuration that cannot run on this number of devices of the whole job.

    Raises:
        UserError: If any rule is broken; one line each.
    """
    if problems := broken(config, n_devices):
        raise UserError("\n".join(problems))


def broken(config: JobConfig, n_devices: int) -> list[str]:
    """Return a message for each broken rule; the rules apply to the axes as written if need be."""
    problems = list(_mesh_problems(config, n_devices))
    # Rules are checked even if the mesh is wrong, so that one start reports everything.
    mesh = declared_sizes(config) if problems else mesh_shape(config, n_devices)
    problems += (problem for rule in RULES for problem in rule(config, mesh))
    return list(dict.fromkeys(problems))


def mesh_shape(config: JobConfig, n_devices: int) -> dict[str, int]:
    """Return the size of each mesh axis, in the order of `AXES`, with dp_shard = -1 resolved.

    Raises:
        UserError: If the axes do not multiply to `n_devices`.
    """
    for problem in _mesh_problems(config, n_devices):
        raise UserError(problem)
    mesh = declared_sizes(config)
    if config.distributed.dp_shard == -1:
        mesh["dp_shard"] = n_devices // math.prod(mesh.values())
    return mesh


def _mesh_problems(config: JobConfig, n_devices: int) -> Iterator[str]:
    sizes = declared_sizes(config)
    total, is_open = math.prod(sizes.values()), config.distributed.dp_shard == -1
    if n_devices == total or (is_open and n_devices % total == 0):
        return
    axes = {axis: size for axis, size in sizes.items() if size > 1} or {"dp_shard": 1}
    product = " * ".join(f"distributed.{axis} = {size}" for axis, size in axes.items())
    needed = f"a multiple of {total}" if is_open else f"{total}"
    remedy = "lower an axis" if is_open else "set distributed.dp_shard to -1, or change an axis"
    yield f"{product} needs {needed} devices, not {n_devices}: {remedy}"
