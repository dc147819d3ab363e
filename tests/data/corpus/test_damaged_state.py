"""Damaged files of an unfinished output: their work is repeated, or a message names them."""

import os
import re
import shutil
from dataclasses import replace

import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import unit_worker
from jaxforge.data.corpus.manifest import Options
from jaxforge.errors import UserError
from tests.data.corpus.interruptions import snapshot, write_records

NESTED = b"[" * 100_000


def empty(path):
    path.write_bytes(b"")


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def half(path):
    os.truncate(path, path.stat().st_size // 2)


def cut(path):
    os.truncate(path, path.stat().st_size - 2)


def other_value(path):
    path.write_bytes(b"[1]")


def other_object(path):
    path.write_bytes(b'{"options": 1, "inputs": [[]], "unit": 0, "splits": {}}')


def other_number(path):
    path.write_text(re.sub(r"\d+", lambda m: str(int(m[0]) + 1), path.read_text(), count=1))


def no_splits(path):
    path.write_text('{"unit": 7, "skipped": 0, "splits": {}}')


def vast(path):
    os.truncate(path, 1 << 34)


def nested(path):
    path.write_bytes(NESTED)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = [empty, zeros, half, cut, other_value, other_object, nested, pipe, vast]


def run(source, output, *options):
    words = (source, "--output", output, "--unit-bytes", 2000, "--workers", 1, *options)
    return prepare.main([*map(str, words)])


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return a directory where share 0 of 2 of an output is finished, and the reference."""
    root = tmp_path_factory.mktemp("planned")
    (root / "corpus").mkdir()
    write_records(root / "corpus", 4)
    run(root / "corpus", root / "reference")
    before = os.getcwd()
    os.chdir(root)
    run(root / "corpus", root / "out", "--slurm", 2)
    run(root / "corpus", root / "out", "--share", "0/2")
    os.chdir(before)
    return root, snapshot(root / "reference")


@pytest.fixture
def partial(planned, tmp_path):
    """Return a copy of the unfinished output."""
    shutil.copytree(planned[0] / ".out.partial", tmp_path / ".out.partial")
    return tmp_path / ".out.partial"


REPEATED = ["plan.json", "journal.json", "parts/000000.json", "out/train/shard_000000_00000.npy"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", REPEATED)
def test_work_of_damaged_file_is_repeated(planned, partial, name, damage):
    damage(partial / name)
    run(planned[0] / "corpus", partial.parent / "out")
    assert snapshot(partial.parent / "out") == planned[1]


@pytest.mark.parametrize("name", ["plan.json", "journal.json", "parts/000000.json"])
@pytest.mark.parametrize("damage", [other_number, no_splits])
def test_work_of_other_values_is_repeated(planned, partial, name, damage):
    damage(partial / name)
    run(planned[0] / "corpus", partial.parent / "out")
    assert snapshot(partial.parent / "out") == planned[1]


@pytest.mark.parametrize(
    ("source", "name"),
    [("parts/000002.json", "parts/000000.json"), ("journal.json", "plan.json"),
     ("plan.json", "journal.json")],
)  # fmt: skip
def test_work_of_file_with_other_content_is_repeated(planned, partial, source, name):
    shutil.copy(partial / source, partial / name)
    run(planned[0] / "corpus", partial.parent / "out")
    assert snapshot(partial.parent / "out") == planned[1]


def test_part_without_a_split_is_not_intact(partial):
    job = unit_worker.CorpusJob(partial / "out", partial, Options("uint16"), "")
    part = job.parts.read(0)
    assert unit_worker.is_intact(job, part)
    assert not unit_worker.is_intact(job, replace(part, splits={}))


@pytest.mark.parametrize("damage", [pipe, vast, empty])
def test_damaged_tokenizer_is_written_again(planned, partial, damage):
    damage(partial / "out" / "tokenizer" / "tokenizer.json")
    run(planned[0] / "corpus", partial.parent / "out")
    assert snapshot(partial.parent / "out") == planned[1]


def test_share_refuses_tokenizer_that_is_a_pipe(planned, partial):
    pipe(partial / "out" / "tokenizer" / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json: it is not a regular file; give"):
        run(planned[0] / "corpus", partial.parent / "out", "--share", "1/2")


def test_share_of_damaged_plan_raises(planned, partial):
    half(partial / "plan.json")
    with pytest.raises(UserError, match="nothing is planned for"):
        run(planned[0] / "corpus", partial.parent / "out", "--share", "1/2")
