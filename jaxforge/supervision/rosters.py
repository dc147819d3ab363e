"""Agreement of the hosts of an elastic job: who runs, when, and where process 0 listens.

Each host publishes its `Status` and reads those of the others (`members.py`). There are no other
messages, so a lost or repeated one does no harm. The leader is the lowest host that is alive. It
publishes rosters, and every other host adopts the roster with the highest number:

    idle ──leader publishes roster n──► running roster n ──a process ends, or a host is lost──► idle
                                            │
                                            └── returned host, after a save: regroup ──► idle

Hosts that cannot hear each other must not both continue: they would train the same run twice. A
group of hosts may therefore form a new roster only if it holds the majority of the hosts of the
previous roster (`has_majority`), not counting those that are known to have ended. Two groups never
hold a majority of the same roster (dynamic voting: Jajodia and Mutchler, 1990).
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from jaxforge.storage.untrusted_json import STEPS, first_problem

Phase = Literal["idle", "running", "ended"]
_STRICT = ConfigDict(extra="forbid", strict=True)
_Count = Annotated[int, Field(ge=0, lt=STEPS)]  # attempts or steps
_Address = Annotated[str, Field(max_length=300, pattern=r"^[^\p{C}\s]+:[0-9]{1,5}$")]


@dataclasses.dataclass(frozen=True)
class Roster:
    """The hosts of one attempt of a job.

    Attributes:
        number: number of the attempt, from 1.
        hosts: hosts that run, in the order of their processes.
        coordinator: address at which process 0 listens.
    """

    __pydantic_config__ = _STRICT

    number: Annotated[_Count, Field(gt=0)]
    hosts: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    coordinator: _Address


@dataclasses.dataclass(frozen=True)
class Status:
    """State of a host, as the other hosts receive it.

    Attributes:
        host: number of the host.
        incarnation: identifies the supervisor process: a host that restarts has a new one.
        phase: "idle" without processes, "running", or "ended" for good.
        roster: the roster with the highest number that the host knows; None before the first one.
        attempt: number of the latest roster that the host has run; 0 before the first one.
        code: exit code of its processes in that roster; None while they run.
        leaves: whether the host was asked to stop.
        regroup: number of the roster that ends at the next save to take in hosts; 0 for none.
        step: newest complete checkpoint that the host sees, or -1.
    """

    __pydantic_config__ = _STRICT

    host: NonNegativeInt
    incarnation: Annotated[str, Field(max_length=64)]
    phase: Phase = "idle"
    roster: Roster | None = None
    attempt: _Count = 0
    code: Annotated[int, Field(ge=0, lt=256)] | None = None
    leaves: bool = False
    regroup: _Count = 0
    step: Annotated[int, Field(ge=-1, lt=STEPS)] = -1

    def to_json(self) -> str:
        """Return the status as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes, n_hosts: int) -> "Status":
        """Return a status from JSON.

        Raises:
            ValueError: the text is not a status of a host of the job.
        """
        try:
            status = _JSON.validate_json(text)
        except ValidationError as error:
            raise ValueError(f"not a status of a host: {first_problem(error)}") from error
        # Numbers index the addresses of this host: a number beyond them is from another job.
        hosts = status.roster.hosts if status.roster else ()
        if len(set(hosts)) < len(hosts) or max((status.host, *hosts)) >= n_hosts:
            raise ValueError(f"not a status of a host: hosts {status.host} and {hosts[:9]}")
        return status


_JSON = TypeAdapter(Status)


@dataclasses.dataclass(frozen=True)
class View:
    """The hosts as one of them sees them.

    Attributes:
        local: status of this host.
        remote: latest statuses of the other hosts that are alive.
        gone: hosts whose supervisor is known not to run: their machine refuses connections.
        n_hosts: number of hosts of the whole job.
        last: latest statuses of the other hosts, alive or not.
        is_shared: whether all hosts see the same, because one engine decides who is alive.
    """

    local: Status
    remote: Mapping[int, Status]
    gone: Collection[int]
    n_hosts: int
    last: Mapping[int, Status] = dataclasses.field(default_factory=dict)
    is_shared: bool = False

    @property
    def alive(self) -> dict[int, Status]:
        """Statuses of all hosts that are alive, by number."""
        # Sorted: the lowest number decides ties and leads, on every host alike.
        return dict(sorted({**self.remote, self.local.host: self.local}.items()))

    @property
    def candidates(self) -> dict[int, Status]:
        """Statuses of the hosts that may run."""
        return {
            host: status
            for host, status in self.alive.items()
            # A host that leaves still ends its processes: alive, but not part of the next roster.
            if status.phase != "ended" and not status.leaves
        }

    @property
    def newest_roster(self) -> Roster | None:
        """The roster with the highest number that a host knows."""
        rosters = [status.roster for status in self.alive.values() if status.roster]
        # Each roster needs a majority of the previous one, so two rosters never have one number.
        return max(rosters, key=lambda roster: roster.number, default=None)

    @property
    def is_leader(self) -> bool:
        """True if this host publishes the next roster."""
        # No election: every host that hears the same hosts comes to the same result.
        return self.local.host == min(self.candidates, default=-1)


