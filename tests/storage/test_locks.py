"""Run locks in buckets."""

import time

import pytest

from jaxforge.errors import UserError
from jaxforge.storage import run_lock, urls
from jaxforge.storage.run_lock import RunLock


def test_bucket_lock_is_held_by_heartbeat(bucket, monkeypatch):
    run = urls.path(f"{bucket}/run")
    monkeypatch.setattr(run_lock, "BEAT_SEC", 0.2)
    monkeypatch.setattr(run_lock, "PATIENCE_SEC", 60.0)
    with RunLock(run) as first:
        first.take()
        # The kernel cannot decide.
        monkeypatch.setattr(run_lock, "pid_namespace", lambda: "elsewhere")
        with pytest.raises(UserError, match="is in use by process"):
            RunLock(run).take()
        time.sleep(0.5)
        first.check()
    assert not (run / run_lock.NAME).exists()


def test_stale_bucket_lock_is_taken_over(bucket, monkeypatch):
    run = urls.path(f"{bucket}/run")
    monkeypatch.setattr(run_lock, "PATIENCE_SEC", 0.5)
    (run / run_lock.NAME).write_text("{}")
    with RunLock(run) as lock:
        lock.take()
        lock.check()
