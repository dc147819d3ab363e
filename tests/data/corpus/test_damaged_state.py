"""Damaged files of an unfinished output: their work is repeated, or a message names them."""

import os
import shutil

import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import ingest
from jaxforge.errors import UserError
from tests.data.corpus.interruptions import Interrupted, snapshot, stop_encoding, write_records

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


def nested(path):
    path.write_bytes(NESTED)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = [empty, zeros, half, cut, other_value, other_object, nested, pipe]


def run(source, output, *options):
    words = (source, "--output", output, "--unit-bytes", 2000, "--workers", 1, *options)
    return prepare.main([*map(str, words)])


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Return a directory with an output of which share 0 of 2 is finished, and the reference."""
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


@pytest.mark.parametrize("damage", [empty, zeros, half, cut, other_value])
def test_damaged_counts_raise(planned, partial, damage):
    [fold] = (partial / "parts").glob("folded_0.npz")
    damage(fold)
    with pytest.raises(UserError, match=r"folded_0\.npz is damaged .*: remove .*partial, and"):
        run(planned[0] / "corpus", partial.parent / "out")


def test_share_of_damaged_plan_raises(planned, partial):
    half(partial / "plan.json")
    with pytest.raises(UserError, match="nothing is planned for"):
        run(planned[0] / "corpus", partial.parent / "out", "--share", "1/2")


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Return the unfinished output of a single unit with two whole shards, and its command."""
    monkeypatch.setattr(ingest, "BATCH_BYTES", 400)
    monkeypatch.setattr(ingest, "COMMIT_SECONDS", 0.0)
    (tmp_path / "corpus").mkdir()
    write_records(tmp_path / "corpus", 4)
    command = (tmp_path / "corpus", tmp_path / "out", "--shard-tokens", 300, "--unit-bytes", 10**6)
    stop = stop_encoding(monkeypatch)
    stop(4)
    with pytest.raises(Interrupted):
        run(*command)
    stop(None)
    return tmp_path / ".out.partial", command


@pytest.mark.parametrize("damage", [half, cut, pipe])
def test_cut_shard_of_interrupted_run_raises(interrupted, damage):
    partial, command = interrupted
    damage(partial / "out" / "train" / "shard_00000.npy")
    with pytest.raises(UserError, match=r"shard_00000\.npy lost its end; remove .*partial$"):
        run(*command)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_journal_starts_over_or_raises(interrupted, damage, tmp_path, capsys):
    partial, command = interrupted
    damage(partial / "journal.json")
    if damage is other_object:
        with pytest.raises(UserError, match=r"progress in .*\.out\.partial is damaged .*remove"):
            run(*command)
        return
    run(*command)
    assert "starting over: " in capsys.readouterr().err
    run(command[0], tmp_path / "fresh", *command[2:])
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "fresh")
