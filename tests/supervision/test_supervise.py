"""Supervisor of small scripts with given exit codes."""

import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxforge.commands import supervise
from jaxforge.commands.supervise import main, run_directory
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.supervision.processes import Ended, Group
from jaxforge.supervision.supervisor import Policy
from tests.machine import PATIENCE, wait_until

ROOT = Path(__file__).parents[1]
QUICK = ["--backoff=0.02", "--backoff-cap=0.1", "--peer-grace=0.5"]


class Child:
    """A script in a temporary directory, where each start creates a file."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        monkeypatch.chdir(directory)

    def command(self, body):
        script = self.directory / "child.py"
        script.write_text(
            "import os, signal, subprocess, sys, time\n"
            "from pathlib import Path\n"
            "index = os.environ.get('JAX_PROCESS_ID', '0')\n"
            "start = len(list(Path('.').glob(f'started-{index}-*')))\n"
            "Path(f'started-{index}-{start}').write_text(str(os.getpid()))\n" + body
        )
        return ["--", sys.executable, "-S", str(script)]

    def starts(self, index=0):
        return len(list(self.directory.glob(f"started-{index}-*")))

    def pid(self, name):
        wait_until(lambda: (self.directory / name).exists() and (self.directory / name).read_text())
        return int((self.directory / name).read_text())

    def supervise(self, *options, body):
        """Start a supervisor as a process that receives signals."""
        return subprocess.Popen(
            [sys.executable, "-m", "jaxforge", "supervise", *QUICK, *options, *self.command(body)],
            cwd=self.directory, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stderr=subprocess.PIPE,
        )  # fmt: skip


@pytest.fixture
def child(tmp_path, monkeypatch):
    return Child(tmp_path, monkeypatch)


def has_ended(pid):
    """Return whether a process has ended, including zombies."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("code", [0, 2, 65, 74, 75, 130])
def test_final_exit_codes_end_supervisor(child, code):
    assert main([*QUICK, *child.command(f"sys.exit({code})")]) == code
    assert child.starts() == 1


@pytest.mark.parametrize(
    "how", ["sys.exit(1)", "sys.exit(70)", "os.abort()", "os.kill(os.getpid(), 9)"]
)
def test_failures_restart_until_success(child, how):
    assert main([*QUICK, *child.command(f"{how} if start < 3 else sys.exit(0)")]) == 0
    assert child.starts() == 4


@pytest.mark.parametrize("codes", [[], [75]])
def test_time_limit_covers_all_starts(child, codes):
    """Starts after the limit, if requested, get a new limit."""
    body = "print(os.environ.get('JAXFORGE_BEGAN'), file=open('began', 'a'))\nsys.exit(start < 1)\n"
    options = [f"--restart-on={code}" for code in codes]
    assert main([*QUICK, *options, *child.command(body)]) == 0
    first, second = (child.directory / "began").read_text().split()
    assert first == second
    assert (first == "None") is bool(codes)


def test_further_exit_codes_restart_on_request(child):
    body = "sys.exit([75, 74, 0][start])"
    assert main([*QUICK, "--restart-on=75", "--restart-on=74", *child.command(body)]) == 0
    assert child.starts() == 3


def test_restarts_without_progress_are_bounded(child, caplog):
    caplog.set_level("INFO", "jaxforge.supervise")
    assert main([*QUICK, "--max-restarts=2", *child.command("sys.exit(70)")]) == 70
    assert child.starts() == 3
    assert caplog.text.count("the command ended with 70: hung: no progress") == 3
    assert "3 consecutive starts without progress, --max-restarts 2: exit code 70" in caplog.text


