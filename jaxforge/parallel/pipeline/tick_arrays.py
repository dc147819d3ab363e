"""A schedule as arrays: what the one program for all stages reads, tick by tick."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxforge.parallel.pipeline.schedule import Action, Schedule

Column = Any
"""Of the table: an array of NumPy's for a phase, and in the scan one of JAX's for a tick."""


class Actions(NamedTuple):
    """Actions of all stages [stages], or of one stage."""

    microbatch: Column
    chunk: Column
    slot: Column


class TickArrays(NamedTuple):
    """A tick as arrays: [stages] of each direction's actions, and what the ends of the model do.

    Attributes:
        forward: microbatch, chunk and slot; an idle stage repeats microbatch 0 into a spare slot.
        backward: the same; an idle stage's is masked.
        is_forward: whether a stage's forward is a real one.
        is_backward: whether its backward is.
        embeds: the microbatch that the first virtual stage forwards; -1: none.
        losses: the one that the last virtual stage takes back; -1: none.
        embed_backwards: the one that the first virtual stage takes back; -1: none.
    """

    forward: Actions
    backward: Actions
    is_forward: Column
    is_backward: Column
    embeds: Column
    losses: Column
    embed_backwards: Column


def tick_arrays(schedule: Schedule) -> list[TickArrays]:
    """A schedule as arrays [ticks, ...], phase by phase."""
    ticks = zip(schedule.ticks, schedule.idle_slots, strict=True)
    rows = [_row(schedule, tick.forward, tick.backward, idle_slots) for tick, idle_slots in ticks]
    phases, start = [], 0
    for phase in schedule.phases():
        of_phase = rows[start : start + len(phase.ticks)]
        phases.append(jax.tree.map(lambda *leaves: np.stack(leaves), *of_phase))
        start += len(phase.ticks)
    return phases


def _row(
    schedule: Schedule,
    forward: Sequence[Action | None],
    backward: Sequence[Action | None],
    idle_slots: Sequence[int],
) -> TickArrays:
    def columns(actions: Sequence[Action]) -> Actions:
        return Actions(*np.asarray(actions, np.int32).T)

    def at(action: Action | None, chunk: int) -> np.ndarray:
        microbatch = -1 if action is None or action.chunk != chunk else action.microbatch
        return np.asarray(microbatch, np.int32)

    idle = Action(0, 0, 0)
    return TickArrays(
        columns(
            [action or Action(0, 0, slot) for action, slot in zip(forward, idle_slots, strict=True)]
        ),
        columns([action or idle for action in backward]),
        is_forward=np.array([action is not None for action in forward]),
        is_backward=np.array([action is not None for action in backward]),
        embeds=at(forward[0], 0),
        losses=at(backward[-1], schedule.chunks - 1),
        embed_backwards=at(backward[0], 0),
    )
