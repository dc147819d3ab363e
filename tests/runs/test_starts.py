"""Starts recorded in a run directory."""

import json
import logging
import sys

import pytest

from jaxforge.errors import StorageError, UserError
from jaxforge.runs import run_directory, starts
from tests.conftest import tiny_config


def test_each_start_appends_line(tmp_path, monkeypatch):
    monkeypatch.setattr(starts.sys, "argv", ["/usr/bin/jaxforge", "--train.seed=1"])
    monkeypatch.setattr(starts.sys.modules["__main__"], "__spec__", None, raising=False)
    starts.note(tmp_path, 0, parameters=7)
    monkeypatch.setattr(starts.sys.modules["__main__"], "__spec__", starts.json.__spec__)
    starts.note(tmp_path, 50, parameters=7)
    first, second = starts.read(tmp_path)
    assert (first["step"], second["step"], first["parameters"]) == (0, 50, 7)
    assert first["command"] == "jaxforge train --train.seed=1"
    assert second["command"] == "python -m json --train.seed=1"
    assert set(first) == {"step", "time", "command", "versions", "git", "parameters"}
    assert first["time"] <= second["time"]
    assert {"python", "jax", "numpy"} <= set(first["versions"])
    assert [item.name for item in tmp_path.iterdir()] == ["starts.jsonl"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_failing_disk_is_a_storage_failure(tmp_path):
    """Address 0 of a process' memory cannot be read, and the system says EIO, as of a bad disk."""
    (tmp_path / "starts.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(StorageError, match=r"starts\.jsonl: Input/output error"):
        starts.note(tmp_path, 0)


def test_secrets_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")
    monkeypatch.setattr(starts.sys.modules["__main__"], "__spec__", None, raising=False)
    monkeypatch.setattr(starts.sys, "argv", [
        "train.py", "--plugins.api_key=abc", "--my-password", "def", "--data=s3://me:pw@b/k?t=1",
        "--name=0123456789secret", "--train.seed", "1",
    ])  # fmt: skip
    starts.note(tmp_path, 0)
    (start,) = starts.read(tmp_path)
    assert start["command"] == (
        "train.py --plugins.api_key=removed --my-password removed --data=s3://b/k "
        "--name=removed --train.seed 1"
    )
    assert "secret" not in json.dumps(start)


def test_damaged_file_raises(tmp_path):
    assert starts.read(tmp_path) == []
    (tmp_path / "starts.jsonl").write_text("{}\n{")
    with pytest.raises(UserError, match=r"starts.jsonl: a line is not a JSON object"):
        starts.read(tmp_path)


def test_damaged_file_does_not_stop_start(tmp_path, monkeypatch):
    """A line torn by a power failure, and one that is not UTF-8."""
    starts.note(tmp_path, 0)
    path = tmp_path / "starts.jsonl"
    path.write_bytes(b"\xff\n" + path.read_bytes() + b'{"step": 5, "ti')
    starts.note(tmp_path, 20)
    assert [start["step"] for start in starts.read(tmp_path)] == [0, 20]
    aside = tmp_path / "starts.damaged.jsonl"
    assert aside.read_bytes() == b'\xff\n{"step": 5, "ti\n'


def test_damaged_config_of_the_run_stops_no_start(tmp_path, caplog, monkeypatch):
    """A file system that lost its last writes leaves zeros."""
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    path, config = tmp_path / "config.toml", tiny_config(checkpoint={"dir": str(tmp_path)})
    path.write_bytes(b"\0" * 300)
    run_directory.log_config_changes(tmp_path, config)
    assert "changed since this run last started is not known" in caplog.text
    run_directory.prepare(tmp_path, config)
    assert "moved to config.damaged.toml" in caplog.text
    assert (tmp_path / "config.damaged.toml").read_bytes() == b"\0" * 300
    assert run_directory.read_config(tmp_path) == config
    run_directory.prepare(tmp_path, tiny_config(checkpoint={"dir": str(tmp_path), "interval": 3}))
    assert (tmp_path / "config.damaged.toml").read_bytes() == b"\0" * 300
