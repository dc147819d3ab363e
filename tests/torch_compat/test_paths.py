"""Conversions with special characters in paths, and verification of their results."""

import shutil

import pytest

from jaxforge.errors import StorageError, UserError
from tests.helpers import cli
from tests.torch_compat.runs import assert_same, values
from tests.torch_compat.stage_runs import write_run
from torch_compat.checkpoint import orbax_commit
from torch_compat.formats import dcp_writer, ocdbt, safetensors


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def hf(run, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf") / "hf"
    cli(["convert", str(run), str(directory), "--to=hf"])
    return directory


def test_special_directory_names_are_literal(run, hf, tmp_path):
    """This holds for the directory of the run and for its parents."""
    parent = tmp_path / "a%20b #1 50%"
    result = parent / "run 100%25;{x}:~'\""
    assert cli(["convert", "--to=jaxforge", str(hf), str(result)]) == 0
    params = values(result)
    assert_same(params, {name: v for name, v in values(run).items() if name in params})
    odd = parent / "h[1]f\\*?%41"
    assert cli(["convert", str(result), str(odd / "hf"), "--to=hf"]) == 0
    assert cli(["convert", str(result), str(odd / "dcp"), "--to=dcp", "--weights-only"]) == 0
    for item, other in ((odd / "hf", odd / "dcp"), (odd / "dcp", run)):
        assert cli(["verify", str(item), str(other)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == [parent.name]
    assert sorted(p.name for p in parent.iterdir()) == sorted([result.name, odd.name])


@pytest.mark.parametrize("name", ["a[1]", "a\\b", "a*", "what?"])
def test_import_to_unreadable_path_is_refused(hf, tmp_path, name):
    with pytest.raises(UserError, match=r"could not be read again.* give a directory without"):
        cli(["convert", "--to=jaxforge", str(hf), str(tmp_path / name / "run")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["a value", "a leaf", "all data"])
def test_import_that_cannot_be_read_back_fails(hf, tmp_path, monkeypatch, fault):
    commit = orbax_commit.commit

    def spoil(*arguments):
        commit(*arguments)
        (state,) = tmp_path.glob("run/checkpoints/step_*/state")
        if fault == "a value":
            array = ocdbt.ts.open(ocdbt.spec(state, "params.norm.weight")).result()
            array[...].write(0.5).result()
        elif fault == "a leaf":
            shutil.rmtree(state / "d")
        else:
            shutil.rmtree(state)

    monkeypatch.setattr(orbax_commit, "commit", spoil)
    with pytest.raises(StorageError, match="the new checkpoint could not be read"):
        cli(["convert", "--to=jaxforge", str(hf), str(tmp_path / "run")])
    assert not list((tmp_path / "run" / "checkpoints").glob("*step*"))
    assert not (tmp_path / "run" / "config.toml").exists()
    monkeypatch.undo()
    assert cli(["convert", "--to=jaxforge", str(hf), str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_export_that_cannot_be_read_back_fails(run, tmp_path, monkeypatch, form):
    with monkeypatch.context() as patched:
        if form == "hf":
            opened = safetensors.open_directory
            patched.setattr(
                safetensors, "open_directory", lambda d: dict(list(opened(d).items())[1:])
            )
        else:
            write = dcp_writer.write_metadata
            patched.setattr(
                dcp_writer, "write_metadata",
                lambda entries, *remaining: write(dict(list(entries.items())[1:]), *remaining),
            )  # fmt: skip
        with pytest.raises(StorageError, match="differs from what was written"):
            cli(["convert", str(run), str(tmp_path / form), f"--to={form}"])
    assert not (tmp_path / form / "config.json").exists()
    assert not (tmp_path / form / "latest").exists()
