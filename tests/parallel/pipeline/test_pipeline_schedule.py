"""The tables: what is in them, what they cost, and that `check` refuses those that are wrong."""

import dataclasses
import functools
import itertools
from collections import Counter

import pytest

from jaxforge.parallel.pipeline.schedule import SCHEDULES, Action, gpipe, one_f_one_b

DIRECTIONS = ("forward", "backward")


def cases():
    """(name, stages, microbatches, chunks): fewer microbatches than stages, as many, and more."""
    for n in range(1, 9):
        for m in sorted({1, 2, n - 1, n, n + 1, 2 * n - 1, 3 * n} - {0}):
            yield from (("1f1b", n, m, 1), ("gpipe", n, m, 1))
        for m, chunks in itertools.product((n, 2 * n, 5 * n), (2, 3)):
            yield from (("interleaved_1f1b", n, m, chunks), ("gpipe", n, m, chunks))


@functools.cache
def build(name, stages, microbatches, chunks):
    return SCHEDULES[name](stages, microbatches, chunks)


@pytest.fixture(params=list(cases()), ids=lambda case: "-".join(map(str, case)), scope="module")
def schedule(request):
    return build(*request.param)


def actions_of(schedule):
    """Every work as (tick, direction, stage, work)."""
    for t, tick in enumerate(schedule.ticks):
        for direction in DIRECTIONS:
            for stage, action in enumerate(getattr(tick, direction)):
                if action is not None:
                    yield t, direction, stage, action


def test_check_passes(schedule):
    schedule.check()


def test_is_of_the_size_that_was_asked_for(request, schedule):
    name, *sizes = request.node.callspec.params["schedule"]
    assert schedule.name == name
    assert [schedule.stages, schedule.microbatches, schedule.chunks] == sizes


def test_microbatch_is_at_each_virtual_stage_once_each_way(schedule):
    n_virtual = schedule.stages * schedule.chunks
    seen = Counter(
        (direction, action.microbatch, action.chunk * schedule.stages + stage)
        for _, direction, stage, action in actions_of(schedule)
    )
    wanted = itertools.product(DIRECTIONS, range(schedule.microbatches), range(n_virtual))
    assert seen == dict.fromkeys(wanted, 1)


def test_neighbours_hand_on_what_is_wanted_in_the_next_tick(schedule):
    """Stages with rings, which hand on (microbatch, virtual stage that takes it) as they run."""
    n, last = schedule.stages, schedule.stages * schedule.chunks - 1
    rings = [{} for _ in range(n)]
    arriving, returning, done = [None] * n, [None] * n, []
    for tick, idle_slots in zip(schedule.ticks, schedule.idle_slots, strict=True):
        onward, back = [None] * n, [None] * n
        for stage, (ring, action) in enumerate(zip(rings, tick.forward, strict=True)):
            if action is None:
                ring[idle_slots[stage]] = "of nobody"
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


def test_spare_slot_of_an_idle_stage_is_free(schedule):
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


def test_phases_follow_one_another(schedule):
    n, action = schedule.stages, schedule.chunks * schedule.microbatches
    if schedule.name == "gpipe":
        wanted = [(True, False, action + n - 1), (False, True, action + n - 1)]
    else:
        alone = n * schedule.chunks - 1
        both = action + n - 1 - alone
        wanted = [(True, False, alone), (True, True, both), (False, True, alone)]
    phases = schedule.phases()
    assert [(p.forward, p.backward, len(p.ticks)) for p in phases] == [w for w in wanted if w[2]]
    assert sum((phase.ticks for phase in phases), ()) == schedule.ticks


def test_bubble_is_that_of_the_formula(schedule):
    idle = schedule.stages - 1
    formula = idle / (schedule.chunks * schedule.microbatches + idle)
    assert schedule.bubble() == pytest.approx(formula, abs=1e-12)


def test_slots_are_as_few_as_the_schedule_can_do_with(schedule):
    one_spare = schedule.chunks * schedule.microbatches + 1
    warm = (schedule.chunks + 1) * schedule.stages - 1
    assert schedule.slots == (one_spare if schedule.name == "gpipe" else min(warm, one_spare))


@pytest.mark.parametrize("stages", range(1, 9))
def test_1f1b_needs_no_more_slots_for_more_microbatches(stages):
    full = 2 * stages - 1
    assert {one_f_one_b(stages, m).slots for m in (full, full + 1, 4 * full)} == {full}


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("stages", range(1, 9))
def test_interleaving_needs_no_more_slots_for_more_microbatches(stages, chunks):
    sizes = {one_f_one_b(stages, groups * stages, chunks).slots for groups in (2, 3, 8)}
    assert sizes == {(chunks + 1) * stages - 1}


def test_gpipe_needs_a_slot_more_for_every_microbatch():
    assert [gpipe(4, m).slots for m in (1, 2, 16, 64)] == [2, 3, 17, 65]


def test_chunks_take_whole_groups_of_microbatches():
    with pytest.raises(ValueError, match=r"2 chunks .* 4 at a time, and 6 is no multiple of 4"):
        one_f_one_b(4, 6, 2)


