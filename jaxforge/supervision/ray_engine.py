"""Elastic jobs on a Ray cluster, which places the hosts, notices their loss and replaces them.

    driver   `jaxforge supervise --elastic --engine ray`, once per job: creates the actors, follows
             the hosts, and tells the table which of them Ray has lost
    host     an actor with the resources of a host; runs an `ElasticSupervisor`. Ray restarts it,
             on another node if necessary, when there is room
    table    an actor that holds the latest status of each host. All hosts see the same, so no
             majority is needed

The driver owns the actors: if it ends, Ray ends all of them.
"""

import importlib.util
import logging
import math
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxforge import exit_codes
from jaxforge.cli.process import end_now, listening
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit, stop_code
from jaxforge.supervision.elastic import ElasticSupervisor, Hosts
from jaxforge.supervision.rosters import Status, View
from jaxforge.supervision.supervisor import Policy

log = logging.getLogger("jaxforge.supervise")

_BEAT_SEC = 1.0
_ANSWER_SEC = 5.0  # until a call of the table counts as lost

Answer = tuple[Mapping[int, Status], Sequence[int], signal.Signals | None]
"""Answer of the table: the latest statuses, the hosts that are alive, a signal that stops all."""


class Table:
    """Latest statuses of the hosts, and which hosts are alive.

    Args:
        timeout: seconds until a silent host counts as lost: Ray does not notice a stopped process.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._latest: dict[int, Status] = {}
        self._heard: dict[int, float] = {}
        self._stop: signal.Signals | None = None

    def exchange(self, status: Status) -> Answer:
        """Note the status of a host, and return those of all hosts."""
        self._latest[status.host], self._heard[status.host] = status, time.monotonic()
        return self._latest, self._alive(), self._stop

    def lose(self, host: int) -> bool:
        """Note that Ray has lost the actor of a host; return whether it was alive."""
        return self._heard.pop(host, None) is not None

    def stop(self, sig: signal.Signals) -> None:
        """Ask all hosts to stop."""
        self._stop = sig

    def is_running(self) -> bool:
        """Return whether a host that is alive has processes."""
        return any(self._latest[host].phase == "running" for host in self._alive())

    def _alive(self) -> list[int]:
        now = time.monotonic()
        return [host for host, heard in self._heard.items() if now - heard < self._timeout]


class SharedView:
    """The hosts of a job as the table knows them: the engine of an `ElasticSupervisor`.

    Args:
        name: address of the node of this host.
        timeout: seconds without an answer after which this process ends: the other hosts then
            continue without it.
        ask: sends a status to the table; returns None if it does not answer.
        status: returns the status of this host.
    """

    def __init__(
        self,
        name: str,
        n_hosts: int,
        timeout: float,
        ask: Callable[[Status], Answer | None],
        status: Callable[[], Status],
    ) -> None:
        self.name, self._n_hosts, self._timeout = name, n_hosts, timeout
        self._ask, self._status = ask, status
        self._sent: Status | None = None
        self._asked, self._answered = -math.inf, time.monotonic()
        self._answer: Answer = ({}, (), None)

    def __enter__(self) -> "SharedView":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def view(self) -> View:
        """Return the hosts; ask the table again if this host has news, and each second."""
        if self._status() is not self._sent or time.monotonic() - self._asked >= _BEAT_SEC:
            self.publish()
        latest, alive, _ = self._answer
        local = self._status()
        last = {host: status for host, status in latest.items() if host != local.host}
        remote = {host: status for host, status in last.items() if host in alive}
        gone = set(range(self._n_hosts)) - {local.host, *remote}
        return View(local, remote, gone, self._n_hosts, last, is_shared=True)

    def publish(self, patience: float = 0.0) -> None:
        """Send the status of this host to the table.

        Args:
            patience: seconds in which a table that does not answer is tried again.
        """
        deadline = time.monotonic() + patience
        while not self._exchange() and time.monotonic() < deadline:
            time.sleep(_BEAT_SEC)

    def _exchange(self) -> bool:
        status, self._asked = self._status(), time.monotonic()
        answer = self._ask(status)
        if answer is None:
            if time.monotonic() - self._answered > self._timeout:
                log.error("this host is cut off from the table of hosts: it ends")
                end_now(Exit.UNHEALTHY.code)  # its processes stop with it
            return False
        self._sent, self._answered = status, time.monotonic()
        stop = answer[2] if answer[2] != self._answer[2] else None
        self._answer = answer
        if stop is not None:
            signal.raise_signal(stop)  # as if this supervisor had received it
        return True


class Host:
    """Actor that supervises the processes of one host.

    Args:
        directory: working directory of the driver.
        arguments: arguments of `ElasticSupervisor` up to the hosts.
    """

    def __init__(
        self,
        directory: str,
        arguments: tuple[Sequence[str], int, Policy, Path | None, Hosts],
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s supervise: %(message)s")
        os.chdir(directory)
        self._arguments = arguments
        self._verdict: int | None = None

    def run(self, table: Any) -> tuple[int, bool]:  # noqa: ANN401 (Ray's handle of an actor)
        """Take part in the job; return its exit code, and whether only this host has left it.

        Args:
            table: actor of `Table`. A restart of this actor needs arguments of the constructor
                without handles.
        """
        import ray
        from ray._private.state import state as cluster  # no public function has draining nodes

        node, hosts = ray.get_runtime_context().get_node_id(), self._arguments[-1]
        # The driver asks again if the connection broke before it heard the verdict.
        if self._verdict is not None:
            return self._verdict, False
        if node in cluster.get_draining_nodes():
            end_now(Exit.SIGNAL.code)  # Ray restarts this actor on another node
        name = ray.util.get_node_ip_address()

        def ask(status: Status) -> Answer | None:
            try:
                # Ray kills the processes of the node at a deadline, without a signal before.
                if node in cluster.get_draining_nodes() and not status.leaves:
                    signal.raise_signal(signal.SIGTERM)
                return ray.get(table.exchange.remote(status), timeout=_ANSWER_SEC)
            except ray.exceptions.RayError:
                return None

        supervisor = ElasticSupervisor(
            *self._arguments,
            lambda status: SharedView(name, hosts.count, hosts.timeout, ask, status),
        )
        code = supervisor.run()
        if not supervisor.leaves:
            self._verdict = code
        return code, supervisor.leaves


def supervise(
    command: Sequence[str],
    per_host: int,
    policy: Policy,
    run: Path | None,
    hosts: Hosts,
    resources: Mapping[str, float],
) -> int:
    """Run an elastic job on the Ray cluster of `RAY_ADDRESS`, or of this machine.

    Args:
        command: command of each process.
        per_host: processes of each host.
        policy: restart policy.
        run: run directory, for progress and the log.
        hosts: the hosts; the index is not used.
        resources: what a host needs of a node, by Ray's names.

    Returns:
        The exit code of the job, or of a stop.

    Raises:
        UserError: Ray is not installed, there is no cluster, or the hosts cannot start.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("--engine ray needs Ray: pip install 'jaxforge[ray]'")
    import ray

    try:
        ray.init(address="auto")
    except ConnectionError as error:
        raise UserError(
            f"--engine ray: no Ray cluster answers ({error}). Start one with `ray start --head`, "
            "or set RAY_ADDRESS"
        ) from error
    try:
        # Next to the driver, with which it ends: no resources, and no restart with an empty table.
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        table_class: Any = ray.remote(Table)
        host_class: Any = ray.remote(Host)
        table = table_class.options(num_cpus=0, scheduling_strategy=here).remote(hosts.timeout)
        options = _actor_options(resources)

        def create(host: int) -> Any:  # noqa: ANN401 (Ray's handle of an actor)
            job = (command, per_host, policy, run, replace(hosts, index=host))
            return host_class.options(**options).remote(os.getcwd(), job)

        return _follow(create, hosts.count, table)
    finally:
        ray.shutdown()


