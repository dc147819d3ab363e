"""Who may write into a run directory: one job, until it ends, however that comes about."""

import json
import logging
import os
import signal
import subprocess
import threading
import types

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxforge.commands import generate, train
from jaxforge.errors import UserError
from jaxforge.storage import run_lock
from jaxforge.storage.run_lock import RunLock
from jaxforge.training.hooks import Hook
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_SEC", 0.05)
    monkeypatch.setattr(run_lock, "_POLL_SEC", 0.01)
    monkeypatch.setattr(run_lock, "_SETTLE_SEC", 0.0)


def left_behind(directory, **changed):
    """A lock whose holder is this very process, unless something says otherwise."""
    (directory / run_lock.NAME).write_text(json.dumps(run_lock._this_process() | changed))


def holder(directory):
    return json.loads((directory / run_lock.NAME).read_text())


def is_refused(directory):
    with RunLock(directory) as lock:
        try:
            lock.acquire()
        except UserError:
            return True
    return False


def test_second_is_refused_with_the_name_of_the_first_and_goes_ahead_after_it(tmp_path):
    with RunLock(tmp_path / "run") as first:
        first.acquire()
        named = f"in use by process {os.getpid()} on .*, since 20.*remove .*run.lock"
        with RunLock(tmp_path / "run") as second, pytest.raises(UserError, match=named):
            second.acquire()
        assert (tmp_path / "run" / run_lock.NAME).exists()  # the refused one removes nothing
        first.check()
    assert not list((tmp_path / "run").iterdir())
    assert not is_refused(tmp_path / "run")


def test_process_that_was_killed_has_left_it_behind_even_while_nobody_buries_it(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as process:
        its = {"process": process.pid, "began": run_lock._start_time(process.pid)}
        left_behind(tmp_path, **its)
        assert is_refused(tmp_path)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_refused(tmp_path)
    left_behind(tmp_path, **its)
    assert not is_refused(tmp_path)


def test_another_process_may_have_the_number_by_now(tmp_path):
    left_behind(tmp_path, began="1")
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
def test_anonymous_unchanging_lock_is_taken_over(tmp_path, caplog, monkeypatch, content):
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    machine = json.dumps(run_lock._pid_namespace()).encode()
    (tmp_path / run_lock.NAME).write_bytes(content.replace(b"HERE", machine))
    assert run_lock.holder(tmp_path) is None
    assert not is_refused(tmp_path)
    assert "is stale (" in caplog.text


def test_unreadable_lock_that_changes_is_respected(tmp_path, monkeypatch):
    """Another version, or another tool, renews it while this process watches."""
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


def test_another_host_is_known_by_its_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SEC", 0.01)
    with RunLock(tmp_path) as first:
        first.acquire()
        monkeypatch.setattr(run_lock, "_pid_namespace", lambda: "another")
        monkeypatch.setattr(run_lock, "PATIENCE_SEC", 60.0)
        assert is_refused(tmp_path)
    left_behind(tmp_path, machine="a third")  # which is silent
    monkeypatch.setattr(run_lock, "PATIENCE_SEC", 0.05)
    assert not is_refused(tmp_path)


def test_where_the_kernel_shows_no_processes_the_heartbeat_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_pid_namespace", lambda: "")
    left_behind(tmp_path)
    assert not is_refused(tmp_path)


def test_processes_of_another_user_may_be_hidden(tmp_path, monkeypatch):
    left_behind(tmp_path)
    monkeypatch.setattr(run_lock, "_start_time", lambda process: None)
    monkeypatch.setattr(run_lock, "_is_hidden", lambda process: True)
    monkeypatch.setattr(run_lock, "_is_renewed", lambda path: True)
    assert is_refused(tmp_path)


def test_last_writer_wins_a_simultaneous_takeover(tmp_path, monkeypatch):
    left_behind(tmp_path, began="1")
    sleep = types.SimpleNamespace(**vars(run_lock.time))
    sleep.sleep = lambda seconds: left_behind(tmp_path)  # the other one writes
    monkeypatch.setattr(run_lock, "time", sleep)
    assert is_refused(tmp_path)
    assert holder(tmp_path)["process"] == os.getpid()


def test_disk_that_takes_nothing_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        RunLock(tmp_path / "file" / "run") as lock,
        pytest.raises(UserError, match=r"checkpoint\.dir = "),
    ):
        lock.acquire()


@pytest.mark.parametrize("process", [0, 1])
def test_all_processes_of_a_job_share_it_and_hear_the_same(tmp_path, monkeypatch, process):
    broadcasts = []

    def broadcast(page):
        """Broadcast of process 0, which refuses here."""
        broadcasts.append(page)
        reported = np.zeros_like(page)
        reported[:6] = np.frombuffer("in üse".encode()[:6], np.uint8)
        return reported if process else page

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
    left_behind(tmp_path)
    with RunLock(tmp_path) as lock, pytest.raises(UserError, match=r"in use by|in üs"):
        lock.acquire()
    assert len(broadcasts) == 1
    assert holder(tmp_path)["process"] == os.getpid()


def config(directory, dim=64, load_path=None):
    return tiny_config(
        model={"dim": dim}, distributed={"dp_shard": -1}, train={"max_steps": 3, "batch_size": 1},
        data={"tokenizer_path": "byte"},
        checkpoint={"dir": str(directory), "interval": 2, "load_path": load_path},
    )  # fmt: skip


def contents(directory):
    files = [path for path in directory.rglob("*") if path.is_file() and path.parent.name != "logs"]
    return {path.relative_to(directory): path.read_bytes() for path in files}


def test_resume_that_is_refused_leaves_the_run_as_it_was(tmp_path):
    train.run(config(tmp_path))
    before = contents(tmp_path)
    assert "config.toml" in map(str, before)
    with pytest.raises(UserError, match="does not fit"):
        train.run(config(tmp_path, dim=32))
    assert contents(tmp_path) == before
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")  # the first start is no different
    for name in ("config.toml", "schedule_summary.txt", "tokenizer/tokenizer.json"):
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer").rmdir()
    before = contents(tmp_path)
    with pytest.raises(UserError, match="no checkpoint"):
        train.run(config(tmp_path, load_path=str(tmp_path / "none")))
    assert contents(tmp_path) == before


class TakesOver(Hook):
    """Another job writes its name into the lock, in the middle of a run."""

    def __init__(self, directory):
        self._directory = directory

    def on_step_end(self, context):
        if context.step == 1:
            (heart,) = [item for item in threading.enumerate() if item.name == "run.lock"]
            left_behind(self._directory, host="node7", process=42)
            heart.join()  # it ends as soon as it has seen that, perhaps before this line


def test_run_that_was_taken_over_ends_and_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SEC", 0.01)
    with pytest.raises(UserError, match="taken over by process 42 on node7"):
        train.run(config(tmp_path), [TakesOver(tmp_path)])
    assert not list((tmp_path / "checkpoints").glob("step_*"))
    assert holder(tmp_path)["host"] == "node7"


def test_run_is_refused_where_another_is_under_way_and_readers_are_not(tmp_path):
    train.run(config(tmp_path))
    with RunLock(tmp_path) as other:
        other.acquire()
        before = contents(tmp_path)
        with pytest.raises(UserError, match="in use by process"):
            train.run(config(tmp_path))
        assert contents(tmp_path) == before
        assert generate.main([str(tmp_path), "--prompt=a", "--max-tokens=1"]) == 0
