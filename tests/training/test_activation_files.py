"""Directories of activations: complete or absent, written sequence by sequence."""

import errno
import json

import numpy as np
import pytest

from jaxforge.training.callbacks import activations as activation_files


def sequences(n, of=1.0):
    for i in range(n):
        yield {"residual": np.full((2, 3), of * i, np.float32), "tokens": np.arange(3, dtype="i4")}


def test_numpy_reads_written_activations(tmp_path):
    assert activation_files.write(tmp_path / "a", sequences(1200), {"step": 5}) == 1200
    result = activation_files.read(tmp_path / "a")
    assert result["residual"].shape == (1200, 2, 3)
    assert result["residual"].dtype == np.float32
    assert result["residual"][:, 1, 2].tolist() == list(range(1200))
    assert isinstance(result["tokens"], np.memmap)
    assert json.loads((tmp_path / "a" / "activations.json").read_text()) == {"step": 5}


def test_write_replaces_existing_and_partial_directories(tmp_path):
    for torn in (".step_5.partial", ".step_5.old.partial"):
        location = tmp_path / "activations" / torn
        location.mkdir(parents=True)
        (location / "residual.npy").write_text("half")
    directory = activation_files.step_directory(tmp_path, 5)
    activation_files.write(directory, sequences(4), {})
    activation_files.write(
        directory, ({"mlp": sequence["residual"]} for sequence in sequences(2, 3.0)), {}
    )
    assert [path.name for path in (tmp_path / "activations").iterdir()] == ["step_5"]
    assert {name: x.tolist() for name, x in activation_files.read(directory).items()} == {
        "mlp": [[[0.0] * 3] * 2, [[3.0] * 3] * 2]
    }
    assert activation_files.steps(tmp_path) == [5]
    assert activation_files.steps(tmp_path / "none") == []


def test_full_disk_leaves_previous_directory_unchanged(tmp_path, monkeypatch):
    directory = activation_files.step_directory(tmp_path, 5)
    activation_files.write(directory, sequences(1), {})
    drawn = []

    def add(self, values):
        drawn.append(values)
        if len(drawn) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(activation_files.AppendableArray, "add", add)
    remaining = sequences(4)
    with pytest.raises(OSError, match="No space"):
        activation_files.write(directory, remaining, {})
    assert len(list(remaining)) == 2  # other processes still compute the sequences
    assert [path.name for path in (tmp_path / "activations").iterdir()] == ["step_5"]
    assert len(activation_files.read(directory)["residual"]) == 1