SMALL = [("1f1b", 2, 3, 1), ("gpipe", 3, 4, 1), ("interleaved_1f1b", 2, 4, 2)]
COUNTED = r"a (forward|backward) is missing, or there twice"
TIMED = r"when it has not just arrived|before it is forwarded"
OVERWRITES = r"overwrites what stage \d holds|finds another microbatch where stage \d looks"


def altered(schedule, *changes):
    """The schedule with (tick, direction, stage, work) in place of what is there."""
    ticks = list(schedule.ticks)
    for t, direction, stage, action in changes:
        of_stages = list(getattr(ticks[t], direction))
        of_stages[stage] = action
        ticks[t] = ticks[t]._replace(**{direction: tuple(of_stages)})
    return dataclasses.replace(schedule, ticks=tuple(ticks))


def with_spare(schedule, t, stage, slot):
    idle_slots = [list(row) for row in schedule.idle_slots]
    idle_slots[t][stage] = slot
    return dataclasses.replace(schedule, idle_slots=tuple(map(tuple, idle_slots)))


def idle_ticks(schedule, direction, stage):
    return [t for t, tick in enumerate(schedule.ticks) if getattr(tick, direction)[stage] is None]


def refused(schedule, message):
    with pytest.raises(ValueError, match=f"^{schedule.name}: .*({message})$"):
        schedule.check()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case[0])
class TestEveryChangeIsRefused:
    def test_dropped(self, case):
        schedule = build(*case)
        for t, direction, stage, _ in actions_of(schedule):
            refused(altered(schedule, (t, direction, stage, None)), COUNTED)

    def test_doubled(self, case):
        schedule = build(*case)
        for _, direction, stage, action in actions_of(schedule):
            for t in idle_ticks(schedule, direction, stage):
                refused(altered(schedule, (t, direction, stage, action)), COUNTED)

    def test_moved_in_time(self, case):
        schedule = build(*case)
        for t, direction, stage, action in actions_of(schedule):
            for to in idle_ticks(schedule, direction, stage):
                moved = altered(
                    schedule, (t, direction, stage, None), (to, direction, stage, action)
                )
                refused(moved, TIMED)

    def test_moved_to_another_stage(self, case):
        schedule = build(*case)
        for t, direction, stage, action in actions_of(schedule):
            other = (stage + 1) % schedule.stages
            refused(
                altered(schedule, (t, direction, stage, None), (t, direction, other, action)),
                COUNTED,
            )

    def test_swapped(self, case):
        schedule = build(*case)
        for (t, direction, stage, item), (at, way2, stage2, two) in itertools.combinations(
            actions_of(schedule), 2
        ):
            if (direction, stage) == (way2, stage2):
                refused(
                    altered(schedule, (t, direction, stage, two), (at, direction, stage, item)),
                    TIMED,
                )

    def test_in_the_slot_of_another(self, case):
        schedule = build(*case)
        for t, direction, stage, action in actions_of(schedule):
            for slot in {*range(schedule.slots)} - {action.slot}:
                refused(
                    altered(schedule, (t, direction, stage, action._replace(slot=slot))), OVERWRITES
                )

    def test_slot_too_few(self, case):
        schedule = build(*case)
        refused(dataclasses.replace(schedule, slots=schedule.slots - 1), OVERWRITES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([(3, "forward", 1, None)], "a forward is missing, or there twice"),
        ([(10, "backward", 0, None)], "a backward is missing, or there twice"),
        (
            [(8, "forward", 1, None), (9, "forward", 1, Action(7, 0, 0))],
            "virtual stage 1 forwards microbatch 7 when it has not just arrived",
        ),
        (
            [(13, "backward", 0, None), (3, "backward", 0, Action(7, 0, 0))],
            "virtual stage 0 takes microbatch 7 back when it has not just arrived",
        ),
        ([(1, "forward", 0, Action(1, 0, 0))], "tick 1 overwrites what stage 0 holds"),
        (
            [(6, "backward", 0, Action(0, 0, 3))],
            "tick 6 finds another microbatch where stage 0 looks",
        ),
    ],
)
def test_faulty_schedule_is_explained(change, message):
    refused(altered(build("1f1b", 4, 8, 1), *change), message)


def test_backward_before_its_forward_is_refused():
    schedule = one_f_one_b(4, 8)
    backward = [tick.backward for tick in schedule.ticks]
    early = zip(schedule.ticks, [*backward[1:], backward[0]], strict=True)
    ticks = tuple(tick._replace(backward=row) for tick, row in early)
    message = "virtual stage 3 takes microbatch 0 back before it is forwarded"
    refused(dataclasses.replace(schedule, ticks=ticks), message)


def test_idle_stage_that_overwrites_is_refused():
    schedule = one_f_one_b(4, 8)
    for t in idle_ticks(schedule, "forward", 0)[:-1]:
        live = schedule.ticks[-1].backward[0].slot
        refused(with_spare(schedule, t, 0, live), f"tick {t} overwrites what stage 0 holds")
