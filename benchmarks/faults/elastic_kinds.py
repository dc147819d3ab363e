"""Faults of the hosts of an elastic job: the others continue, and the run stays the same.

A scenario hits hosts of a running job of four, waits until the remaining hosts have continued, and
lets the run finish, in some scenarios after the hosts have returned. Loss, gradient norm, learning
rate and counts of each step must appear once and equal those of an undisturbed run up to rounding.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.faults.case import EVALUATION, INTERVAL, STEPS, Case, Run, require
from benchmarks.faults.hosts import N_HOSTS, TIMEOUT, Hosts
from benchmarks.faults.kind import Kind
from benchmarks.faults.network import Network

Strike = Callable[[Hosts, Network | None, int], None]
"""Hits a host."""

ALL = tuple(range(N_HOSTS))
TOLERANCE = 1e-5  # as in the tests of meshes, whose sums have another order
_NOTICE = 15.0  # seconds beyond the timeout until the others start again, on a busy machine


def kill(hosts: Hosts, _: Network | None, host: int) -> None:
    """Kill the supervisor and the processes of a host, as when its power fails."""
    hosts.signal(host, signal.SIGKILL)


def kill_process(hosts: Hosts, _: Network | None, host: int) -> None:
    """Kill the training process of a host; its supervisor stays."""
    hosts.processes(host)[-1].kill()


def kill_supervisor(hosts: Hosts, _: Network | None, host: int) -> None:
    """Kill the supervisor of a host; its process is then asked to stop."""
    hosts.processes(host)[0].kill()


def freeze(hosts: Hosts, _: Network | None, host: int) -> None:
    """Stop all processes of a host."""
    hosts.freeze(host)


def freeze_process(hosts: Hosts, _: Network | None, host: int) -> None:
    """Stop the training process of a host; its supervisor still answers."""
    hosts.processes(host)[-1].suspend()


def cut(_: Hosts, network: Network | None, host: int) -> None:
    """Cut a host off the network."""
    assert network is not None
    network.connect(host, is_connected=False)


def preempt(hosts: Hosts, _: Network | None, host: int) -> None:
    """Ask the supervisor of a host to stop, as schedulers do."""
    hosts.supervisors[host].terminate()


@contextlib.contextmanager
def job(
    case: Case, *, has_network: bool, overrides: Sequence[str] = (), are_pods: bool = False
) -> Iterator[tuple[Hosts, Network | None]]:
    """Start a job of four hosts, and wait for its first steps."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network("jff", N_HOSTS)) if has_network else None
        hosts = stack.enter_context(Hosts(case.run, network, overrides, are_pods=are_pods))
        hosts.start(*ALL)
        yield hosts, network


def nearly_matches(case: Case, reference: Run | None = None) -> None:
    """Compare the curve with that of an undisturbed run up to rounding."""
    ours, theirs = case.run.curve(), (reference or case.undisturbed()).curve()
    steps = [[line["step"] for line in curve if "train/loss" in line] for curve in (ours, theirs)]
    require(steps[0] == steps[1], f"other steps: {sorted(set(steps[1]) ^ set(steps[0]))[:5]}")
    differences = dict.fromkeys(("train/loss", "train/grad_norm", "eval/loss"), 0.0)
    for line, expected in zip(ours, theirs, strict=True):
        for name, value in expected.items():
            is_near = math.isclose(line[name], value, rel_tol=TOLERANCE, abs_tol=1e-9)
            require(is_near, f"step {line['step']}: {name} is {line[name]}, not {value}")
            if name in differences:
                differences[name] = max(differences[name], abs(line[name] / value - 1))
    case.notes |= {f"largest difference of {name}": x for name, x in differences.items()}
    case.identical = ours == theirs


def await_end(case: Case, hosts: Hosts, *numbers: int, code: int = 0) -> None:
    """Wait until the supervisors of some hosts have ended with an exit code."""
    case.codes += hosts.codes(*numbers)
    require(set(case.codes) == {code}, f"exit codes {case.codes}")


