"""Conversions on full disks, with vanishing sources, and on file systems with missing features."""

import errno
import os
import shutil

import pytest

from jaxforge.errors import StorageError, UserError
from tests.helpers import cli
from tests.torch_compat.runs import assert_same
from tests.torch_compat.stage_runs import write_run
from torch_compat.checkpoint import checkpoints, orbax_store
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.formats import files
from torch_compat.formats.staging import Staging

WEIGHTS = ReadOptions(weights_only=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sources")
    cli(["convert", str(write_run(directory / "run")), str(directory / "hf"), "--to=hf"])
    return directory


def convert(sources, to, form):
    """Run a conversion."""
    source = sources / ("hf" if form == "jaxforge" else "run")
    return cli(["convert", str(source), str(to), f"--to={form}"])


class Disk:
    """Function that counts its calls and fails at a given call."""

    def __init__(self, monkeypatch, name, fails_at=None, number=errno.ENOSPC):
        self.calls, real = 0, getattr(os, name)

        def call(*args, **kwargs):
            self.calls += 1
            if fails_at in (self.calls, "always"):
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)


def is_durable(sources, to):
    """Return whether a complete checkpoint exists; a partial one fails."""
    try:
        checkpoints.find(to)
    except UserError:
        return False
    config = checkpoints.find(sources / "run").config(None)
    checkpoint = [checkpoints.find(p).read(config, WEIGHTS).params for p in (to, sources / "run")]
    native, theirs = ({name: tensor.all() for name, tensor in of.items()} for of in checkpoint)
    assert_same(native, theirs)
    return True


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("jaxforge", "fsync"), ("jaxforge", "replace"), ("jaxforge", "link"),
        ("jaxforge", "rename"),
        ("hf", "pwrite"), ("hf", "fsync"), ("hf", "rename"),
        ("dcp", "fsync"), ("dcp", "rename"), ("dcp", "symlink"),
    ],
)  # fmt: skip
def test_full_disk_leaves_complete_result_or_none(sources, tmp_path, monkeypatch, form, call):
    """The disk is full at the first or last call of each kind; then the command resumes."""
    with monkeypatch.context() as patched:
        counted = Disk(patched, call)
        convert(sources, tmp_path / "counted", form)
    for fails_at in sorted({1, counted.calls}):
        to = tmp_path / f"full{fails_at}"
        with monkeypatch.context() as patched:
            Disk(patched, call, fails_at)
            if call == "link":  # files are copied instead
                convert(sources, to, form)
            else:
                with pytest.raises(StorageError, match="No space left"):
                    convert(sources, to, form)
        if not is_durable(sources, to):
            assert not (to / "config.toml").exists()  # training would start from scratch
            convert(sources, to, form)
        assert is_durable(sources, to)
        if form == "jaxforge" and not (to / "config.toml").exists():
            with pytest.raises(UserError, match="is complete now"):
                convert(sources, to, form)
            assert (to / "config.toml").exists()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK])
def test_conversion_works_without_hard_links(sources, tmp_path, monkeypatch, number):
    disk = Disk(monkeypatch, "link", "always", number)
    convert(sources, tmp_path / "to", "jaxforge")
    assert disk.calls
    assert is_durable(sources, tmp_path / "to")


def test_import_killed_at_end_is_completed(sources, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(orbax_store, "finish_import", lambda run, at: at.exists() and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(sources, tmp_path / "to", "jaxforge")
    assert not (tmp_path / "to" / "config.toml").exists()
    with pytest.raises(UserError, match="is complete now"):
        convert(sources, tmp_path / "to", "jaxforge")
    assert (tmp_path / "to" / "config.toml").exists()
    assert is_durable(sources, tmp_path / "to")
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("form", ["jaxforge", "hf", "dcp"])
def test_vanished_source_is_not_reported_as_destination(sources, tmp_path, monkeypatch, form):
    copies = tmp_path / "own"
    shutil.copytree(sources, copies)
    write = Staging.write

    def vanish(self, *arguments):
        shutil.rmtree(copies / ("hf" if form == "jaxforge" else "run"))
        write(self, *arguments)

    monkeypatch.setattr(Staging, "write", vanish)
    with pytest.raises(UserError, match="cannot be read") as raised:
        convert(copies, tmp_path / "to", form)
    assert "written" not in str(raised.value)


def test_truncated_source_is_named(tmp_path):
    (tmp_path / "x").write_bytes(bytes(10_000))
    file = files.Directory(tmp_path).open("x")
    os.truncate(tmp_path / "x", 100)
    with pytest.raises(UserError, match="x cannot be read any more"):
        file(5000, 10)


def test_unsyncable_directories_are_accepted(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    Disk(monkeypatch, "fsync", "always", errno.EINVAL)
    files.sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        files.sync(tmp_path / "file")


def test_failed_latest_link_names_checkpoint(sources, tmp_path, monkeypatch):
    Disk(monkeypatch, "symlink", "always", errno.EPERM)
    with pytest.raises(StorageError, match=r"step_3 is complete, but .*latest"):
        convert(sources, tmp_path / "to", "dcp")
    assert is_durable(sources, tmp_path / "to")


def test_file_errors_are_not_reported_as_damage(sources, tmp_path):
    shutil.copytree(sources / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "config.json").unlink()
    (tmp_path / "hf" / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"(?s)^(?!.*not JSON).*link out of the checkpoint"):
        cli(["convert", "--to=jaxforge", str(tmp_path / "hf"), str(tmp_path / "to")])
