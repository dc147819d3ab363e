"""Pipeline schedules as tables: what each stage does in each tick. Needs no devices and no arrays.

The model's layers are cut into *virtual stages* of consecutive layers. With N stages (the mesh axis
`pp`) and v chunks, stage s holds virtual stages s, N + s, ... (v - 1) N + s, so that what follows a
virtual stage is always on the next stage of the ring. In one tick a stage forwards one microbatch
through one of its chunks, takes one backward through one, or both; then every result moves on to
the neighbour, who uses it in the very next tick.

    gpipe              all forwards, then all backwards; holds every microbatch
    1f1b               a microbatch goes backward as soon as it is through: holds 2 N - 1 at most
    interleaved_1f1b   1f1b with v chunks: fewer idle ticks, and more microbatches held

Stages work in lock-step, for they are one program: a tick takes what its dearest part takes. With
forwards alone in the first ticks and backwards alone in the last, 1f1b costs what it costs where
every stage goes its own way: (M + (N - 1) / v) (tF + tB), idle for (N - 1) / (v M + N - 1) of it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

COSTS = {"forward": 1, "backward": 2}
"""What a tick's forwards cost, and its backwards; any ratio gives `1f1b` the same bubble."""


class Action(NamedTuple):
    """A microbatch at a chunk of a stage.

    Attributes:
        microbatch: which one, from 0.
        chunk: which of the stage's chunks, from 0.
        slot: where the stage keeps what the backward needs of the forward.
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
    """Ticks in a row in which the same directions are at work: one loop of the program.

    Attributes:
        forward: whether any stage goes forward.
        backward: whether any stage goes backward.
        ticks: the ticks.
    """

    forward: bool
    backward: bool
    ticks: tuple[Tick, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A table of work.

    Attributes:
        name: which of `SCHEDULES`.
        stages: how many stages there are, N.
        chunks: virtual stages of each stage, v.
        microbatches: how many go through, M.
        ticks: the table.
        slots: how many forwards a stage can hold for their backwards; where it holds as many as
            there are microbatches, one more, for idle stages to write to.
        spare: per tick and stage, a slot that an idle stage may overwrite.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    ticks: tuple[Tick, ...]
    slots: int
    idle_slots: tuple[tuple[int, ...], ...]

    def phases(self) -> list[Phase]:
        """The loops that the ticks make."""

        def at_work(tick: Tick) -> tuple[bool, bool]:
            return any(tick.forward), any(tick.backward)

        groups = itertools.groupby(self.ticks, at_work)
        return [Phase(*directions, tuple(ticks)) for directions, ticks in groups]

    def bubble(self) -> float:
        """The part of its time that a stage is idle, in lock-step; 0.25 is a quarter."""
        spent = sum(tick.cost() for tick in self.ticks)
        useful = self.microbatches * self.chunks * sum(COSTS.values())
        return 1 - useful / spent

    def check(self) -> None:
        """Raises ValueError where work is missing, comes too early or late, or is overwritten."""
        for problem in _problems(self):
            raise ValueError(f"{self.name}: {problem}")


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B; interleaved if there are several chunks.

    The last virtual stage turns a microbatch round in the tick in which it arrives. Virtual stages
    take microbatches N at a time, as in Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473).

    Raises:
        ValueError: several chunks, and microbatches that are no multiple of the stages.
    """
    name = "interleaved_1f1b" if chunks > 1 else "1f1b"
    return _lock_step(name, stages, microbatches, chunks, turn=stages * chunks - 1)


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards before all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    turn = microbatches * chunks + stages - 1
    return _lock_step("gpipe", stages, microbatches, chunks, turn)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved_1f1b": one_f_one_b,
}
"""(stages, microbatches, chunks) -> the schedule that `distributed.pp_schedule` names."""


