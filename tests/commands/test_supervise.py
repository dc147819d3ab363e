"""The supervisor, on small scripts that end as they are told to."""

import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxforge.commands import supervise
from jaxforge.commands.supervise import Policy, main, run_directory
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from tests.machine import PATIENCE, wait_until

ROOT = Path(__file__).parents[1]
QUICK = ["--backoff=0.02", "--backoff-cap=0.1", "--peer-grace=0.5"]


class Child:
    """A script, run in a scratch directory, where each start leaves a file."""

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
        """A supervisor in a process of its own, to be sent signals."""
        return subprocess.Popen(
            [sys.executable, "-m", "jaxforge.supervise", *QUICK, *options, *self.command(body)],
            cwd=self.directory, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stderr=subprocess.PIPE,
        )  # fmt: skip


@pytest.fixture
def child(tmp_path, monkeypatch):
    return Child(tmp_path, monkeypatch)


def gone(pid):
    """Return whether a process has ended, also as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("code", [0, 2, 65, 74, 75, 130])
def test_codes_that_end_it(child, code):
    assert main([*QUICK, *child.command(f"sys.exit({code})")]) == code
    assert child.starts() == 1


@pytest.mark.parametrize(
    "how", ["sys.exit(1)", "sys.exit(70)", "os.abort()", "os.kill(os.getpid(), 9)"]
)
def test_failures_are_run_again_until_it_succeeds(child, how):
    assert main([*QUICK, *child.command(f"{how} if start < 3 else sys.exit(0)")]) == 0
    assert child.starts() == 4


@pytest.mark.parametrize("codes", [[], [75]])
def test_time_limit_of_a_job_is_that_of_all_its_starts(child, codes):
    """But not of starts that follow the limit, where these are asked for."""
    body = "print(os.environ.get('JAXFORGE_BEGAN'), file=open('began', 'a'))\nsys.exit(start < 1)\n"
    options = [f"--restart-on={code}" for code in codes]
    assert main([*QUICK, *options, *child.command(body)]) == 0
    first, second = (child.directory / "began").read_text().split()
    assert first == second
    assert (first == "None") is bool(codes)


def test_other_codes_on_request(child):
    body = "sys.exit([75, 74, 0][start])"
    assert main([*QUICK, "--restart-on=75", "--restart-on=74", *child.command(body)]) == 0
    assert child.starts() == 3


def test_restarts_without_progress_are_bounded(child, caplog):
    caplog.set_level("INFO", "jaxforge.supervise")
    assert main([*QUICK, "--max-restarts=2", *child.command("sys.exit(70)")]) == 70
    assert child.starts() == 3
    assert caplog.text.count("the command ended with 70: hung: the watchdog saw no progress") == 3
    assert "3 consecutive starts without progress, --max-restarts 2: exit code 70" in caplog.text


def test_newer_checkpoint_starts_the_count_anew(child, monkeypatch):
    """Starts 0, 1, 2 and 4 leave a checkpoint; start 3 does not, nor do those after 4."""
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


def test_log_that_cannot_be_written_stops_nothing(child, monkeypatch, caplog):
    (child.directory / "supervise.jsonl").mkdir()
    monkeypatch.setattr(supervise, "run_directory", lambda command: child.directory)
    assert main([*QUICK, *child.command("sys.exit(1 if start == 0 else 0)")]) == 0
    assert "supervise.jsonl: Is a directory" in caplog.text


def test_waits_double_up_to_a_cap():
    policy = Policy(10, backoff=5, backoff_cap=60, grace=1, peer_grace=1)
    assert [policy.delay(n) for n in range(1, 7)] == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize(
    ("sig", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_signal_is_passed_on_and_the_code_is_the_childs(child, sig, code):
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


def test_child_that_could_not_yet_listen_was_stopped_too(child):
    supervisor = child.supervise(body="time.sleep(3600)")
    child.pid("started-0-0")
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(PATIENCE) == 75


def test_child_that_does_not_listen_is_killed_with_what_it_started(child):
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
    wait_until(lambda: gone(worker))


def test_signal_while_it_waits_ends_it(child):
    supervisor = child.supervise("--backoff=3600", "--backoff-cap=3600", body="sys.exit(1)")
    while "restarting in" not in supervisor.stderr.readline():
        assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(PATIENCE) == 75
    assert child.starts() == 1


def test_children_of_a_failed_process_end_before_restart(child):
    body = (
        "worker = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(3600)'])\n"
        "Path(f'worker-{start}').write_text(str(worker.pid))\n"
        "sys.exit(1 if start == 0 else 0)"
    )
    assert main([*QUICK, *child.command(body)]) == 0
    for name in ("worker-0", "worker-1"):
        wait_until(lambda name=name: gone(child.pid(name)))


def test_nothing_outlives_a_supervisor_that_is_killed(child):
    supervisor = child.supervise(body="Path('ready').write_text('1')\ntime.sleep(3600)")
    pid = child.pid("started-0-0")
    child.pid("ready")
    supervisor.kill()
    wait_until(lambda: gone(pid))


def test_several_processes_find_one_another_and_fail_together(child):
    """Process 1 fails at first; process 0, which would never end, is ended, and both run again."""
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


def test_first_failure_speaks_for_all(child):
    body = (
        "if index == '1': sys.exit(2)\n"
        "first = Path('started-1-0')\n"
        "while not (first.exists() and first.read_text()): time.sleep(0.01)\n"
        "while Path('/proc', first.read_text()).exists(): time.sleep(0.01)\n"
        "os.abort()"
    )
    assert main([*QUICK, "--nproc=2", *child.command(body)]) == 2
    assert child.starts() == 1


def test_loss_of_another_process_is_no_cause(child):
    """Process 0 notices that process 1 dies, and its end is seen first."""
    body = (
        "if index == '0': sys.exit(134)\n"
        "first = Path('started-0-0')\n"
        "while not (first.exists() and first.read_text()): time.sleep(0.01)\n"
        "while Path('/proc', first.read_text()).exists(): time.sleep(0.01)\n"
        "sys.exit(2)"
    )
    assert main([*QUICK, "--nproc=2", *child.command(body)]) == 2
    assert child.starts() == 1


def test_end_by_the_supervisor_is_no_cause():
    group = supervise.Group([], 0, queue.SimpleQueue(), {})
    group._running, group.codes = {0: None, 1: None}, [None, None]
    group.ended(supervise.Ended(0, Exit.ABORTED.code))
    group._running.clear()
    group.kill()
    group._running[1] = None
    group.ended(supervise.Ended(1, 137))
    assert group.code == Exit.ABORTED.code


def test_processes_that_agreed_to_end_have_time(child):
    body = "time.sleep(0.5) if index == '0' else None\nPath(f'end-{index}').touch()\nsys.exit(75)"
    assert main([*QUICK, "--peer-grace=0.1", "--nproc=2", *child.command(body)]) == 75
    assert (child.directory / "end-0").exists()


def test_command_that_is_not_there():
    with pytest.raises(UserError, match="cannot run /nowhere/python: No such file"):
        main(["--", "/nowhere/python"])


def test_no_command():
    with pytest.raises(UserError, match="a command is required"):
        main(["--max-restarts=3"])


def test_run_directory_is_that_of_the_config(tmp_path):
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
