"""Agreement of a job's processes about their saves, with one process and scripted peers."""

import errno
import logging
import socket
import threading

import jax
import numpy as np
import pytest

from jaxforge.checkpoint import failures
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.orbax_manager import manager_options
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.errors import JobStorageError, PeerLostError
from tests.conftest import tiny_config
from tests.helpers import setup

WAITS, READY, FAILED = 0, 1, 2
BROKEN = "Gloo AllGather failed: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.fixture
def others(monkeypatch):
    """Scripted contributions of another process, and recorded contributions of this one."""
    answers, mine = [], []

    def process_allgather(array):
        mine.append(np.array(array))
        return np.stack([array, answers.pop(0)])

    monkeypatch.setattr(failures.multihost_utils, "process_allgather", process_allgather)
    monkeypatch.setattr(failures.time, "sleep", lambda seconds: None)
    return answers, mine


def test_await_all_waits_for_every_process(others):
    answers, mine = others
    answers += map(np.int32, [READY, WAITS, READY])
    ready = iter([False, True, True])
    failures.await_all(lambda: next(ready), lambda: "")
    assert [int(state) for state in mine] == [WAITS, READY, READY]
    assert not answers


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        ("", "process 1 on b: full", "process 1 on b: full"),
        ("full: /x", "", f"process 0 on {socket.gethostname()}: full: /x"),
        ("full: /x", "process 1 on b: gone", f"process 0 on {socket.gethostname()}: full: /x; "
                                             "process 1 on b: gone"),
    ],
)  # fmt: skip
def test_await_all_raises_messages_of_failed_processes(others, own, other, message):
    answers, _ = others
    answers += [np.int32(WAITS), np.int32(FAILED if other else READY)]
    own_text = f"process 0 on {socket.gethostname()}: {own}" if own else ""
    padded = other.ljust(max(len(own_text), len(other)) + 1, "\0")
    answers += [np.array([len(other)], np.int32), np.frombuffer(padded.encode(), np.uint8)]
    own_failures = iter(["", own])
    with pytest.raises(JobStorageError) as failure:
        failures.await_all(lambda: True, lambda: next(own_failures))
    assert str(failure.value) == message


def test_watch_failures_reports_errors_logged_by_orbax(tmp_path):
    noted, log = [], logging.getLogger("absl")
    full = OSError(errno.ENOSPC, "No space left on device")
    with failures.watch_failures(tmp_path / "a", noted.append):
        for where, error in (("b", OSError()), ("aa", OSError()), ("a", full)):
            try:
                raise error
            except OSError:
                log.exception(
                    "Failed to run 3 Commit operations, directory: %s/step_5", tmp_path / where
                )
        log.error("another message about %s/step_5", tmp_path / "a")
    log.error("too late: %s/step_5", tmp_path / "a", exc_info=full)
    assert noted == [full]


@pytest.mark.parametrize("count", [1, 2])
def test_each_directory_has_its_own_barriers(tmp_path, monkeypatch, count):
    monkeypatch.setattr(jax, "process_count", lambda: count)
    section = CheckpointConfig()
    every = manager_options(tmp_path, section, lambda metrics: 0.0, read_only=False)
    options = every.multiprocessing_options
    assert options.active_processes == (None if count == 1 else {0, 1})
    assert options.barrier_sync_key_prefix == (None if count == 1 else str(tmp_path))


@pytest.mark.parametrize("error", [ValueError, jax.errors.JaxRuntimeError])
def test_save_with_lost_process_raises_peer_lost(tmp_path, monkeypatch, error):
    """The exit code is then 134, with which the job is restarted, and not 74."""

    def lose(_):
        raise error(BROKEN)

    program = setup(tiny_config())
    saved = Checkpoints(tmp_path, program.config.checkpoint, program.model.axes)
    thread, may_end = threading.Thread(target=lambda: may_end.wait()), threading.Event()
    thread.start()
    saved._thread = thread
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(failures.multihost_utils, "process_allgather", lose)
    try:
        with pytest.raises(PeerLostError, match="process 1 of the job is gone"):
            saved.wait()
        with pytest.raises(PeerLostError, match="process 1 of the job is gone"):
            saved.close(together=False)  # does not wait: the save waits for the lost process
        assert thread.is_alive()
    finally:
        may_end.set()


@pytest.mark.parametrize("error", [ValueError, jax.errors.JaxRuntimeError])
def test_restore_with_lost_process_raises_peer_lost(tmp_path, monkeypatch, error):
    def lose(*_, **__):
        raise error(BROKEN)

    program = setup(tiny_config())
    saved = Checkpoints(tmp_path, program.config.checkpoint, program.model.axes)
    monkeypatch.setattr(saved._manager, "restore", lose)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(PeerLostError, match="process 1 of the job is gone"):
        saved.progress(1)
    monkeypatch.undo()
    saved.close()
