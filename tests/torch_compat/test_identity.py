"""Identity of conversions: files of two conversions are never mixed, and only one may write."""

import fcntl
import itertools
import json
import os
import shutil

import pytest

from jaxforge.data.corpus.tokenizer import ByteTokenizer
from jaxforge.errors import UserError
from jaxforge.storage.run_lock import RunLock
from tests.helpers import cli
from tests.torch_compat.runs import assert_same, values
from tests.torch_compat.stage_runs import write_run
from torch_compat.checkpoint import checkpoints
from torch_compat.formats.dcp_reader import METADATA
from torch_compat.formats.files import Directory
from torch_compat.formats.staging import Staging


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return two runs of the same step and config with different values."""
    return [write_run(tmp_path_factory.mktemp("run"), seed=seed) for seed in (1, 2)]


class Killed(BaseException):
    """Exception that ends a command like a kill."""


def stopped(monkeypatch, arguments):
    """Stop a command when all data are written, before the commit."""

    def end(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "results", end)
        with pytest.raises(Killed):
            cli(arguments)


def replace(old, new):
    """Replace a file or directory by another."""
    old.rename(old.with_name("away"))
    shutil.copytree(new, old) if new.is_dir() else shutil.copy2(new, old)


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_replaced_weights_restart_conversion(runs, tmp_path, monkeypatch, form):
    for name, run in zip(("old", "new"), runs, strict=True):
        cli(["convert", str(run), str(tmp_path / name), f"--to={form}", "--weights-only"])
    config = [] if form == "hf" else [f"--config={runs[0] / 'config.toml'}"]
    arguments = ["convert", "--to=jaxforge", str(tmp_path / "old"), str(tmp_path / "run"), *config]
    stopped(monkeypatch, arguments)
    file = "model.safetensors" if form == "hf" else "step_3/__0_0.distcp"
    if form == "dcp":  # nothing else distinguishes the new data
        metadata = [(tmp_path / name / "step_3" / METADATA).read_bytes() for name in ("old", "new")]
        assert metadata[0] == metadata[1]
    replace(tmp_path / "old" / file, tmp_path / "new" / file)
    assert cli(arguments) == 0
    result = values(tmp_path / "run")
    assert_same(result, {n: v for n, v in values(runs[1]).items() if n in result})


def add_step_5(steps, run):
    """Add the checkpoint of step 3 of another run under the name of step 5, as a user might."""
    shutil.copytree(run / "checkpoints" / "step_3", steps / "step_5")


@pytest.mark.parametrize("change", ["another step", "a newer step", "another tokenizer"])
def test_changed_run_restarts_export(runs, tmp_path, monkeypatch, change):
    run, steps = tmp_path / "run", tmp_path / "run" / "checkpoints"
    shutil.copytree(runs[0], run)
    arguments = ["convert", str(run), str(tmp_path / "hf"), "--to=hf"]
    stopped(monkeypatch, arguments)
    if change == "another step":
        replace(steps / "step_3", runs[1] / "checkpoints" / "step_3")
    elif change == "a newer step":
        add_step_5(steps, runs[1])
    else:
        ByteTokenizer().save(run / "tokenizer")
    assert cli(arguments) == 0
    has_tokenizer = change == "another tokenizer"
    assert cli(["verify", str(tmp_path / "hf"), str(runs[0 if has_tokenizer else 1])]) == 0
    eos_id = json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"]
    assert eos_id == (ByteTokenizer().eos_id if has_tokenizer else None)


def test_changed_config_restarts_conversion(runs, tmp_path, monkeypatch):
    """torchtitan's rotary layout depends on the number of heads."""
    config = tmp_path / "run.toml"
    right = (runs[0] / "config.toml").read_text()
    config.write_text(right.replace("n_heads = 4\nn_kv_heads = 2", "n_heads = 2\nn_kv_heads = 1"))
    assert config.read_text() != right
    cli(["convert", str(runs[0]), str(tmp_path / "dcp"), "--to=dcp", "--dialect=torchtitan"])
    arguments = [
        "convert",
        "--to=jaxforge",
        str(tmp_path / "dcp"),
        str(tmp_path / "run"),
        f"--config={config}",
    ]
    stopped(monkeypatch, arguments)
    config.write_text(right)
    assert cli(arguments) == 0
    assert_same(values(tmp_path / "run"), values(runs[0]))


