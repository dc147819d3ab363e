"""Supervisors of several hosts: real processes on this machine that run small scripts."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxforge.commands.supervise import main
from jaxforge.errors import UserError
from jaxforge.supervision.processes import free_port
from tests.machine import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]

# Supervises a script as one host of a job; its arguments are JSON.
SUPERVISE = """
import json, logging, sys
from pathlib import Path
from jaxforge.supervision import members, elastic
from jaxforge.supervision.elastic import ElasticSupervisor, Hosts
from jaxforge.supervision.members import Members
from jaxforge.supervision.supervisor import Policy
members.BEAT_SEC = 0.1
elastic._LOOK_SEC = 0.1
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
options = json.loads(sys.argv[1])
policy = Policy(max_restarts=3, backoff=0.1, backoff_cap=0.1, grace=20, peer_grace=0.3)
command = [sys.executable, "-S", options.pop("script")]
run = Path(options.pop("run"))
addresses, key = options.pop("addresses"), options["key"]
hosts = Hosts(count=len(addresses), **options)
def connect(status):
    return Members(addresses, hosts.index, key, hosts.timeout, status)
raise SystemExit(ElasticSupervisor(command, 1, policy, run, hosts, connect).run())
"""

# Writes a line for its start, then does what the file `todo-<host>` says: an exit code, a signal
# that kills it (negative), or nothing.
# SIGTERM to one process ends all of the roster with 75, as JAX's preemption service does.
CHILD = """
import os, signal, sys, time
from pathlib import Path
host, index = os.environ["HOST"], os.environ.get("JAX_PROCESS_ID", "0")
address = os.environ["JAX_COORDINATOR_ADDRESS"]
stop = Path(f"stop-{address.rpartition(':')[2]}")
signal.signal(signal.SIGTERM, lambda *_: stop.touch())
with open(f"starts-{host}", "a") as file:
    print(index, os.environ["JAX_NUM_PROCESSES"], address, file=file, flush=True)
while not stop.exists():
    todo = Path(f"todo-{host}")
    if todo.exists():
        code = int(todo.read_text())
        todo.unlink()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
    if Path("finish").exists():
        sys.exit(0)
    time.sleep(0.02)
