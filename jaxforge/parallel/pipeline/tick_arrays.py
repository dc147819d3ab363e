"""Pipeline schedules as arrays, which the program of all stages reads tick by tick."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxforge.parallel.pipeline.schedule import Action, Schedule

Column = Any
"""Array of all ticks of a phase [ticks, ...] (NumPy), or of one tick within the scan (JAX)."""


class Actions(NamedTuple):
    """Actions of all stages [stages], or of one stage."""

    microbatch: Column
    chunk: Column
    slot: Column


class TickArrays(NamedTuple):
    """A tick as arrays: actions of all stages, and microbatches at the ends of the model.

    Attributes:
        forward: forwards [stages]; an idle stage repeats microbatch 0 and writes to a free slot.
        backward: backwards [stages]; an idle stage repeats microbatch 0, and its result is masked.
        is_forward: whether a stage has a forward [stages].
        is_backward: whether a stage has a backward [stages].
        embeds: microbatch of the forward of the first virtual stage; -1: none.
        losses: microbatch of the backward of the last virtual stage; -1: none.
        embed_backwards: microbatch of the backward of the first virtual stage; -1: none.
    """

    forward: Actions
    backward: Actions
    is_forward: Column
    is_backward: Column
    embeds: Column
    losses: Column
    embed_backwards: Column


def tick_arrays(schedule: Schedule) -> list[TickArrays]:
    """Return the arrays [ticks, ...] of each phase of a schedule."""
    ticks = zip(schedule.ticks, schedule.idle_slots, strict=True)
    rows = [_row(schedule, tick.forward, tick.backward, idle_slots) for tick, idle_slots in ticks]
    phases, start = [], 0
    for phase in schedule.phases():
        phase_rows = rows[start : start + len(phase.ticks)]
        phases.append(jax.tree.map(lambda *leaves: np.stack(leaves), *phase_rows))
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