def _lock_step(name: str, stages: int, microbatches: int, chunks: int, turn: int) -> Schedule:
    """Forwards without a pause from tick 0 on, and backwards in mirrored order from `turn` on."""
    if chunks > 1 and microbatches % stages:
        raise ValueError(
            f"{chunks} chunks take microbatches {stages} at a time, and {microbatches} is no "
            f"multiple of {stages}"
        )
    order = list(_order(stages, microbatches, chunks))
    n_ticks = turn + len(order) + stages - 1
    per_stage = []
    for stage in range(stages):
        forward: list[tuple[int, int] | None] = [None] * n_ticks
        backward: list[tuple[int, int] | None] = [None] * n_ticks
        for i, (microbatch, chunk) in enumerate(order):
            forward[i + stage] = (microbatch, chunk)
            backward[turn + i + stages - 1 - stage] = (microbatch, chunks - 1 - chunk)
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
    """(microbatch, chunk) as the first stage forwards them: N microbatches through every chunk."""
    for first in range(0, microbatches, stages):
        group = range(first, min(first + stages, microbatches))
        yield from ((microbatch, chunk) for chunk in range(chunks) for microbatch in group)


class _OfStage(NamedTuple):
    forward: list[Action | None]
    backward: list[Action | None]
    idle_slots: list[int]
    slots: int


def _with_slots(
    forward: list[tuple[int, int] | None], backward: list[tuple[int, int] | None]
) -> _OfStage:
    """Gives every forward the first slot that no forward on its way holds, till its backward."""
    held: dict[tuple[int, int], int] = {}
    done = _OfStage([], [], [], 0)
    slots = 0
    for ahead, back in zip(forward, backward, strict=True):
        free = next(slot for slot in itertools.count() if slot not in held.values())
        slots = max(slots, free + 1)
        done.idle_slots.append(free)
        if ahead is not None:
            held[ahead] = free
        done.forward.append(None if ahead is None else Action(*ahead, free))
        done.backward.append(None if back is None else Action(*back, held.pop(back)))
    return done._replace(slots=slots)


def _problems(schedule: Schedule) -> Iterator[str]:
    n, v, m = schedule.stages, schedule.chunks, schedule.microbatches
    forward = _when(schedule, [tick.forward for tick in schedule.ticks])
    backward = _when(schedule, [tick.backward for tick in schedule.ticks])
    wanted = {(i, k) for i in range(m) for k in range(n * v)}
    for direction, times in (("forward", forward), ("backward", backward)):
        if times.keys() != wanted or any(len(at) != 1 for at in times.values()):
            yield f"a {direction} is missing, or there twice"
            return
    for i, k in sorted(wanted):
        (ahead,), (back,) = forward[i, k], backward[i, k]
        if k and forward[i, k - 1] != [ahead - 1]:
            yield f"virtual stage {k} forwards microbatch {i} when it has not just arrived"
        if k < n * v - 1 and backward[i, k + 1] != [back - 1]:
            yield f"virtual stage {k} takes microbatch {i} back when it has not just arrived"
        if back < ahead:
            yield f"virtual stage {k} takes microbatch {i} back before it is forwarded"
    yield from _slot_problems(schedule)


def _when(
    schedule: Schedule, ticks: list[tuple[Action | None, ...]]
) -> dict[tuple[int, int], list[int]]:
    """Ticks of each (microbatch, virtual stage)."""
    times: dict[tuple[int, int], list[int]] = {}
    for t, of_stages in enumerate(ticks):
        for stage, action in enumerate(of_stages):
            if action is not None:
                key = (action.microbatch, action.chunk * schedule.stages + stage)
                times.setdefault(key, []).append(t)
    return times


def _slot_problems(schedule: Schedule) -> Iterator[str]:
    for stage in range(schedule.stages):
        slots: dict[int, tuple[int, int]] = {}
        for t, tick in enumerate(schedule.ticks):
            ahead, back = tick.forward[stage], tick.backward[stage]
            slot = schedule.idle_slots[t][stage] if ahead is None else ahead.slot
            if slot in slots or not 0 <= slot < schedule.slots:
                yield f"tick {t} overwrites what stage {stage} holds"
            if ahead is not None:
                slots[slot] = (ahead.microbatch, ahead.chunk)
            if back is not None and slots.pop(back.slot, None) != (back.microbatch, back.chunk):
                yield f"tick {t} finds another microbatch where stage {stage} looks"
