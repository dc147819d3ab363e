"""Collectives of a compiled program over an axis of a mesh."""

import re

import numpy as np

from jaxforge.tools.plan.hlo import HloProgram, first_replica_group, source_target_pairs

_CALLED = re.compile(r"(?:to_apply|body|condition|calls)=%?([\w.-]+)")


def all_operations(text, mesh):
    """Return all operations of a program (HLO text)."""
    program = HloProgram(text, mesh.size)
    return [each for operations in program.computations.values() for each in operations.values()]


def outside_of_conditionals(text, mesh):
    """Return the operations of a program that run in each of its calls."""
    program = HloProgram(text, mesh.size)
    result, seen, ahead = [], set(), [program.entry]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            operations = list(program.computations[name].values())
            result += operations
            for each in operations:
                if each.kind != "conditional":
                    ahead += _CALLED.findall(each.line)
    return result


def crossing_collectives(operations, mesh, axis):
    """Return the collectives whose devices differ in their position on an axis."""
    position = np.indices(mesh.devices.shape)[mesh.axis_names.index(axis)].reshape(-1)
    crossing = []
    for each in operations:
        if each.collective:
            groups = source_target_pairs(each.line) or [first_replica_group(each.line, mesh.size)]
            if any(len({int(position[i]) for i in group}) > 1 for group in groups):
                crossing.append(each.line.strip())
    return crossing
