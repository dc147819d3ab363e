"""Pipeline schedules: their actions, slots and costs, and faults that `check` reports."""

import dataclasses
import functools
import itertools
from collections import Counter

import pytest

from jaxforge.parallel.pipeline.schedule import SCHEDULES, Action, gpipe, one_f_one_b
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


@each(list(schedules()))
def test_check_accepts_built_schedules(schedule):
    schedule.check()


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


SMALL = [("1f1b", 2, 3, 1), ("gpipe", 3, 4, 1), ("interleaved_1f1b", 2, 4, 2)]
WRONG_COUNT = r"a (forward|backward) is missing or repeated"
WRONG_TIME = r"did not arrive one tick before|before its forward"
WRONG_SLOT = r"overwrites a slot in use on stage \d|in tick \d+ holds another forward"


def altered(schedule, *changes):
    """Return the schedule with replaced actions (tick, direction, stage, action)."""
    ticks = list(schedule.ticks)
    for t, direction, stage, action in changes:
        actions = list(getattr(ticks[t], direction))
        actions[stage] = action
        ticks[t] = ticks[t]._replace(**{direction: tuple(actions)})
    return dataclasses.replace(schedule, ticks=tuple(ticks))


def with_idle_slot(schedule, t, stage, slot):
    idle_slots = [list(row) for row in schedule.idle_slots]
    idle_slots[t][stage] = slot
    return dataclasses.replace(schedule, idle_slots=tuple(map(tuple, idle_slots)))


def idle_ticks(schedule, direction, stage):
    return [t for t, tick in enumerate(schedule.ticks) if getattr(tick, direction)[stage] is None]


def assert_rejected(schedule, message):
    with pytest.raises(ValueError, match=f"^{schedule.name}: .*({message})$"):
        schedule.check()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case[0])
class TestCheckRejects:
    def test_missing_action(self, case):
        schedule = build(*case)
        for t, direction, stage, _ in actions_of(schedule):
            assert_rejected(altered(schedule, (t, direction, stage, None)), WRONG_COUNT)

    def test_repeated_action(self, case):
        schedule = build(*case)
        for _, direction, stage, action in actions_of(schedule):
            for t in idle_ticks(schedule, direction, stage):
                assert_rejected(altered(schedule, (t, direction, stage, action)), WRONG_COUNT)

    def test_action_in_other_tick(self, case):
        schedule = build(*case)
        for t, direction, stage, action in actions_of(schedule):
            for to in idle_ticks(schedule, direction, stage):
                moved = altered(
                    schedule, (t, direction, stage, None), (to, direction, stage, action)
                )
                assert_rejected(moved, WRONG_TIME)

    def test_action_on_other_stage(self, case):
        schedule = build(*case)
        for t, direction, stage, action in actions_of(schedule):
            other = (stage + 1) % schedule.stages
            assert_rejected(
                altered(schedule, (t, direction, stage, None), (t, direction, other, action)),
                WRONG_COUNT,
            )

    def test_swapped_actions(self, case):
        schedule = build(*case)
        for first, second in itertools.combinations(actions_of(schedule), 2):
            if first[1:3] == second[1:3]:  # same direction and stage
                changes = (*first[:3], second[3]), (*second[:3], first[3])
                assert_rejected(altered(schedule, *changes), WRONG_TIME)

    def test_action_in_other_slot(self, case):
        schedule = build(*case)
        for t, direction, stage, action in actions_of(schedule):
            for slot in {*range(schedule.slots)} - {action.slot}:
                assert_rejected(
                    altered(schedule, (t, direction, stage, action._replace(slot=slot))), WRONG_SLOT
                )

    def test_too_few_slots(self, case):
        schedule = build(*case)
        assert_rejected(dataclasses.replace(schedule, slots=schedule.slots - 1), WRONG_SLOT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([(3, "forward", 1, None)], "a forward is missing or repeated"),
        ([(10, "backward", 0, None)], "a backward is missing or repeated"),
        (
            [(8, "forward", 1, None), (9, "forward", 1, Action(7, 0, 0))],
            "virtual stage 1 forwards microbatch 7, which did not arrive one tick before",
        ),
        (
            [(13, "backward", 0, None), (3, "backward", 0, Action(7, 0, 0))],
            "virtual stage 0 runs the backward of microbatch 7, whose gradient did not arrive one "
            "tick before",
        ),
        ([(1, "forward", 0, Action(1, 0, 0))], "tick 1 overwrites a slot in use on stage 0"),
        (
            [(6, "backward", 0, Action(0, 0, 3))],
            "the slot of the backward of stage 0 in tick 6 holds another forward",
        ),
    ],
)
def test_check_describes_problem(change, message):
    assert_rejected(altered(build("1f1b", 4, 8, 1), *change), message)


def test_check_rejects_backward_before_forward():
    schedule = one_f_one_b(4, 8)
    backward = [tick.backward for tick in schedule.ticks]
    early = zip(schedule.ticks, [*backward[1:], backward[0]], strict=True)
    ticks = tuple(tick._replace(backward=row) for tick, row in early)
    message = "virtual stage 3 runs the backward of microbatch 0 before its forward"
    assert_rejected(dataclasses.replace(schedule, ticks=ticks), message)


def test_check_rejects_overwritten_slot():
    schedule = one_f_one_b(4, 8)
    for t in idle_ticks(schedule, "forward", 0)[:-1]:
        used = schedule.ticks[-1].backward[0].slot
        message = f"tick {t} overwrites a slot in use on stage 0"
        assert_rejected(with_idle_slot(schedule, t, 0, used), message)