def _actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return options of an actor that needs resources; Ray has options of their own for two."""
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": {name: n for name, n in resources.items() if name not in ("CPU", "GPU")},
        "max_restarts": -1,
        "scheduling_strategy": "SPREAD",
    }


def _follow(create: Callable[[int], Any], count: int, table: Any) -> int:  # noqa: ANN401
    """Run the hosts until the job has ended; return its exit code."""
    import ray

    signals: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    stopping: signal.Signals | None = None
    verdict: int | None = None
    actors = [create(host) for host in range(count)]
    runs: dict[Any, int] = {actor.run.remote(table): host for host, actor in enumerate(actors)}
    with listening(signals.put):
        while runs:
            if not signals.empty():
                stopping = signals.get()
                log.info("%s: all hosts stop", stopping.name)
                ray.get(table.stop.remote(stopping))
            for ref in ray.wait(list(runs), timeout=_BEAT_SEC)[0]:
                host = runs.pop(ref)
                try:
                    code, has_left = ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    if error.actor_init_failed:
                        raise UserError(f"host {host} cannot start: {error}") from error
                    if ray.get(table.lose.remote(host)):
                        log.warning("host %d is lost: Ray restarts it when there is room", host)
                    # Ray restarts no actor that ends by itself on a node that is being drained.
                    if isinstance(error, ray.exceptions.ActorDiedError):
                        actors[host] = create(host)
                    time.sleep(_BEAT_SEC)  # until it is back, each call returns at once
                    has_left = True
                except ray.exceptions.RayTaskError as error:
                    raise getattr(error, "cause", None) or error from error
                else:
                    log.info("host %d ended with %d: %s", host, code, exit_codes.meaning(code))
                    if not has_left and verdict is None:
                        verdict = code
                if has_left and verdict is None and stopping is None:
                    runs[actors[host].run.remote(table)] = host  # joins at the next save
            # Hosts without processes, or without a place, need not be awaited.
            is_ending = verdict is not None or stopping is not None
            if is_ending and not ray.get(table.is_running.remote()):
                break
    return stop_code(stopping) if verdict is None else verdict