def lost_hosts(roster: Roster, view: View, incarnations: Mapping[int, str]) -> list[int]:
    """Return the hosts of a running roster whose processes no longer run.

    Args:
        roster: the roster that this host runs.
        view: the hosts.
        incarnations: supervisors of the hosts of the roster, as far as this host has heard them.
    """
    lost = []
    for host in roster.hosts:
        status = view.alive.get(host)
        # A restarted supervisor answers at once, but its predecessor's processes died with it.
        has_restarted = status and incarnations.get(host, status.incarnation) != status.incarnation
        has_ended = status and status.attempt == roster.number and status.code is not None
        if status is None or has_restarted or has_ended:
            lost.append(host)
    return lost


def has_majority(previous: Collection[int], view: View) -> bool:
    """Return whether the hosts that are alive may continue without those that are silent.

    Of two groups with the same number of hosts, the one with the lowest host continues.

    Args:
        previous: hosts of the previous roster; all hosts before the first one.
        view: the hosts.
    """
    # A host that the engine has given up sees no view, so it cannot make a roster.
    if view.is_shared:
        return True
    alive = {host for host in previous if host in view.alive}
    # Hosts that refuse connections run nothing, so they cannot form a group of their own.
    silent = {host for host in previous if host not in view.alive and host not in view.gone}
    # At most one of two separated groups may continue, or two jobs would write one run.
    if len(alive) == len(silent):
        return min(alive, default=view.n_hosts) < min(silent, default=view.n_hosts)
    return len(alive) > len(silent)


def is_running(view: View) -> bool:
    """Return whether a host has processes, or is about to start those of the newest roster.

    The latest status of a host may be older than its adoption of that roster.
    """
    roster = view.newest_roster
    return any(
        status.phase == "running"
        or (roster and host in roster.hosts and status.attempt < roster.number
            and host in view.candidates)
        for host, status in view.alive.items()
    )  # fmt: skip


def next_hosts(view: View, least: int, multiple: int) -> tuple[int, ...]:
    """Return the hosts of the next roster; none while hosts run, or too few are there.

    Args:
        view: the hosts.
        least: smallest number of hosts of the job.
        multiple: number of hosts that hold a copy of the model together.
    """
    hosts = list(view.candidates)
    # Processes of the old roster may still write a checkpoint.
    if is_running(view):
        return ()
    # A copy of the model must be complete; the last hosts wait for more.
    hosts = hosts[: len(hosts) // multiple * multiple]
    previous = view.newest_roster.hosts if view.newest_roster else range(view.n_hosts)
    if len(hosts) < max(least, 1) or not has_majority(previous, view):
        return ()
    return tuple(hosts)


def can_grow(roster: Roster, view: View, multiple: int) -> bool:
    """Return whether idle hosts could join the running roster."""
    running = [host for host in roster.hosts if host in view.candidates]
    spare = [host for host, status in view.candidates.items()
             if host not in roster.hosts and status.phase == "idle"]  # fmt: skip
    return (len(running) + len(spare)) // multiple * multiple > len(roster.hosts)


def verdict(roster: Roster, view: View) -> int | None:
    """Return the exit code with which the hosts of the roster have ended the job, or None."""
    codes = []
    for host in roster.hosts:
        status = view.last.get(host)
        has_ended = status and status.phase == "ended" and status.attempt == roster.number
        # A host that leaves ends for a reason of its own, which is not a verdict on the job.
        if status and has_ended and not status.leaves:
            codes.append(status.code)
    if any(codes):
        return next(code for code in codes if code)
    # Only the last of them may have finished: until then, a host may have to start again.
    return 0 if codes == [0] * len(roster.hosts) else None


def have_heard(roster: Roster, view: View) -> bool:
    """Return whether all hosts of a roster know that it ends at the next save."""
    statuses = [view.alive.get(host) for host in roster.hosts]
    return all(status is not None and status.regroup == roster.number for status in statuses)


def first_process(roster: Roster, host: int, per_host: int) -> int:
    """Return the index of the first process of a host."""
    return roster.hosts.index(host) * per_host


def describe(hosts: Sequence[int]) -> str:
    """Return the hosts in words."""
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    return f"hosts {', '.join(map(str, hosts))}"
