"""Pipeline schedules as tables of the actions of each stage in each tick, in plain Python.

The layers of the model are cut into *virtual stages* of consecutive layers. With N stages (the mesh
axis `pp`) and v chunks, stage s holds virtual stages s, N + s, ... (v - 1) N + s. So the virtual
stage after another is always on the next stage of the ring. In one tick, a stage runs the forward
of one microbatch through one of its chunks, or a backward, or both. Then all results are sent to
the neighbouring stage, which uses them in the next tick.

    gpipe              all forwards, then all backwards; stores every microbatch
    1f1b               the backward of a microbatch starts as soon as its forward is complete;
                       stores at most 2 N - 1 microbatches
    interleaved_1f1b   1f1b with v chunks: fewer idle ticks, but more stored microbatches

All stages run one program in lock-step: a tick takes as long as its slowest action. Because the
first ticks have only forwards and the last ticks only backwards, 1f1b takes as long as with
independent stages: (M + (N - 1) / v) (tF + tB) for M microbatches. The fraction
(N - 1) / (v M + N - 1) of this time is idle.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

COSTS = {"forward": 1, "backward": 2}
"""Relative duration of forwards and backwards. The bubble of `1f1b` does not depend on it."""


class Action(NamedTuple):
    """Forward or backward of a microbatch through a chunk of a stage.

    Attributes:
        microbatch: index of the microbatch.
        chunk: index of the chunk on the stage.
        slot: slot of the stage's memory that stores the inputs of the backward.
    """

    microbatch: int
    chunk: int
    slot: int


class Tick(NamedTuple):
    """Actions of all stages at one time; None means idle."""

    forward: tuple[Action | None, ...]
    backward: tuple[Action | None, ...]

    def cost(self) -> int:
        """Return the duration of the tick: the longest action, since stages run in lock-step."""
        return sum(cost for direction, cost in COSTS.items() if any(getattr(self, direction)))


class Phase(NamedTuple):
    """Consecutive ticks with the same directions, which are one loop of the program.

    Attributes:
        forward: whether the ticks have forwards on any stage.
        backward: whether the ticks have backwards on any stage.
        ticks: ticks of the phase.
    """

    forward: bool
    backward: bool
    ticks: tuple[Tick, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    Attributes:
        name: key of `SCHEDULES`.
        stages: number of stages, N.
        chunks: number of virtual stages of each stage, v.
        microbatches: number of microbatches, M.
        ticks: actions of all stages, in the order of time.
        slots: number of slots of a stage. They hold forwards until their backwards, and there is
            always a free slot for an idle stage to write to.
        idle_slots: per tick and stage, a slot that an idle stage may overwrite.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    ticks: tuple[Tick, ...]
    slots: int
    idle_slots: tuple[tuple[int, ...], ...]

    def phases(self) -> list[Phase]:
        """Group the ticks into phases."""
        groups = itertools.groupby(self.ticks, lambda tick: (any(tick.forward), any(tick.backward)))
        return [Phase(*directions, tuple(ticks)) for directions, ticks in groups]

    def bubble(self) -> float:
        """Return the fraction of time that a stage is idle, in lock-step."""
        duration = sum(tick.cost() for tick in self.ticks)
        useful = self.microbatches * self.chunks * sum(COSTS.values())
        return 1 - useful / duration


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the 1F1B schedule, interleaved if there are several chunks.

    The last virtual stage runs the backward of a microbatch in the tick of its forward. Virtual
    stages take N microbatches at a time, as in Megatron-LM (Narayanan et al. 2021,
    arXiv:2104.04473).

    Raises:
        ValueError: there are several chunks, and N does not divide the number of microbatches.
    """
    name = "interleaved_1f1b" if chunks > 1 else "1f1b"
    return _build_schedule(name, stages, microbatches, chunks, stages * chunks - 1)


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the schedule with all forwards before all backwards (GPipe, arXiv:1811.06965)."""
    first_backward = microbatches * chunks + stages - 1
    return _build_schedule("gpipe", stages, microbatches, chunks, first_backward)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved_1f1b": one_f_one_b,
}
"""(stages, microbatches, chunks) -> schedule, by value of `distributed.pp_schedule`."""


def _build_schedule(
    name: str, stages: int, microbatches: int, chunks: int, first_backward: int
) -> Schedule:
    """Build a schedule without pauses within forwards, or within backwards, of a stage.

    Stage s starts its forwards in tick s. The last stage starts its backwards, in mirrored order of
    chunks, in tick `first_backward`, and each earlier stage one tick later.
    """
    if chunks > 1 and microbatches % stages:
        raise ValueError(
            f"{chunks} chunks take microbatches {stages} at a time, and {microbatches} is not a "
            f"multiple of {stages}"
        )
    order = list(_order(stages, microbatches, chunks))
    n_ticks = first_backward + len(order) + stages - 1
    per_stage = []
    for stage in range(stages):
        forward: list[tuple[int, int] | None] = [None] * n_ticks
        backward: list[tuple[int, int] | None] = [None] * n_ticks
        for i, (microbatch, chunk) in enumerate(order):
            forward[i + stage] = (microbatch, chunk)
            tick = first_backward + i + stages - 1 - stage
            backward[tick] = (microbatch, chunks - 1 - chunk)
        per_stage.append(_with_slots(forward, backward))
    ticks = tuple(
        Tick(tuple(stage.forward[t] for stage in per_stage),
             tuple(stage.backward[t] for stage in per_stage))
        for t in range(n_ticks)
    )  # fmt: skip
    idle_slots = tuple(tuple(stage.idle_slots[t] for stage in per_stage) for t in range(n_ticks))
    slots = max(stage.slots for stage in per_stage)
    return Schedule(name, stages, chunks, microbatches, ticks, slots, idle_slots)


def _order(stages: int, microbatches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yield (microbatch, chunk) in the order of forwards: groups of N microbatches by chunk."""
    for first in range(0, microbatches, stages):
        group = range(first, min(first + stages, microbatches))
        yield from ((microbatch, chunk) for chunk in range(chunks) for microbatch in group)


class _StageActions(NamedTuple):
    """Actions of one stage by tick; see `Tick` and `Schedule`."""

    forward: list[Action | None]
    backward: list[Action | None]
    idle_slots: list[int]
    slots: int


def _with_slots(
    forward: list[tuple[int, int] | None], backward: list[tuple[int, int] | None]
) -> _StageActions:
    """Assign to each forward the lowest free slot, which stays in use until its backward."""
    slot_of: dict[tuple[int, int], int] = {}
    actions = _StageActions([], [], [], 0)
    slots = 0
    for ahead, back in zip(forward, backward, strict=True):
        free = next(slot for slot in itertools.count() if slot not in slot_of.values())
        slots = max(slots, free + 1)
        actions.idle_slots.append(free)
        # The forward comes first: a backward in the same tick frees its slot for the next tick.
        if ahead is not None:
            slot_of[ahead] = free
        actions.forward.append(None if ahead is None else Action(*ahead, free))
        actions.backward.append(None if back is None else Action(*back, slot_of.pop(back)))
    return actions._replace(slots=slots)


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
