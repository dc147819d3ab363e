"""Run locks on local file systems."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import types

import pytest

from jaxforge.commands import generate
from jaxforge.errors import UserError
from jaxforge.storage import run_lock
from jaxforge.storage.run_lock import RunLock
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from tests.conftest import tiny_config
from tests.machine import wait_until

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_SEC", 0.05)
    monkeypatch.setattr(run_lock, "POLL_SEC", 0.01)
    monkeypatch.setattr(run_lock, "SETTLE_SEC", 0.0)


def write_stale_lock(directory, **changed):
    """Write a lock held by this process, with changed fields."""
    (directory / run_lock.NAME).write_text(json.dumps(run_lock.this_process() | changed))


def holder(directory):
    return json.loads((directory / run_lock.NAME).read_text())


def is_refused(directory):
    with RunLock(directory) as lock:
        try:
            lock.take()
        except UserError:
            return True
    return False


def test_second_job_is_refused_until_first_ends(tmp_path):
    with RunLock(tmp_path / "run") as first:
        first.take()
        named = f"in use by process {os.getpid()} on .*, since 20.*remove .*run.lock"
        with RunLock(tmp_path / "run") as second, pytest.raises(UserError, match=named):
            second.take()
        assert (tmp_path / "run" / run_lock.NAME).exists()  # the refused job removes nothing
        first.check()
    assert not list((tmp_path / "run").iterdir())
    assert not is_refused(tmp_path / "run")


def test_later_roster_of_an_elastic_job_takes_the_lock_of_a_live_process(tmp_path, monkeypatch):
    def lock(roster):
        monkeypatch.setenv("JAXFORGE_ROSTER", roster)
        return RunLock(tmp_path)

    monkeypatch.setattr(run_lock, "BEAT_SEC", 0.01)
    first, other, earlier, later = map(lock, ("job 4", "other 5", "job 4", "job 5"))
    with first, later:
        first.take()  # this process is alive
        for refused in (other, earlier):
            with pytest.raises(UserError, match="in use by process"):
                refused.take()
        later.take()
        wait_until(lambda: first._is_lost)
        with pytest.raises(UserError, match="taken over"):
            first.check()
        later.check()


def test_lock_of_zombie_process_is_stale(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as process:
        identity = {"process": process.pid, "began": run_lock.process_start_time(process.pid)}
        write_stale_lock(tmp_path, **identity)
        assert is_refused(tmp_path)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_refused(tmp_path)
    write_stale_lock(tmp_path, **identity)
    assert not is_refused(tmp_path)


def test_reused_pid_does_not_hold_lock(tmp_path):
    write_stale_lock(tmp_path, began="1")
    assert not is_refused(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b'{"process": 1', b'{"machine": "elsewhere"}', b"\xff\xfe", b"\0" * 300,
        b'{"machine": HERE}', b'{"machine": HERE, "process": "7", "began": "1"}',
        b'{"machine": HERE, "process": -1, "began": "1"}', b'{"machine": HERE, "process": 1}',
        b'{"machine": HERE, "process": 1e300, "began": "1"}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_unnamed_lock_without_heartbeat_is_taken_over(tmp_path, caplog, monkeypatch, content):
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    machine = json.dumps(run_lock.pid_namespace()).encode()
    (tmp_path / run_lock.NAME).write_bytes(content.replace(b"HERE", machine))
    assert run_lock.holder(tmp_path) is None
    assert not is_refused(tmp_path)
    assert "is stale (" in caplog.text


def test_unreadable_lock_that_changes_is_respected(tmp_path, monkeypatch):
    """Another version or tool renews the lock during the watch."""
    path = tmp_path / run_lock.NAME
    path.write_bytes(b"\xff")
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: os.utime(path, (1, 1)))
    with (
        RunLock(tmp_path) as lock,
        pytest.raises(
            UserError,
            match=r"an unknown process \(not "
            r"named",
        ),
    ):
        lock.take()
    assert path.read_bytes() == b"\xff"


def test_lock_of_other_host_is_held_by_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SEC", 0.01)
    with RunLock(tmp_path) as first:
        first.take()
        monkeypatch.setattr(run_lock, "pid_namespace", lambda: "another")
        monkeypatch.setattr(run_lock, "PATIENCE_SEC", 60.0)
        assert is_refused(tmp_path)
    write_stale_lock(tmp_path, machine="a third")  # without heartbeat
    monkeypatch.setattr(run_lock, "PATIENCE_SEC", 0.05)
    assert not is_refused(tmp_path)


def test_heartbeat_decides_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "pid_namespace", lambda: "")
    write_stale_lock(tmp_path)
    assert not is_refused(tmp_path)


def test_hidden_process_of_other_user_holds_lock(tmp_path, monkeypatch):
    write_stale_lock(tmp_path)
    monkeypatch.setattr(run_lock, "process_start_time", lambda process: None)
    monkeypatch.setattr(run_lock, "is_hidden", lambda process: True)
    monkeypatch.setattr(run_lock, "is_renewed", lambda path: True)
    assert is_refused(tmp_path)


def test_last_writer_wins_a_simultaneous_takeover(tmp_path, monkeypatch):
    write_stale_lock(tmp_path, began="1")
    sleep = types.SimpleNamespace(**vars(run_lock.time))
    sleep.sleep = lambda seconds: write_stale_lock(tmp_path)  # the other process writes
    monkeypatch.setattr(run_lock, "time", sleep)
    assert is_refused(tmp_path)
    assert holder(tmp_path)["process"] == os.getpid()


def test_unwritable_directory_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with (
        RunLock(tmp_path / "file" / "run") as lock,
        pytest.raises(UserError, match=r"checkpoint\.dir = "),
    ):
        lock.take()


def config(directory, dim=64, load_path=None):
    return tiny_config(
        model={"dim": dim}, distributed={"dp_shard": -1}, train={"max_steps": 3, "batch_size": 1},
        data={"tokenizer_path": "byte"},
        checkpoint={"dir": str(directory), "interval": 2, "load_path": load_path},
    )  # fmt: skip


def contents(directory):
    files = [path for path in directory.rglob("*") if path.is_file() and path.parent.name != "logs"]
    return {path.relative_to(directory): path.read_bytes() for path in files}


def test_refused_resume_leaves_run_unchanged(tmp_path):
    launch.fit(config(tmp_path))
    before = contents(tmp_path)
    assert "config.toml" in map(str, before)
    with pytest.raises(UserError, match="does not fit"):
        launch.fit(config(tmp_path, dim=32))
    assert contents(tmp_path) == before
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")  # the first start behaves the same
    for name in ("config.toml", "schedule_summary.txt", "tokenizer/tokenizer.json"):
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer").rmdir()
    before = contents(tmp_path)
    with pytest.raises(UserError, match="no checkpoint"):
        launch.fit(config(tmp_path, load_path=str(tmp_path / "none")))
    assert contents(tmp_path) == before


class TakeOver(Callback):
    """Overwrite the lock in the middle of a run."""

    def __init__(self, directory):
        self._directory = directory

    def on_step_end(self, context):
        if context.step == 1:
            threads = [item for item in threading.enumerate() if item.name == "run.lock"]
            write_stale_lock(self._directory, host="node7", process=42)
            threads[-1].join()  # the newest; the run may end before this line


def test_run_without_lock_ends_without_saving(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SEC", 0.01)
    with pytest.raises(UserError, match="taken over by process 42 on node7"):
        launch.fit(config(tmp_path), [TakeOver(tmp_path)])
    assert not list((tmp_path / "checkpoints").glob("step_*"))
    assert holder(tmp_path)["host"] == "node7"


def test_active_run_refuses_jobs_but_not_readers(tmp_path):
    launch.fit(config(tmp_path))
    with RunLock(tmp_path) as other:
        other.take()
        before = contents(tmp_path)
        with pytest.raises(UserError, match="in use by process"):
            launch.fit(config(tmp_path))
        assert contents(tmp_path) == before
        assert generate.main([str(tmp_path), "--prompt=a", "--max-tokens=1"]) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts a disk")
def test_full_disk_is_a_storage_failure(tmp_path):
    """A lock on a full disk ends with 74, as a save does: the supervisor may wait for space."""
    mount = f"mount -t tmpfs -o size=4k tmpfs {tmp_path} && head -c 4096 /dev/zero > {tmp_path}/all"
    code = "from pathlib import Path; from jaxforge.storage.run_lock import RunLock; import sys\n"
    code += "try: RunLock(Path(sys.argv[1])).take()\nexcept OSError as error: print(error)"
    command = f'{mount} && exec "$0" -c "$1" "$2"'
    namespace = ["unshare", "-rm", "sh", "-c"]
    if subprocess.run([*namespace, f"mount -t tmpfs tmpfs {tmp_path}"]).returncode:
        pytest.skip("this user may not mount")
    ran = subprocess.run([*namespace, command, sys.executable, code, tmp_path],
                         capture_output=True, text=True)  # fmt: skip
    assert ran.stdout == f"checkpoint.dir = {tmp_path}: No space left on device\n", ran.stderr