def moment(case: Case, hosts: Hosts, phase: str) -> None:
    """Wait for a moment of a phase: "start", "steps", "save" or "evaluation"."""
    if phase == "start":
        time.sleep(case.rng.uniform(0, 6))
        return
    step = case.rng.randrange(INTERVAL, STEPS // 2)
    if phase == "save":
        step = step // INTERVAL * INTERVAL
    elif phase == "evaluation":
        step = EVALUATION
    hosts.await_step(step)


def lost(
    strike: Strike,
    victims: Sequence[int],
    phase: str = "steps",
    *,
    returns: bool = False,
    are_pods: bool = False,
) -> Callable[[Case], None]:
    """Return a scenario in which the other hosts continue.

    Args:
        strike: hits a host.
        victims: hosts that are hit.
        phase: moment of the fault.
        returns: whether the hosts return later.
        are_pods: whether the hosts are named like the pods of a JobSet.
    """
    left = [host for host in ALL if host not in victims]

    def scenario(case: Case) -> None:
        has_network = are_pods or strike is cut
        with job(case, has_network=has_network, are_pods=are_pods) as (hosts, network):
            moment(case, hosts, phase)
            newest = max(case.run.durable(), default=0)
            for host in victims:
                strike(hosts, network, host)
            if phase != "start":
                seconds = hosts.await_roster(*left)
                limit = TIMEOUT + _NOTICE
                case.notes["seconds until the next roster"] = seconds
                require(seconds < limit, f"the others continued only after {seconds:.0f} s")
                resumed = hosts.resumed_from(left[0])
                require(resumed >= newest, f"resumed from {resumed}, but {newest} was saved")
            if returns:
                hosts.await_step(case.run.last_logged() + 1)
                restore(hosts, network, strike, victims)
                hosts.await_roster(*ALL)
            expected = ALL if returns else left
            await_end(case, hosts, *expected)
        nearly_matches(case)

    return scenario


def restore(hosts: Hosts, network: Network | None, strike: Strike, victims: Sequence[int]) -> None:
    """Let hosts return."""
    if strike is freeze:
        hosts.thaw()
    elif strike is cut:
        assert network is not None
        for host in victims:
            network.connect(host, is_connected=True)
    else:
        hosts.start(*victims)


def restarted(strike: Strike, victims: Sequence[int], phase: str = "steps") -> Callable[
    [Case], None
]:  # fmt: skip
    """Return a scenario in which all hosts start again, since their supervisors are alive."""

    def scenario(case: Case) -> None:
        with job(case, has_network=False) as (hosts, network):
            moment(case, hosts, phase)
            for host in victims:
                strike(hosts, network, host)
            await_end(case, hosts, *ALL)
        nearly_matches(case)

    return scenario


def frozen_for_seconds(case: Case) -> None:
    """Stop a host for less than the timeout: nothing happens."""
    host = case.rng.choice(ALL)
    with job(case, has_network=False) as (hosts, _):
        moment(case, hosts, "steps")
        hosts.freeze(host)
        time.sleep(TIMEOUT / 3)
        hosts.thaw()
        await_end(case, hosts, *ALL)
        require(hosts.roster(0) == list(ALL), "hosts left the job")
    nearly_matches(case)


def link_fails_now_and_then(case: Case) -> None:
    """Take the link of a host down for parts of a second, again and again."""
    host = case.rng.choice(ALL)
    with job(case, has_network=True) as (hosts, network):
        assert network is not None
        moment(case, hosts, "steps")
        for _ in range(10):
            network.connect(host, is_connected=False)
            time.sleep(case.rng.uniform(0.05, 0.5))
            network.connect(host, is_connected=True)
            time.sleep(case.rng.uniform(0.2, 1.0))
        await_end(case, hosts, *ALL)
    nearly_matches(case)


def halves_are_separated(case: Case) -> None:
    """Cut the half without the lowest host off: it waits, and joins when it is back."""
    with job(case, has_network=True) as (hosts, network):
        assert network is not None
        moment(case, hosts, "steps")
        for host in (2, 3):
            cut(hosts, network, host)
        hosts.await_roster(0, 1)
        hosts.wait_until(lambda: "not the majority" in hosts.output(3), "the other half waits")
        require(hosts.roster(3) == list(ALL), "both halves trained")
        for host in (2, 3):
            network.connect(host, is_connected=True)
        hosts.await_roster(*ALL)
        await_end(case, hosts, *ALL)
    nearly_matches(case)


def second_fault_in_recovery(case: Case) -> None:
    """Kill another host while the others start again."""
    with job(case, has_network=False) as (hosts, network):
        moment(case, hosts, "steps")
        kill(hosts, network, 3)
        hosts.await_roster(0, 1, 2)
        time.sleep(case.rng.uniform(0, 5))
        kill(hosts, network, 0)
        hosts.await_roster(1, 2)
        await_end(case, hosts, 1, 2)
    nearly_matches(case)


def shrinks_twice_and_grows(case: Case) -> None:
    """Lose two hosts one after the other, and get both back."""
    with job(case, has_network=False) as (hosts, network):
        moment(case, hosts, "steps")
        kill(hosts, network, 1)
        hosts.await_roster(0, 2, 3)
        kill(hosts, network, 0)
        hosts.await_roster(2, 3)
        hosts.start(0, 1)
        hosts.await_roster(*ALL)
        await_end(case, hosts, *ALL)
    nearly_matches(case)


def all_are_preempted(case: Case) -> None:
    """Stop all hosts as a scheduler does; the run resumes without being elastic."""
    with job(case, has_network=False) as (hosts, _):
        moment(case, hosts, "steps")
        for host in ALL:
            hosts.supervisors[host].terminate()
        await_end(case, hosts, *ALL, code=75)
    case.goes_on()
    nearly_matches(case)


def _of_hosts(
    name: str, scenario: Callable[[Case], None], expected: str, *, has_network: bool = False
) -> Kind:
    """Return a kind of fault of an elastic job."""
    return Kind(f"elastic: {name}", 2, scenario, expected, n=N_HOSTS, has_network=has_network)


CONTINUES = "the other hosts continue"
RETURNS = "the others continue, and take the host back"
ALL_AGAIN = "all hosts start again"

ELASTIC_KINDS = (
    *(_of_hosts(f"{what}: {whom}", lost(strike, victims), CONTINUES, has_network=strike is cut)
      for what, strike in (("host killed", kill), ("host stopped", freeze), ("host cut off", cut),
                           ("host preempted", preempt))
      for whom, victims in (("the coordinator's", (0,)), ("another", (2,)), ("two", (1, 3)))),
    *(_of_hosts(f"host killed: two with the coordinator's, {phase}", lost(kill, (0, 1), phase),
                CONTINUES)
      for phase in ("steps", "save", "evaluation")),
    *(_of_hosts(f"host killed: {phase}", lost(kill, (3,), phase), CONTINUES)
      for phase in ("save", "evaluation", "start")),
    *(_of_hosts(f"{what} and returns", lost(strike, (1,), returns=True), RETURNS,
                has_network=strike is cut)
      for what, strike in (("host killed", kill), ("host stopped", freeze), ("host cut off", cut),
                           ("host preempted", preempt))),
    *(_of_hosts(f"supervisor killed: {whom}", lost(kill_supervisor, victims), CONTINUES)
      for whom, victims in (("the coordinator's", (0,)), ("another", (2,)))),
    *(_of_hosts(f"process killed: {whom}, {phase}", restarted(kill_process, victims, phase),
                ALL_AGAIN)
      for whom, victims in (("process 0", (0,)), ("another", (2,)), ("half of them", (1, 2)))
      for phase in ("steps", "save", "evaluation")),
    *(_of_hosts(f"process stopped: {whom}", restarted(freeze_process, victims), ALL_AGAIN)
      for whom, victims in (("process 0", (0,)), ("another", (2,)))),
    _of_hosts("host stopped for seconds", frozen_for_seconds, "nothing"),
    _of_hosts("link fails now and then", link_fails_now_and_then, "the same curve",
              has_network=True),
    _of_hosts("halves cannot hear each other", halves_are_separated, "one half continues",
              has_network=True),
    _of_hosts("host killed in the recovery from another's loss", second_fault_in_recovery,
              CONTINUES),
    _of_hosts("two hosts lost, both return", shrinks_twice_and_grows, RETURNS),
    _of_hosts("all hosts preempted", all_are_preempted, "saves; one process goes on"),
    *(_of_hosts(f"pod {what} and replaced", lost(strike, (0,), returns=True, are_pods=True),
                RETURNS, has_network=True)
      for what, strike in (("killed", kill), ("preempted", preempt))),
)  # fmt: skip
