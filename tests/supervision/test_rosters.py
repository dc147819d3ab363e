"""Agreement of hosts: pure functions of what a host hears."""

import dataclasses

import pytest

from jaxforge.supervision import rosters
from jaxforge.supervision.rosters import Roster, Status, View

ROSTER = Roster(3, (0, 1, 2, 3), "a:1")


def idle(host, roster=ROSTER, **changes):
    status = Status(host, f"supervisor {host}", "idle", roster, roster.number if roster else 0, 137)
    return dataclasses.replace(status, **changes)


def running(host, roster=ROSTER, **changes):
    return idle(host, roster, phase="running", code=None, **changes)


def view(*statuses, local=None, gone=(), n_hosts=4):
    alive = {status.host: status for status in statuses}
    local = min(alive) if local is None else local
    remote = {host: status for host, status in alive.items() if host != local}
    return View(alive[local], remote, gone, n_hosts)


@pytest.mark.parametrize(
    ("alive", "gone", "continues"),
    [
        ((0, 1, 2), (), True),  # 3 of 4
        ((1, 2, 3), (), True),
        ((0, 1), (), True),  # half, with the lowest host
        ((2, 3), (), False),  # half, without: the other half may continue
        ((2, 3), (0, 1), True),  # the others have ended for certain
        ((3,), (0,), False),
        ((3,), (0, 1, 2), True),
        ((0,), (), False),
        ((0,), (1, 2), True),  # one of two, and the lowest
    ],
)
def test_only_one_of_two_separated_groups_continues(alive, gone, continues):
    seen = view(*(idle(host) for host in alive), gone=gone)
    assert rosters.has_majority(ROSTER.hosts, seen) is continues
    assert bool(rosters.next_hosts(seen, 1, 1)) is continues
    others = [host for host in ROSTER.hosts if host not in (*alive, *gone)]
    if continues and others:
        assert not rosters.has_majority(ROSTER.hosts, view(*map(idle, others), gone=gone))


def test_next_roster_waits_for_running_hosts():
    assert rosters.next_hosts(view(idle(0), running(1), idle(2)), 1, 1) == ()
    assert rosters.next_hosts(view(idle(0), idle(1), idle(2)), 1, 1) == (0, 1, 2)


def test_next_roster_waits_for_hosts_that_have_not_started_the_newest():
    """The latest status heard of a host may be older than its start."""
    late = idle(1, roster=None)
    assert rosters.next_hosts(view(idle(0, code=75), late, idle(2)), 1, 1) == ()
    leaves = idle(1, roster=None, leaves=True)
    assert rosters.next_hosts(view(idle(0), leaves, idle(2), idle(3)), 1, 1) == (0, 2, 3)


def test_hosts_that_leave_or_have_ended_do_not_run_again():
    seen = view(idle(0, leaves=True), idle(1), idle(2, phase="ended"), idle(3), local=1)
    assert rosters.next_hosts(seen, 1, 1) == (1, 3)
    assert seen.is_leader


def test_next_roster_has_whole_copies_of_the_model_and_enough_hosts():
    seen = view(idle(0), idle(1), idle(3))
    assert rosters.next_hosts(seen, 1, 2) == (0, 1)
    assert rosters.next_hosts(seen, 3, 2) == ()


def test_lost_hosts_are_silent_restarted_or_have_ended():
    supervisors = {host: f"supervisor {host}" for host in ROSTER.hosts}
    seen = view(running(0), running(1, incarnation="another"), idle(2))
    assert rosters.lost_hosts(ROSTER, seen, supervisors) == [1, 2, 3]
    late = idle(2, attempt=2)  # it has not started the roster yet
    assert rosters.lost_hosts(ROSTER, view(running(0), late, running(1), running(3)), {}) == []


def test_host_that_gives_up_ends_the_job():
    seen = view(running(0), running(1))
    assert rosters.verdict(ROSTER, seen) is None
    for last, expected in (
        (idle(1, phase="ended", code=2), 2),
        (idle(1, code=2), None),
        (idle(1, phase="ended", code=75, leaves=True), None),
        (idle(1, phase="ended", code=2, attempt=2), None),
    ):
        assert rosters.verdict(ROSTER, dataclasses.replace(seen, last={1: last})) == expected


def test_idle_host_ends_once_all_others_have_completed_the_run():
    roster = Roster(3, (0, 1), "a:1")
    done = {host: idle(host, roster, phase="ended", code=0) for host in (0, 1)}
    seen = dataclasses.replace(view(idle(2, roster, code=None)), last=done)
    assert rosters.verdict(roster, seen) == 0
    failed = dataclasses.replace(done[1], phase="idle", code=137)
    assert rosters.verdict(roster, dataclasses.replace(seen, last={**done, 1: failed})) is None


def test_hosts_of_an_engine_need_no_majority():
    """Ray's view is the same for all hosts: those that it has given up cannot go on."""
    seen = view(idle(3), gone=(0,))
    assert not rosters.has_majority(ROSTER.hosts, seen)
    assert rosters.has_majority(ROSTER.hosts, dataclasses.replace(seen, is_shared=True))


def test_idle_host_lets_the_job_grow_only_by_whole_copies():
    roster = Roster(3, (0, 1), "a:1")
    seen = view(running(0, roster), running(1, roster), idle(2, None))
    assert rosters.can_grow(roster, seen, 1)
    assert not rosters.can_grow(roster, seen, 2)
    assert not rosters.can_grow(roster, view(running(0, roster), running(1, roster)), 1)


def test_regrouping_begins_when_all_hosts_have_heard():
    roster = Roster(3, (0, 1), "a:1")
    assert not rosters.have_heard(roster, view(running(0, roster, regroup=3), running(1, roster)))
    assert rosters.have_heard(roster, view(*(running(host, roster, regroup=3) for host in (0, 1))))


def test_status_survives_the_wire_and_other_text_is_refused():
    status = running(2, regroup=3, step=17)
    assert Status.from_json(status.to_json(), 4) == status
    with pytest.raises(ValueError, match="hosts 2 and"):
        Status.from_json(status.to_json(), 3)
    for text in ("", "[]", "3", '{"host": 1}', '{"host": 1, "incarnation": "x", "roster": 4}',
                 '{"roster": null, "host": 1, "incarnation": "x", "other": 1}', "[" * 60_000,
                 '{"host": 1, "incarnation": "x", "code": 1e999}',
                 '{"host": 1, "incarnation": "x", "attempt": -1}',
                 '{"host": 1, "incarnation": "x", "phase": "late"}',
                 f'{{"host": {"1" * 5000}, "incarnation": "x"}}'):  # fmt: skip
        with pytest.raises(ValueError, match="not a status"):
            Status.from_json(text, 4)