def test_source_changed_during_conversion_raises(runs, tmp_path, monkeypatch):
    cli(["convert", str(runs[0]), str(tmp_path / "hf"), "--to=hf"])
    weights, results = tmp_path / "hf" / "model.safetensors", Staging.results

    def touch_and_go_on(*args):
        os.utime(weights, ns=(1, 1))
        return results(*args)

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "results", touch_and_go_on)
        with pytest.raises(UserError, match=r"changed while it was converted, so that no result"):
            cli(["convert", "--to=jaxforge", str(tmp_path / "hf"), str(tmp_path / "run")])
    assert not list((tmp_path / "run").rglob("step_*"))
    assert cli(["convert", "--to=jaxforge", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("store", ["memory", "file"])
def test_every_store_has_a_file_identity(tmp_path, store):
    fs = pytest.importorskip("fsspec").filesystem(store)
    location = f"memory://{tmp_path}/step_3" if store == "memory" else str(tmp_path)
    seen = []
    for content in (b"a", b"b", b"b"):
        fs.pipe(f"{location}/new", content)
        fs.mv(
            f"{location}/new", f"{location}/__0_0.distcp"
        )  # a new file, however soon it is written
        seen += [Directory(location).stamps(), Directory(location).stamps()]
    assert [a == b for a, b in itertools.pairwise(seen)] == [True, False, True, False, True]
    assert seen[0].keys() == {"__0_0.distcp"}
    assert Directory(f"{location}/none").stamps() == {}


def test_located_checkpoint_stays_the_same(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "run")
    cli(["convert", str(runs[0]), str(tmp_path / "dcp"), "--to=dcp"])
    reference = [checkpoints.find(tmp_path / name) for name in ("run", "dcp")]
    steps = tmp_path / "run" / "checkpoints"
    shutil.copytree(steps / "step_3", steps / "step_5")
    (tmp_path / "dcp" / "step_3").rename(tmp_path / "dcp" / "step_5")
    (tmp_path / "dcp" / "latest").unlink()
    (tmp_path / "dcp" / "latest").symlink_to("step_5")
    assert [item.directory.name for item in reference] == ["step_3", "step_3"]
    assert [checkpoints.find(tmp_path / n).directory.name for n in ("run", "dcp")] == ["step_5"] * 2


def test_concurrent_conversion_to_same_destination_raises(tmp_path):
    with Staging(tmp_path / "a", {"of": 1}) as first:
        for plan in ({"of": 1}, {"of": 2}):
            with pytest.raises(UserError, match=rf"is being written by process {os.getpid()} on "):
                Staging(tmp_path / "a", plan)
        with Staging(tmp_path / "b", {"of": 2}):
            pass
        first.commit()
    assert sorted(path.name for path in tmp_path.glob(".a*")) == []
    with pytest.raises(UserError, match="is there already"):
        Staging(tmp_path / "a", {"of": 1})


def test_import_into_training_run_raises(runs, tmp_path):
    cli(["convert", str(runs[0]), str(tmp_path / "hf"), "--to=hf"])
    arguments = ["convert", "--to=jaxforge", str(tmp_path / "hf"), str(tmp_path / "run")]
    with RunLock(tmp_path / "run") as job:
        job.take()
        with pytest.raises(UserError, match="is in use by process"):
            cli(arguments)
    assert cli(arguments) == 0
    assert not list((tmp_path / "run").rglob("*lock*"))


def test_failed_conversion_releases_lock(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Staging, "set_mark", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Staging(tmp_path / "a", {})
    with Staging(tmp_path / "a", {}):
        pass


def test_conversion_works_without_file_locks(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Staging(tmp_path / "a", {}) as item:
        item.commit()
    assert (tmp_path / "a").is_dir()
    assert "locks are not supported ([Errno 95] Operation not supported)" in caplog.text
