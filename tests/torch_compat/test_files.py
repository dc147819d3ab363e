"""Copies of file ranges by the kernel, and their fallbacks."""

import errno
import os

import numpy as np
import pytest

from jaxforge.errors import UserError
from torch_compat.formats import files
from torch_compat.formats.files import Directory, writing

SIZE = 300_000


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").write_bytes(np.random.default_rng(0).bytes(SIZE))
    return Directory(tmp_path).open("source")


def copied(source, target, begin=5_000, length=200_000, at=7):
    with writing(target) as put:
        put(b"before.", 0)
        put(source(begin, length).view(np.uint16).reshape(-1, 4).view(np.uint8).reshape(-1), at)
    return target.read_bytes()


def expected(source, begin=5_000, length=200_000):
    return b"before." + source(begin, length).tobytes()


def test_mapped_data_are_copied_by_kernel(source, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda d, data, at: os.write(d, data) if at == 0 else 1 / 0)
    assert copied(source, tmp_path / "target") == expected(source)


def test_computed_data_are_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 1 / 0)
    with writing(tmp_path / "target") as put:
        put(source(0, SIZE) + np.uint8(1), 0)
    assert (tmp_path / "target").read_bytes() == (source(0, SIZE) + np.uint8(1)).tobytes()


def test_writing_starts_sync_of_each_part(source, tmp_path, monkeypatch):
    begun, end = [], []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, nbytes, how: begun.append((at, nbytes)))
    monkeypatch.setattr(os, "fsync", lambda _: end.extend(begun))
    copied(source, tmp_path / "target")
    assert begun == end == [(7, 200_000)]  # not for a few bytes
    monkeypatch.delattr(os, "posix_fadvise")  # absent on macOS
    assert copied(source, tmp_path / "target") == expected(source)


@pytest.mark.parametrize("number", sorted(files.CANNOT_COPY))
def test_kernel_copy_falls_back_to_write(source, tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert copied(source, tmp_path / "target") == expected(source)


def test_partial_kernel_copies_are_continued(source, tmp_path, monkeypatch):
    real = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, *at: real(a, b, min(n, 70_000), *at))
    assert copied(source, tmp_path / "target") == expected(source)


def test_full_disk_and_truncated_source_raise_distinct_errors(source, tmp_path, monkeypatch):
    chunk = source(5_000, 200_000)
    os.truncate(tmp_path / "source", 100_000)
    with (
        pytest.raises(UserError, match="source cannot be read any more"),
        writing(tmp_path / "target") as put,
    ):
        put(chunk, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="full"), writing(tmp_path / "target") as put:
        put(chunk, 0)


def test_links_to_themselves_are_no_files(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "loop").symlink_to("loop")
    directory = Directory(tmp_path)
    assert list(directory.stamps()) == ["file"]
    with pytest.raises(UserError, match=r"loop cannot be read \(Too many levels"):
        directory.open("loop")
