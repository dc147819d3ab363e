"""States of the processes of a hanging job, and the culprits."""

import dataclasses

import pytest

from jaxforge.training.health.autopsy import Evidence, State, examine
from jaxforge.training.health.heartbeats import Beat, Status

ARRIVED = Beat("host", Status(7, "training", "", has_own_limit=False, idle=30.0), True, "loop.py:9")
SILENT_AFTER = 20.0


def beat(index, **changes):
    own = {key: changes.pop(key) for key in tuple(changes) if key in Status.__dataclass_fields__}
    status = dataclasses.replace(ARRIVED.status, **own)
    return dataclasses.replace(ARRIVED, host=f"host{index}", status=status, **changes)


def autopsy(index=0, quiet=(), unanswered=0.0, count=4, absent=(), **changes):
    """Return the autopsy of a process; `p2={...}` changes the beat of process 2."""
    beats = {i: beat(i, **changes.get(f"p{i}", {})) for i in range(count) if i not in absent}
    silence = {i: 0.0 for i in range(count) if i != index} | dict(quiet)
    return examine(
        Evidence(index, count, beats, silence, unanswered, SILENT_AFTER, "10.0.0.1:1234")
    )


CALLBACK = {"is_in_jax": False, "location": "slow.py:3 (on_step_end)"}
DATA = {"activity": "waiting for data", "is_in_jax": False}
SAVING = {"section": "checkpoint", "activity": "saving", "has_own_limit": True}
COMPILING = {"step": None, "activity": "compiling", "has_own_limit": True, "is_in_jax": False}
VICTIM = {"ending": "victim", "reason": "another process is lost"}
REPORTED = {"ending": "reported"}
FAILED = {"ending": "failed", "reason": "ValueError: x"}
FINISHED = {"ending": "finished"}

CASES = {
    "silent": ({"quiet": {2: 25}, "p1": CALLBACK}, [2], "WHSW"),
    "two silent": ({"quiet": {1: 25, 3: 21}}, [1, 3], "WSWS"),
    "late heartbeat": ({"quiet": {2: 19}}, [], "WWWW"),
    "never seen": ({"quiet": {3: 25}, "absent": [3]}, [3], "WWWS"),
    "in a callback": ({"p1": CALLBACK}, [1], "WHWW"),
    "waits for data": ({"p3": DATA}, [3], "WWWH"),
    "earlier step": ({"p2": {"step": 6}}, [2], "WWHW"),
    "earlier step in JAX, other in a callback": ({"p1": {"step": 6}, "p2": CALLBACK}, [2], "WHHW"),
    "two behind": ({"p1": CALLBACK, "p2": {**CALLBACK, "step": 6}}, [2], "WHHW"),
    "this process is behind": ({"index": 1, "p1": CALLBACK}, [1], "WHWW"),
    "saves": ({"p0": SAVING}, [0], "BWWW"),
    "compiles": ({f"p{i}": COMPILING for i in range(4)}, [], "BBBB"),
    "failed": ({"p1": FAILED, "p2": CALLBACK}, [1], "WLHW"),
    "finished": ({"p1": FINISHED, "p2": CALLBACK}, [1], "WNHW"),
    "others finished": ({"p0": SAVING, "p1": FINISHED, "p2": FINISHED, "p3": FINISHED}, [], "BNNN"),
    "victims left": ({"p1": VICTIM, "p2": VICTIM, "quiet": {1: 50, 2: 50, 3: 25}}, [3], "WVVS"),
    "others reported": (
        {"p1": REPORTED, "p2": {**REPORTED, **CALLBACK}, "quiet": {1: 50, 2: 50}}, [2], "WWHW"
    ),
    "others reported silence": ({"p1": REPORTED, "quiet": {1: 50, 2: 25}}, [2], "WWSW"),
    "all arrived": ({}, [], "WWWW"),
    "all in one callback": ({f"p{i}": CALLBACK for i in range(4)}, [], "WWWW"),
    "service does not answer": ({"index": 2, "unanswered": 25}, [0], "SUWU"),
    "this process is cut off": ({"quiet": {1: 25, 2: 25, 3: 25}}, [0], "WSSS"),
    "the other of two": ({"count": 2, "quiet": {1: 25}}, [1], "WS"),
}  # fmt: skip
LETTERS = {
    "W": State.WAITING, "H": State.BEHIND, "S": State.SILENT, "B": State.BUSY, "L": State.FAILED,
    "N": State.FINISHED,    "V": State.VICTIM, "U": State.UNKNOWN,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_autopsy_finds_states_and_culprits(name):
    arguments, culprits, letters = CASES[name]
    result = autopsy(**arguments)
    assert result.states == [LETTERS[letter] for letter in letters]
    assert result.culprits == culprits


@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [
        (
            {"quiet": {2: 25}},
            "most likely culprit: process 2 (host2), silent: no heartbeat for 25 s, last after "
            "launching step 7, training, at loop.py:9. It is killed or suspended, or its host or "
            "network failed. Processes 0, 1, 3 of 4 wait after launching step 7",
        ),
        (
            {"p1": DATA},
            "most likely culprit: process 1 (host1), behind: alive, without progress for 30 s, "
            "after launching step 7, training: waiting for data, at loop.py:9. Processes 0, 2, 3 "
            "of 4 wait after launching step 7",
        ),
        (
            {"index": 3, "unanswered": 25},
            "most likely culprit: process 0: its coordination service at 10.0.0.1:1234 does not "
            "answer for 25 s. Process 0 is killed or suspended, or its host or the network to it "
            "failed. Process 3 of 4 waits after launching step 7",
        ),
        (
            {"p1": FAILED},
            "most likely culprit: process 1 (host1), failed: ValueError: x. Processes "
            "0, 2, 3 of 4 wait after launching step 7",
        ),
        (
            {},
            "most likely culprit: the collective itself (network or device): all processes "
            "arrived. Processes 0, 1, 2, 3 of 4 wait after launching step 7",
        ),
        (
            {"quiet": {1: 25, 2: 25, 3: 25}},
            "most likely culprit: this process, process 0 (host0): no other process answers, so "
            "its network failed. Process 0 of 4 waits after launching step 7",
        ),
        (
            {f"p{i}": COMPILING for i in range(4)},
            "most likely culprit: none: no process waits for another one",
        ),
    ],
)
def test_verdict_names_culprits_and_waiting_processes(arguments, verdict):
    assert autopsy(**arguments).verdict() == verdict


def test_verdict_lists_few_of_many_processes():
    quiet = dict.fromkeys(range(1, 500), 25.0)
    text = autopsy(index=999, count=1000, quiet=quiet).verdict()
    assert "process 8 (host8)" in text
    assert "process 9 (host9)" not in text
    assert "; and 491 more. Processes 0, 500, 501, " in text
    assert len(text) < 2000


@pytest.mark.parametrize(
    ("arguments", "is_lost"),
    [
        ({"quiet": {2: 25}}, True),
        ({"index": 2, "unanswered": 25}, True),
        ({"p1": FAILED}, True),
        ({"p1": FINISHED}, True),
        ({"quiet": {1: 25, 2: 25, 3: 25}}, True),
        ({"p0": SAVING, "p1": FINISHED, "p2": FINISHED, "p3": FINISHED}, False),
        ({"p1": VICTIM}, False),
        ({"p1": CALLBACK}, False),
        ({}, False),
    ],
)
def test_only_processes_that_never_arrive_are_lost(arguments, is_lost):
    assert autopsy(**arguments).has_lost_process == is_lost