sys.exit(75)
"""


class Job:
    """A job with a supervisor for each host."""

    def __init__(self, directory, n_hosts, least=1, silent_after=30.0, multiple=1):
        self.directory, self.supervisors = directory, {}
        self.script = directory / "child.py"
        self.script.write_text(CHILD)
        (directory / "checkpoints").mkdir()
        addresses = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(n_hosts)]
        self.options = {
            "addresses": addresses, "least": least, "multiple": multiple, "key": "job",
            "timeout": silent_after, "join_timeout": 60.0, "script": str(self.script),
            "run": str(directory),
        }  # fmt: skip

    def start(self, *hosts):
        for host in hosts:
            options = json.dumps({**self.options, "index": host})
            env = {**os.environ, "PYTHONPATH": str(ROOT), "HOST": str(host)}
            with (self.directory / f"log-{host}").open("ab") as log:
                self.supervisors[host] = subprocess.Popen(
                    [sys.executable, "-c", SUPERVISE, options], cwd=self.directory, env=env,
                    stderr=log, start_new_session=True,
                )  # fmt: skip

    def starts(self, host):
        """Return (index, number of processes, coordinator) of each start of a host."""
        path = self.directory / f"starts-{host}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(i), int(n), address) for i, n, address in map(str.split, lines)]

    def await_roster(self, *hosts):
        """Wait until exactly these hosts run, as processes of one job."""

        def runs():
            latest = [self.starts(host)[-1:] for host in hosts]
            return all(latest) and [(i, n) for ((i, n, _),) in latest] == [
                (i, len(hosts)) for i in range(len(hosts))
            ] and len({address for ((*_, address),) in latest}) == 1  # fmt: skip

        wait_until(runs)

    def save(self, step):
        (self.directory / "checkpoints" / f"step_{step}").mkdir()

    def fail(self, host, code):
        (self.directory / f"todo-{host}").write_text(str(code))

    def kill(self, host):
        """End a host: its supervisor and its processes."""
        self.supervisors[host].kill()
        self.supervisors[host].wait()

    def codes(self, *hosts):
        return [self.supervisors[host].wait(PATIENCE) for host in hosts]

    def log(self, host):
        return (self.directory / f"log-{host}").read_text()


@pytest.fixture
def new_job(tmp_path):
    jobs = []

    def new(*args, **options):
        jobs.append(Job(tmp_path, *args, **options))
        return jobs[-1]

    yield new
    for job in jobs:
        for supervisor in job.supervisors.values():
            supervisor.send_signal(signal.SIGCONT)
            supervisor.kill()
            supervisor.wait()


def test_job_shrinks_twice_grows_again_and_completes(new_job):
    job = new_job(4)
    job.start(0, 1, 2)
    wait_until(lambda: "waiting for host 3: at least 4 hosts" in job.log(0))
    job.start(3)
    job.await_roster(0, 1, 2, 3)
    job.kill(2)
    job.await_roster(0, 1, 3)
    job.kill(0)  # its supervisor led, and process 0 was the coordinator
    job.await_roster(1, 3)
    job.start(2, 0)
    wait_until(lambda: "a host has come" in job.log(1))
    job.save(5)
    job.await_roster(0, 1, 2, 3)
    (job.directory / "finish").touch()
    assert job.codes(0, 1, 2, 3) == [0, 0, 0, 0]
    lines = (job.directory / "supervise.jsonl").read_text().splitlines()
    assert [json.loads(line)["hosts"] for line in lines][:3] == [[0, 1, 2, 3], [0, 1, 3], [1, 3]]


@pytest.mark.slow
def test_stopped_host_is_left_out_and_ends_its_processes_when_it_returns(new_job):
    job = new_job(3, silent_after=1.5)
    job.start(0, 1, 2)
    job.await_roster(0, 1, 2)
    job.supervisors[0].send_signal(signal.SIGSTOP)
    job.await_roster(1, 2)
    job.supervisors[0].send_signal(signal.SIGCONT)
    wait_until(lambda: "hosts 1, 2 continued without this host" in job.log(0))
    wait_until(lambda: "a host has come" in job.log(1))
    job.save(1)
    job.await_roster(0, 1, 2)


def test_host_without_majority_waits(new_job):
    job = new_job(2, silent_after=1.0)
    job.start(0, 1)
    job.await_roster(0, 1)
    job.supervisors[0].send_signal(signal.SIGSTOP)  # as if cut off: it may still run
    wait_until(lambda: "not the majority" in job.log(1))
    assert len(job.starts(1)) == 1
    job.kill(0)
    job.await_roster(1)


@pytest.mark.slow
def test_failed_process_restarts_all_hosts_until_the_limit(new_job):
    job = new_job(2)
    job.start(0, 1)
    for attempt in range(1, 5):
        wait_until(lambda n=attempt: [len(job.starts(host)) for host in (0, 1)] == [n] * 2)
        job.fail(1, 1)
    assert job.codes(0, 1) == [1, 1]
    assert "4 consecutive starts without progress" in job.log(1)


def test_process_killed_by_stop_signal_restarts_all_hosts(new_job):
    job = new_job(2)
    job.start(0, 1)
    job.await_roster(0, 1)
    job.fail(1, -signal.SIGTERM)
    wait_until(lambda: [len(job.starts(host)) for host in (0, 1)] == [2, 2])
    (job.directory / "finish").touch()
    assert job.codes(0, 1) == [0, 0]


def test_host_that_waits_to_join_ends_with_the_job(new_job):
    job = new_job(2)
    job.start(0, 1)
    job.await_roster(0, 1)
    job.kill(1)
    job.await_roster(0)
    job.start(1)
    wait_until(lambda: "a host has come" in job.log(0))
    (job.directory / "finish").touch()  # before the next save
    assert job.codes(0, 1) == [0, 0]


def test_mistake_of_the_user_ends_the_job(new_job):
    job = new_job(2)
    job.start(0, 1)
    job.await_roster(0, 1)
    for host in (0, 1):
        job.fail(host, 2)
    assert job.codes(0, 1) == [2, 2]


def test_preempted_host_leaves_and_the_job_continues(new_job):
    job = new_job(3)
    job.start(0, 1, 2)
    job.await_roster(0, 1, 2)
    job.supervisors[1].terminate()
    job.await_roster(0, 2)
    assert job.codes(1) == [75]
    for host in (0, 2):
        job.supervisors[host].terminate()
    assert job.codes(0, 2) == [75, 75]


def test_agreed_stop_of_all_processes_ends_the_job(new_job):
    job = new_job(2)
    job.start(0, 1)
    job.await_roster(0, 1)
    port = job.starts(0)[-1][2].rpartition(":")[2]
    (job.directory / f"stop-{port}").touch()  # train.exit_interval, say
    assert job.codes(0, 1) == [75, 75]


TRAIN = ["--", "--config", "x.toml"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--elastic"], "requires --peers"),
        (["--elastic", "--peers", "a:1,b:2", "--hosts", "1:3"], "--peers lists 2"),
        (["--elastic", "--peers", "a:1,b:2", "--hosts", "3:2"], "MIN must be at least 1"),
        (["--elastic", "--peers", "a:1,b:2", "--hosts", "many"], "give MIN:MAX"),
        (["--elastic", "--peers", "a,b:2"], "'a' must be the name of a host and a port"),
        (["--elastic", "--peers", "a:1,b:2"], "set --host-index from 0 to 1"),
        (["--elastic", "--peers", "a:1,b:2", "--host-index", "2"], "is 2: set --host-index"),
        (["--elastic", "--engine=ray"], "requires --hosts MIN:MAX"),
        (["--elastic", "--engine=ray", "--hosts=1:2", "--host-resources=GPU"], "give NAME=N"),
        (["--elastic", "--engine=jobset"], "requires --hosts MIN:MAX"),
        (["--elastic", "--engine=jobset", "--hosts=1:2"], "is not the name of a pod"),
    ],
)
def test_mistaken_options_are_explained(options, message):
    with pytest.raises(UserError, match=message):
        main([*options, *TRAIN])


def test_only_training_is_elastic():
    with pytest.raises(UserError, match="supervises `jaxforge train`"):
        main(["--elastic", "--peers", "a:1,b:2", "--host-index", "0", "--", "sleep", "1"])


def test_port_in_use_is_explained(new_job):
    job = new_job(2)
    name, _, port = job.options["addresses"][0].partition(":")
    with socket.create_server((name, int(port))):
        job.start(0)
        assert job.codes(0) == [1]  # a traceback of this script; the command prints the message
    assert "cannot listen at port" in job.log(0)
