"""Exports during training: chosen checkpoints, and failures."""

import json
import types

import pytest

from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.errors import StorageError
from jaxforge.training.callbacks import exports
from jaxforge.training.callbacks.exports import Exporter
from tests.torch_compat.runs import trained
from torch_compat.checkpoint import checkpoints


def test_every_nth_and_last_checkpoint_are_exported(tmp_path):
    trained(tmp_path, steps=2)
    exporter = Exporter(CheckpointConfig(export_interval=2, export_last=True))
    result = tmp_path / "checkpoints" / "step_2"
    absent = tmp_path / "checkpoints" / "step_1"
    exporter.on_checkpoint_save(1, absent)  # not due: the first of two
    exporter.on_checkpoint_save(2, result)
    exporter.on_train_end(2, 0, None)
    assert [p.name for p in (tmp_path / "exports").iterdir()] == ["step_2"]
    exported = tmp_path / "exports" / "step_2"
    assert checkpoints.find(exported).format == "hf"
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"


def test_failed_export_raises_at_the_end(tmp_path):
    trained(tmp_path, steps=2)
    result = tmp_path / "checkpoints" / "step_2"
    exporter = Exporter(CheckpointConfig(export_interval=1))
    for file in (result / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    exporter.on_checkpoint_save(2, result)
    with pytest.raises(StorageError, match=r"some exports failed:\n.*step_2: .*damaged"):
        exporter.on_train_end(2, 0, None)


def test_missing_checkpoint_fails_its_export(tmp_path):
    exporter = Exporter(CheckpointConfig(export_last=True))
    exporter.on_checkpoint_save(2, tmp_path / "checkpoints" / "step_2")
    with pytest.raises(StorageError, match="was not written"):
        exporter.on_train_end(2, 0, None)


@pytest.mark.parametrize("steps", [[], [1, 20]])
def test_complete_run_exports_newest_checkpoint(tmp_path, monkeypatch, steps):
    commands = []
    done = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(
        exports.subprocess, "run", lambda command, **_: commands.append(command) or done
    )
    for step in steps:
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    Exporter(CheckpointConfig(export_last=True, dir=str(tmp_path))).on_train_end(20, 0, None)
    newest = [str(tmp_path / part / "step_20") for part in ("checkpoints", "exports")]
    assert [command[4:6] for command in commands] == ([newest] if steps else [])
