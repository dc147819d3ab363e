"""Pipeline schedules: their actions, slots and costs."""

import functools
import itertools
from collections import Counter

import pytest

from jaxforge.parallel.pipeline.schedule import SCHEDULES, gpipe, one_f_one_b
from tests.helpers import each

DIRECTIONS = ("forward", "backward")


def cases():
    """Yield (name, stages, microbatches, chunks), with fewer to more microbatches than stages."""
    for n in range(1, 9):
        for m in sorted({1, 2, n - 1, n, n + 1, 2 * n - 1, 3 * n} - {0}):
            yield from (("1f1b", n, m, 1), ("gpipe", n, m, 1))
        for m, chunks in itertools.product((n, 2 * n, 5 * n), (2, 3)):
            yield from (("interleaved_1f1b", n, m, chunks), ("gpipe", n, m, chunks))


@functools.cache
def build(name, stages, microbatches, chunks):
    return SCHEDULES[name](stages, microbatches, chunks)


def schedules():
    """Yield every schedule of `cases`."""
    return (build(*case) for case in cases())


def actions_of(schedule):
    """Yield all actions as (tick, direction, stage, action)."""
    for t, tick in enumerate(schedule.ticks):
        for direction in DIRECTIONS:
            for stage, action in enumerate(getattr(tick, direction)):
                if action is not None:
                    yield t, direction, stage, action


@each(list(cases()))
def test_schedule_has_requested_size(name, *sizes):
    schedule = build(name, *sizes)
    assert schedule.name == name
    assert [schedule.stages, schedule.microbatches, schedule.chunks] == list(sizes)


@each(list(schedules()))
def test_each_action_occurs_once(schedule):
    n_virtual = schedule.stages * schedule.chunks
    counts = Counter(
        (direction, action.microbatch, action.chunk * schedule.stages + stage)
        for _, direction, stage, action in actions_of(schedule)
    )
    expected = itertools.product(DIRECTIONS, range(schedule.microbatches), range(n_virtual))
    assert counts == dict.fromkeys(expected, 1)


@each(list(schedules()))
def test_results_are_used_in_next_tick(schedule):
    """Simulate stages that store and send (microbatch, virtual stage of the next action)."""
    n, last = schedule.stages, schedule.stages * schedule.chunks - 1
    rings = [{} for _ in range(n)]
    arriving, returning, done = [None] * n, [None] * n, []
    for tick, idle_slots in zip(schedule.ticks, schedule.idle_slots, strict=True):
        onward, back = [None] * n, [None] * n
        for stage, (ring, action) in enumerate(zip(rings, tick.forward, strict=True)):
            if action is None:
                ring[idle_slots[stage]] = "idle"
                continue
            k = action.chunk * n + stage
            assert k == 0 or arriving[stage] == (action.microbatch, k)
            ring[action.slot] = (action.microbatch, k)
            onward[(stage + 1) % n] = (action.microbatch, k + 1)
        for stage, (ring, action) in enumerate(zip(rings, tick.backward, strict=True)):
            if action is None:
                continue
            k = action.chunk * n + stage
            assert k == last or returning[stage] == (action.microbatch, k)
            assert ring[action.slot] == (action.microbatch, k)
            back[stage - 1] = (action.microbatch, k - 1)
            done += [action.microbatch] * (k == 0)
        arriving, returning = onward, back
    assert sorted(done) == list(range(schedule.microbatches))
    assert {slot for ring in rings for slot in ring} == set(range(schedule.slots))


@each(list(schedules()))
def test_idle_slots_are_free(schedule):
    held = [set() for _ in range(schedule.stages)]
    for tick, idle_slots in zip(schedule.ticks, schedule.idle_slots, strict=True):
        for stage, slots in enumerate(held):
            ahead, back = tick.forward[stage], tick.backward[stage]
            if ahead is None:
                assert idle_slots[stage] not in slots
                assert 0 <= idle_slots[stage] < schedule.slots
            else:
                assert ahead.slot not in slots
                slots.add(ahead.slot)
            if back is not None:
                slots.remove(back.slot)


@each(list(schedules()))
def test_phases_cover_all_ticks(schedule):
    n, action = schedule.stages, schedule.chunks * schedule.microbatches
    if schedule.name == "gpipe":
        expected = [(True, False, action + n - 1), (False, True, action + n - 1)]
    else:
        single = n * schedule.chunks - 1
        both = action + n - 1 - single
        expected = [(True, False, single), (True, True, both), (False, True, single)]
    sizes = [(p.forward, p.backward, len(p.ticks)) for p in schedule.phases()]
    assert sizes == [phase for phase in expected if phase[2]]
    phases = schedule.phases()
    assert sum((phase.ticks for phase in phases), ()) == schedule.ticks


@each(list(schedules()))
def test_bubble_matches_formula(schedule):
    idle = schedule.stages - 1
    formula = idle / (schedule.chunks * schedule.microbatches + idle)
    assert schedule.bubble() == pytest.approx(formula, abs=1e-12)


@each(list(schedules()))
def test_number_of_slots_is_minimal(schedule):
    most = schedule.chunks * schedule.microbatches + 1  # all forwards, and a slot for idle stages
    in_flight = (schedule.chunks + 1) * schedule.stages - 1
    assert schedule.slots == (most if schedule.name == "gpipe" else min(in_flight, most))


@each(range(1, 9))
def test_1f1b_slots_do_not_grow_with_microbatches(stages):
    full = 2 * stages - 1
    assert {one_f_one_b(stages, m).slots for m in (full, full + 1, 4 * full)} == {full}


@each(list(itertools.product(range(1, 9), (2, 3))))
def test_interleaved_slots_do_not_grow_with_microbatches(stages, chunks):
    sizes = {one_f_one_b(stages, groups * stages, chunks).slots for groups in (2, 3, 8)}
    assert sizes == {(chunks + 1) * stages - 1}


def test_gpipe_needs_slot_per_microbatch():
    assert [gpipe(4, m).slots for m in (1, 2, 16, 64)] == [2, 3, 17, 65]


def test_incomplete_group_of_microbatches_raises():
    with pytest.raises(ValueError, match=r"2 chunks .* 4 at a time, and 6 is not a multiple of 4"):
        one_f_one_b(4, 6, 2)
