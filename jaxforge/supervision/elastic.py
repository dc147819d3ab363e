"""Supervisor of one host of an elastic job, which continues when hosts leave and takes them back.

Each host runs one such supervisor. They agree on rosters (`rosters.py`), and each starts and ends
the processes of its own host. The engine transports their statuses and says which hosts are alive:
TCP between the supervisors (`members.py`), or Ray (`ray_engine.py`).

    a process ends, or a host falls silent     all hosts end their processes; the leader publishes
                                               a roster of the remaining hosts
    a host returns                             it joins after the next save
    a supervisor is asked to stop              all processes save; the other hosts continue without
    the run is completed, or cannot go on      all supervisors end with the exit code

Nothing is restored here: processes choose the newest state that all of them can read when they
start, and `distributed.elastic_processes` makes them keep the batches of the whole job.
"""

import hashlib
import logging
import math
import queue
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

from jaxforge import exit_codes
from jaxforge.cli.process import ROSTER_VARIABLE, listening
from jaxforge.cli.redaction import redacted_command
from jaxforge.exit_codes import AGREED, Exit, as_stop, stop_code
from jaxforge.supervision import rosters
from jaxforge.supervision.processes import Ended, Event, Group, environments, free_port
from jaxforge.supervision.rosters import Roster, Status, View
from jaxforge.supervision.supervisor import (
    Policy,
    command_env,
    newest_step,
    progressed,
    record,
)

log = logging.getLogger("jaxforge.supervise")

_TICK_SEC = 0.25
_LOOK_SEC = 2.0  # between two looks at the checkpoints of the run
_AGREED_CODES = {reason.code for reason in AGREED}
_STOPS = {Exit.SIGNAL.code, Exit.INTERRUPT.code}


@dataclass(frozen=True)
class Hosts:
    """The hosts of an elastic job.

    Attributes:
        count: number of hosts of the whole job.
        index: number of this host.
        least: smallest number of hosts.
        multiple: number of hosts that hold one copy of the model together.
        key: secret of the job; the same on all hosts.
        timeout: seconds until a silent host counts as lost.
        join_timeout: seconds that the first roster waits for all hosts.
    """

    count: int
    index: int
    least: int
    multiple: int
    key: str
    timeout: float
    join_timeout: float


class Engine(Protocol):
    """The hosts of a job as an engine knows them.

    Attributes:
        name: address of this host, at which processes of other hosts reach it.
    """

    name: str

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def view(self) -> View:
        """Return the hosts."""

    def publish(self, patience: float = 0.0) -> None:
        """Make the status of this host known at once, within `patience` seconds."""


