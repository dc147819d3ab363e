"""Atomic directories after a kill."""

import errno
import sys

import pytest

from jaxforge.errors import InputChangedError, StorageError, UserError
from jaxforge.storage.atomic_directory import atomic_directory, partial_of, write_sealed

PLAN = {"options": {"dtype": "uint16"}, "inputs": []}


def test_overwrite_starts_over_after_kill_following_final_rename(tmp_path):
    """The kill leaves the plan and the journal, but `out/` has already become the directory."""
    output = tmp_path / "data"
    output.mkdir()
    (output / "marker").touch()
    partial = partial_of(output)
    partial.mkdir()
    write_sealed(partial / "plan.json", PLAN)
    write_sealed(partial / "journal.json", {"shards": 3})
    messages = []
    with atomic_directory(
        output, PLAN, marker="marker", overwrite=True, say=messages.append
    ) as directory:
        assert directory.journal is None
        (directory.out / "new").touch()
    assert messages == []
    assert [path.name for path in output.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full")
def test_full_disk_is_a_storage_failure(tmp_path):
    with (
        pytest.raises(StorageError, match=r"cannot write .*: No space left on device"),
        atomic_directory(tmp_path / "data", PLAN, marker="marker"),
        open("/dev/full", "wb", 0) as full,
    ):
        full.write(b"x")


def test_storage_failures_of_inputs_keep_their_message(tmp_path):
    message = "s3://bucket/a: bytes 0 to 9 did not arrive in 300 seconds"
    with pytest.raises(StorageError) as raised, atomic_directory(tmp_path / "d", PLAN, marker="m"):
        raise StorageError(message)
    assert str(raised.value) == message
    denied = PermissionError(errno.EACCES, "Permission denied", "d")
    with (
        pytest.raises(UserError, match="cannot write d: Permission denied"),
        atomic_directory(tmp_path / "d", PLAN, marker="m"),
    ):
        raise denied


def test_changed_input_leaves_nothing_to_resume_from(tmp_path):
    messages = []

    def fail():
        with atomic_directory(tmp_path / "d", PLAN, marker="m", say=messages.append) as directory:
            directory.commit({"shards": 3})
            raise InputChangedError("a.jsonl changed", "a.jsonl")

    with pytest.raises(InputChangedError):
        fail()
    assert not list(tmp_path.iterdir())
    assert messages == []
