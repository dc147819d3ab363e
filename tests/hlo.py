"""Collectives of a compiled program (HLO text) over an axis of a mesh."""

import math
import re

import numpy as np

_COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)"
    r"(-start)?\("
)
_CALLED = re.compile(
    r"(?:to_apply|body|condition|calls|branch_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|%?([\w.-]+))"
)


def computations(text):
    """Return the lines of each computation by name, and the name of the entry."""
    result, name, entry = {}, "", ""
    for line in text.splitlines():
        if match := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            name = match[2]
            entry = name if match[1] else entry
            result[name] = []
        elif name:
            result[name].append(line)
    return result, entry


def outside_of_conditionals(text):
    """Return the lines of the computations that run in every call of a program."""
    lines_of, entry = computations(text)
    seen, ahead = set(), [entry]
    while ahead:
        name = ahead.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in lines_of[name]:
            if " conditional(" not in line:
                for several, single in _CALLED.findall(line):
                    ahead += [n.strip(" %") for n in (several or single).split(",")]
    return [line for name in seen for line in lines_of[name]]


def crossing_collectives(lines, mesh, axis):
    """Return the collectives in lines of HLO whose devices differ in their position on an axis."""
    at = mesh.axis_names.index(axis)
    position = np.moveaxis(np.indices(mesh.devices.shape)[at], 0, 0).reshape(-1)
    crossing = []
    for line in lines:
        if _COLLECTIVE.search(line):
            groups = _groups(line, len(position))
            if any(len({int(position[i]) for i in group}) > 1 for group in groups):
                crossing.append(line.strip())
    return crossing


def _groups(line, n):
    """Return the groups of devices that exchange, as numbers in the order of the mesh."""
    if pairs := re.search(r"source_target_pairs=\{\{(.*?)\}\}", line):
        return [[int(i) for i in pair.split(",")] for pair in pairs[1].split("},{")]
    if listed := re.search(r"replica_groups=\{\{(.*?)\}\}", line):
        return [[int(i) for i in group.split(",")] for group in listed[1].split("},{")]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims = (_numbers(text) for text in iota.groups()[:2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(_numbers(iota[3])) if iota[3] else ids).reshape(shape).tolist()
    if named := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
        r"\{([^}]*)\}",
        line,
    ):
        sizes = {name.strip(" '"): int(size) for name, size in
                 (axis.split("=") for axis in named[1].split(","))}  # fmt: skip
        ids = np.arange(n)
        if named[2]:
            ids = ids.reshape(_numbers(named[2]))
            ids = ids.transpose(_numbers(named[3])) if named[3] else ids
        ids = ids.reshape(tuple(sizes.values()))
        used = [name.strip(" '") for name in named[4].split(",")]
        assert set(used) <= set(sizes), line
        inner = [i for i, name in enumerate(sizes) if name in used]
        outer = [i for i in range(len(sizes)) if i not in inner]
        width = math.prod(ids.shape[i] for i in inner)
        return ids.transpose(outer + inner).reshape(-1, width).tolist()
    return [list(range(n))]  # all devices


def _numbers(text):
    return tuple(int(n) for n in text.split(","))