class ElasticSupervisor:
    """Runs the processes of one host in each roster that includes the host.

    Args:
        run: run directory, for progress and the log.
        connect: returns the engine of this host. Its argument returns the status to publish.
    """

    def __init__(
        self,
        command: Sequence[str],
        per_host: int,
        policy: Policy,
        run: Path | None,
        hosts: Hosts,
        connect: Callable[[Callable[[], Status]], Engine],
    ) -> None:
        self._command, self._per_host, self._policy = command, per_host, policy
        self._run, self._hosts, self._connect = run, hosts, connect
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._env = command_env(policy)
        # The lock of the run names the job, and others may read that file: it is not the key.
        self._job = hashlib.sha256(f"job of {hosts.key}".encode()).hexdigest()
        self._status = Status(
            hosts.index, uuid.uuid4().hex
        )  # replaced whole: other threads send it
        self._group: Group | None = None
        self._final: int | None = None
        self._stopping: signal.Signals | None = None
        self._deadline = math.inf
        self._looked = -math.inf
        self._spare_step: int | None = None
        self._asked_to_save = False
        self._failures, self._not_before = 0, 0.0
        self._began, self._first_step = 0.0, -1
        self._created = self._started = time.monotonic()
        self._supervisors: dict[int, str] = {}
        self._waiting_for = ""
        self._ended_at: float | None = None

    def run(self) -> int:
        """Take part in the job until it ends, or until this host is asked to leave it.

        Returns:
            The exit code of the job, or of a stop.
        """
        members = self._connect(lambda: self._status)
        with members, listening(self._events.put):
            while self._final is None:
                # This thread alone changes the state; others only send the published status.
                self._handle(self._next_event(), members)
                self._look()
                view = members.view()
                # Adopting comes first: decisions below must follow the newest roster.
                self._adopt(view)
                if self._group is not None:
                    self._watch(self._group, view)
                else:
                    self._while_idle(view, members.name)
            self._status = replace(self._status, phase="ended")
            self._record(members.view())
            members.publish(self._hosts.timeout)  # the others would continue without this host
            log.info("done: exit code %d", self._final)
            return self._final

    @property
    def leaves(self) -> bool:
        """True if this host was asked to leave the job, which may continue without it."""
        return self._status.leaves

    def _next_event(self) -> Event | None:
        try:
            return self._events.get(timeout=_TICK_SEC)
        except queue.Empty:
            return None

    def _handle(self, event: Event | None, members: Engine) -> None:
        """Handle the end of a process, or a signal to this supervisor."""
        now = time.monotonic()
        match event:
            case Ended() if self._group is not None:
                self._group.ended(event)
                log.info("process %d of this host ended with %d: %s",
                         event.index, event.code, exit_codes.meaning(event.code))  # fmt: skip
                # After an agreed end all processes end by themselves. After another one they may
                # wait in a collective for the process that is gone.
                if event.code not in _AGREED_CODES:
                    self._deadline = min(self._deadline, now + self._policy.peer_grace)
                if not self._group.running:
                    self._end_attempt(self._group.code, members.view())
            case signal.Signals():
                self._stopping = event
                self._status = replace(self._status, leaves=True)
                log.info("%s: this host leaves the job", event.name)
                # The others hear it before the processes end, and do not count it as a failure.
                members.publish()
                if self._group is None:
                    self._final = stop_code(event)
                else:
                    self._group.send(event)
                    self._deadline = min(self._deadline, now + self._policy.grace)

    def _look(self) -> None:
        """Look up the newest checkpoint now and then."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SEC:
            self._looked = now
            self._status = replace(self._status, step=newest_step(self._run))

    # Plans

    def _adopt(self, view: View) -> None:
        """Adopt the newest roster, and start the processes of this host if it belongs to it."""
        # Only a majority of the previous roster makes the next, so that numbers only grow: the
        # newest roster is that of the job, and a host that was silent follows it.
        roster = view.newest_roster
        known = self._status.roster
        if roster and (known is None or roster.number > known.number):
            self._record(view)
            # Published before the start: the leader counts this host as running from here on.
            self._status = replace(self._status, roster=roster)
            if self._group is not None:
                log.warning(
                    "%s continued without this host, which was silent: its processes are killed",
                    rosters.describe(roster.hosts),
                )
                self._group.kill()
        roster = self._status.roster
        # A roster is run at most once by a host. After its end the leader makes another one.
        if roster is None or self._group is not None or roster.number <= self._status.attempt:
            return
        if self._hosts.index in roster.hosts and self._stopping is None:
            self._start(roster, view)

    def _start(self, roster: Roster, view: View) -> None:
        total = len(roster.hosts) * self._per_host
        log.info("roster %d: %s of %d, %d processes: %s", roster.number,
                 rosters.describe(roster.hosts), self._hosts.count, total,
                 redacted_command(self._command))  # fmt: skip
        self._status = replace(
            self._status, phase="running", attempt=roster.number, code=None, regroup=0
        )
        # The count of progress begins at the checkpoint that this start resumes from.
        self._deadline, self._spare_step, self._asked_to_save = math.inf, None, False
        self._began, self._first_step = time.time(), newest_step(self._run)
        self._started = time.monotonic()
        # A supervisor that is restarted has another incarnation: its processes are gone.
        self._supervisors = {
            host: status.incarnation for host, status in view.alive.items() if host in roster.hosts
        }
        # Processes are numbered through the hosts of the roster, so that devices stay contiguous.
        first = rosters.first_process(roster, self._hosts.index, self._per_host)
        env = environments(
            {**self._env, ROSTER_VARIABLE: f"{self._job} {roster.number}"},
            roster.coordinator, first, self._per_host, total,
        )  # fmt: skip
        self._group = Group(self._command, env, self._events)

    def _watch(self, group: Group, view: View) -> None:
        """End the processes of this host when those of another host have ended."""
        roster, now = self._status.roster, time.monotonic()
        assert roster is not None
        for host in roster.hosts:
            # A host that was slow to start is known from its first message on.
            if host in view.alive:
                self._supervisors.setdefault(host, view.alive[host].incarnation)
        # A host that was never heard may still be starting, until the timeout has passed.
        lost = [host for host in rosters.lost_hosts(roster, view, self._supervisors)
                if host in view.alive or host in view.gone
                or now - self._started > self._hosts.timeout]  # fmt: skip
        codes = {view.alive[host].code if host in view.alive else None for host in lost}
        # An agreed end takes place at the same step everywhere, so nobody waits in a collective.
        if lost and self._deadline == math.inf and not codes <= _AGREED_CODES:
            log.warning("%s left the job: the processes of this host have %g s to end",
                        rosters.describe(lost), self._policy.peer_grace)  # fmt: skip
            self._deadline = now + self._policy.peer_grace
        if now > self._deadline:
            log.warning("still running: SIGKILL")
            group.kill()
            self._deadline = math.inf
        self._regroup_if_useful(roster, group, view)

    def _regroup_if_useful(self, roster: Roster, group: Group, view: View) -> None:
        """Let the processes save and end after the next save, if idle hosts could join."""
        leader = view.alive.get(min(roster.hosts))
        if leader is not None and leader.regroup == roster.number:
            self._status = replace(self._status, regroup=roster.number)
        # One host decides, so that all processes are asked once.
        if self._hosts.index != min(roster.hosts):
            return
        if not rosters.can_grow(roster, view, self._hosts.multiple):
            self._spare_step = None
            return
        if self._spare_step is None:
            self._spare_step = self._status.step
            log.info("a host has come: it joins after the next save")
        # Waiting for a save costs the newcomers minutes, but the job no step.
        if self._status.step > self._spare_step:
            self._status = replace(self._status, regroup=roster.number)
        # All hosts must know the reason first, or they would take the stop for an ordinary one.
        if self._status.regroup and not self._asked_to_save and rosters.have_heard(roster, view):
            self._asked_to_save = True
            group.send(signal.SIGTERM)  # JAX's preemption service tells the other processes

    # Ends

    def _end_attempt(self, code: int, view: View) -> None:
        """Note the end of the processes of this host."""
        self._group, self._deadline = None, math.inf
        progress = progressed(self._run, self._first_step, time.monotonic() - self._started)
        hosts = self._status.roster.hosts if self._status.roster else ()
        has_shrunk = any(host not in view.alive or view.alive[host].leaves for host in hosts)
        # A host that is lost or joins is not a failure of the command, and costs no restart.
        self._failures = 0 if progress or has_shrunk or self._status.regroup else self._failures + 1
        # Only the leader's pause matters: it publishes the next roster.
        delay = self._decide(code)
        self._not_before = time.monotonic() + (delay or 0.0)
        self._ended_at = time.time()
        self._status = replace(
            self._status, phase="idle" if self._final is None else "ended", code=code
        )

    def _decide(self, code: int) -> float | None:
        """Return the pause before the next roster; set `_final` if there is none for this host."""
        if as_stop(code) != code:
            # A stop signal killed a process before it could handle it. If the host is to stop, its
            # supervisor receives the signal, too; otherwise this is a failure like others.
            code = Exit.ABORTED.code
        if self._stopping is not None:
            self._final = stop_code(self._stopping)
        elif code in _STOPS:
            return 0.0  # `_while_idle` finds out who has asked for the stop
        # Success, or a mistake that another start repeats: both end the job for all hosts.
        elif code == 0 or not self._policy.runs_again(code):
            self._final = code
        elif self._failures == 0:
            return 0.0
        else:
            delay = self._policy.next_delay(code, self._failures)
            if delay is None:
                self._final = code
            return delay
        return None

    def _while_idle(self, view: View, name: str) -> None:
        """Publish the next roster if this host leads, or end if the job has been stopped."""
        if self._final is not None:
            return
        roster = self._status.roster
        if roster and (verdict := rosters.verdict(roster, view)) is not None:
            log.info("another host has ended the job with %d: %s",
                     verdict, exit_codes.meaning(verdict))  # fmt: skip
            self._final = verdict
        elif self._is_stopped(view):
            self._final = self._status.code
        if self._final is not None:
            return
        now, least = time.monotonic(), self._hosts.least
        if roster is None and now - self._created < self._hosts.join_timeout:
            # Hosts start at different times: a job of a part of them would restart soon.
            least = self._hosts.count  # the first roster waits for all hosts
        hosts = rosters.next_hosts(view, least, self._hosts.multiple)
        self._log_waiting(view, hosts, least)
        if hosts and view.is_leader and now >= self._not_before:
            # Process 0, the coordinator of JAX, runs on the first host, which is this one.
            # Numbers only grow: a host that returns sees that its roster is old, and ends its
            # processes.
            known = view.newest_roster.number if view.newest_roster else 0
            number = max(known, self._status.attempt) + 1
            self._record(view)
            self._status = replace(
                self._status, roster=Roster(number, hosts, f"{name}:{free_port()}")
            )

    def _is_stopped(self, view: View) -> bool:
        """Return whether all processes have stopped although no host leaves or joins."""
        local, roster = self._status, self._status.roster
        if roster is None or local.code not in _STOPS or local.attempt != roster.number:
            return False
        statuses = [view.alive.get(host) for host in roster.hosts]
        # All stopped, and no host leaves or joins: somebody has signalled the processes.
        return not local.regroup and all(
            status is not None
            and not status.leaves
            and self._supervisors.get(status.host, status.incarnation) == status.incarnation
            and status.attempt == roster.number
            and status.code == local.code
            for status in statuses
        )

    def _log_waiting(self, view: View, hosts: Sequence[int], least: int) -> None:
        """Say once what the job waits for."""
        absent = [host for host in range(view.n_hosts) if host not in view.alive]
        text = ""
        if not hosts and absent and len(view.candidates) < max(least, 1):
            text = f"waiting for {rosters.describe(absent)}: at least {least} hosts are needed"
        elif not hosts and absent and not rosters.is_running(view):
            text = (
                f"waiting: {rosters.describe(absent)} may be running without this host, as these "
                "hosts are not the majority of the previous roster"
            )
        if text and text != self._waiting_for:
            log.info("%s", text)
        self._waiting_for = text

    def _record(self, view: View) -> None:
        """Append a line about the latest attempt to the log of the run, on one host."""
        local, roster = self._status, self._status.roster
        if roster is None or local.attempt != roster.number or self._ended_at is None:
            return
        alive = {*view.alive, self._hosts.index}
        # One line per attempt, by the first host that lived to see its end.
        if self._hosts.index == min(host for host in roster.hosts if host in alive):
            line = {
                "start": roster.number,
                "began": self._began,
                "ended": self._ended_at,
                "hosts": roster.hosts,
                "codes": [local.code],
                "code": local.code,
                "steps": [self._first_step, newest_step(self._run)],
                "signal": self._stopping.name if self._stopping else None,
                "again_in_sec": None if self._final is not None else 0.0,
            }
            record(self._run, line)
        self._ended_at = None