def test_newer_checkpoint_resets_restart_count(child, monkeypatch):
    """Starts 0, 1, 2 and 4 write a checkpoint; other starts do not."""
    run = child.directory / "run"
    monkeypatch.setattr(supervise, "run_directory", lambda command: run)
    body = (
        "checkpoints = Path('run/checkpoints')\n"
        "if start in (0, 1, 2, 4): (checkpoints / f'step_{start * 5}').mkdir(parents=True)\n"
        "(checkpoints / f'step_99.orbax-checkpoint-tmp-1').mkdir(exist_ok=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert main([*QUICK, "--max-restarts=2", *child.command(body)]) == 137
    assert child.starts() == 7
    lines = [json.loads(line) for line in (run / "supervise.jsonl").read_text().splitlines()]
    assert [line["steps"] for line in lines] == [
        [-1, 0], [0, 5], [5, 10], [10, 10], [10, 20], [20, 20], [20, 20],
    ]  # fmt: skip
    assert [line["again_in_sec"] is None for line in lines] == [False] * 6 + [True]
    assert lines[0]["codes"] == [137]
    assert lines[0]["meaning"] == "killed by SIGKILL"


def test_unwritable_log_does_not_stop_supervisor(child, monkeypatch, caplog):
    (child.directory / "supervise.jsonl").mkdir()
    monkeypatch.setattr(supervise, "run_directory", lambda command: child.directory)
    assert main([*QUICK, *child.command("sys.exit(1 if start == 0 else 0)")]) == 0
    assert "supervise.jsonl: Is a directory" in caplog.text


def test_backoff_doubles_up_to_cap():
    policy = Policy(10, backoff=5, backoff_cap=60, grace=1, peer_grace=1)
    assert [policy.delay(n) for n in range(1, 7)] == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize(
    ("sig", "code"), [(signal.SIGHUP, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_signal_is_forwarded_and_child_code_returned(child, sig, code):
    body = (
        f"signal.signal({sig.value}, lambda *_: sys.exit({code}))\n"
        "Path('ready').write_text(str(os.getpid()))\ntime.sleep(3600)"
    )
    supervisor = child.supervise(body=body)
    child.pid("ready")
    supervisor.send_signal(sig)
    assert supervisor.wait(PATIENCE) == code
    assert child.starts() == 1
    assert f"{sig.name}: forwarded" in supervisor.stderr.read()


def test_child_killed_by_early_signal_counts_as_stopped(child):
    supervisor = child.supervise(body="time.sleep(3600)")
    child.pid("started-0-0")
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(PATIENCE) == 75


def test_stop_signal_to_child_alone_counts_as_stop(child):
    """A scheduler signals all processes; the supervisor may hear of the child's end first."""
    assert main([*QUICK, *child.command("os.kill(os.getpid(), signal.SIGTERM)")]) == 75
    assert child.starts() == 1


def test_unresponsive_child_is_killed_with_its_children(child):
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "worker = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(3600)'])\n"
        "Path('worker').write_text(str(worker.pid))\ntime.sleep(3600)"
    )
    supervisor = child.supervise("--grace=0.2", body=body)
    worker = child.pid("worker")
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(PATIENCE) == 137
    assert child.starts() == 1
    wait_until(lambda: has_ended(worker))


def test_signal_during_backoff_ends_supervisor(child):
    supervisor = child.supervise("--backoff=3600", "--backoff-cap=3600", body="sys.exit(1)")
    while "restarting in" not in supervisor.stderr.readline():
        assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(PATIENCE) == 75
    assert child.starts() == 1


def test_signal_that_does_not_interrupt_a_wait_ends_supervisor():
    """Another thread receives the signal, which has the effect of one just before the wait."""
    script = """
import signal, sys, threading
from jaxforge.commands import supervise

def receive():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    threading.Event().wait()

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
threading.Thread(target=receive, daemon=True).start()
fails = [sys.executable, "-S", "-c", "raise SystemExit(1)"]
sys.exit(supervise.main(["--backoff=3600", "--backoff-cap=3600", "--", *fails]))
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    while "restarting in" not in supervisor.stderr.readline():
        assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(PATIENCE) == 75


def test_children_of_a_failed_process_end_before_restart(child):
    body = (
        "worker = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(3600)'])\n"
        "Path(f'worker-{start}').write_text(str(worker.pid))\n"
        "sys.exit(1 if start == 0 else 0)"
    )
    assert main([*QUICK, *child.command(body)]) == 0
    for name in ("worker-0", "worker-1"):
        wait_until(lambda name=name: has_ended(child.pid(name)))


def test_children_end_when_supervisor_is_killed(child):
    supervisor = child.supervise(body="Path('ready').write_text('1')\ntime.sleep(3600)")
    pid = child.pid("started-0-0")
    child.pid("ready")
    supervisor.kill()
    wait_until(lambda: has_ended(pid))


def test_processes_connect_and_fail_together(child):
    """Process 1 fails once; the endless process 0 is stopped, and both restart."""
    body = (
        "names = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_LOCAL_DEVICE_IDS')\n"
        "Path(f'env-{index}-{start}').write_text(' '.join(os.environ[n] for n in names))\n"
        "if start: sys.exit(0)\n"
        "time.sleep(3600) if index == '0' else sys.exit(70)"
    )
    assert main([*QUICK, "--nproc=2", *child.command(body)]) == 0
    assert [child.starts(0), child.starts(1)] == [2, 2]
    (host, *remaining), (other, *rest_of_other) = (
        (child.directory / f"env-{index}-1").read_text().split() for index in (0, 1)
    )
    assert host == other
    assert host.startswith("127.0.0.1:")
    assert [remaining, rest_of_other] == [["2", "0"], ["2", "1"]]


def test_first_failure_determines_exit_code(child):
    body = (
        "if index == '1': sys.exit(2)\n"
        "first = Path('started-1-0')\n"
        "while not (first.exists() and first.read_text()): time.sleep(0.01)\n"
        "while Path('/proc', first.read_text()).exists(): time.sleep(0.01)\n"
        "os.abort()"
    )
    assert main([*QUICK, "--nproc=2", *child.command(body)]) == 2
    assert child.starts() == 1


def test_loss_of_peer_is_not_the_cause(child):
    """Process 0 detects the death of process 1 and ends first."""
    body = (
        "if index == '0': sys.exit(134)\n"
        "first = Path('started-0-0')\n"
        "while not (first.exists() and first.read_text()): time.sleep(0.01)\n"
        "while Path('/proc', first.read_text()).exists(): time.sleep(0.01)\n"
        "sys.exit(2)"
    )
    assert main([*QUICK, "--peer-grace=60", "--nproc=2", *child.command(body)]) == 2
    assert child.starts() == 1


def test_kill_by_supervisor_is_not_the_cause():
    group = Group([], [], queue.SimpleQueue())
    group._running, group.codes = {0: None, 1: None}, [None, None]
    group.ended(Ended(0, Exit.ABORTED.code))
    group._running.clear()
    group.kill()
    group._running[1] = None
    group.ended(Ended(1, 137))
    assert group.code == Exit.ABORTED.code


def test_agreed_exit_gets_no_peer_deadline(child):
    body = "time.sleep(0.5) if index == '0' else None\nPath(f'end-{index}').touch()\nsys.exit(75)"
    assert main([*QUICK, "--peer-grace=0.1", "--nproc=2", *child.command(body)]) == 75
    assert (child.directory / "end-0").exists()


def test_missing_command_is_refused():
    with pytest.raises(UserError, match="cannot run /nowhere/python: No such file"):
        main(["--", "/nowhere/python"])


def test_empty_command_is_refused():
    with pytest.raises(UserError, match="a command is required"):
        main(["--max-restarts=3"])


def test_run_directory_comes_from_config(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("[checkpoint]\ndir = 'a'\n")
    train = ["python", "-m", "jaxforge.train"]
    assert run_directory([*train, "--config", str(config), "--train.seed=1"]) == Path("a")
    assert run_directory([*train, f"--config={config}", "--checkpoint.dir=b"]) == Path("b")
    assert run_directory(["/bin/jaxforge", "train", f"--config={config}"]) == Path("a")
    assert run_directory(["python", "other.py"]) is None
    assert run_directory(["jaxforge", "report", "a"]) is None
    with pytest.raises(UserError, match=r"train\.sed"):
        run_directory([*train, f"--config={config}", "--train.sed=1"])
