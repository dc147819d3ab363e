"""Conversions to buckets, and their resumption."""

import contextlib
import json
from unittest import mock

import pytest
from emulators import ONE_SERVICE
from run_config import CONFIG

from jaxforge.checkpoint.paths import is_durable
from jaxforge.commands import train
from jaxforge.errors import StorageError, UserError
from jaxforge.storage import COMMITTED, buckets, files, urls
from tests.helpers import cli
from torch_compat.checkpoint import checkpoints, hf_state
from torch_compat.convert import upload

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a directory with a local run and its DCP and Hugging Face exports."""
    directory = tmp_path_factory.mktemp("made")
    (directory / "run.toml").write_text(CONFIG.replace("max_steps = 12", "max_steps = 4"))
    assert train.main([f"--config={directory}/run.toml", f"--checkpoint.dir={directory}/run"]) == 0
    for to in ("dcp", "hf"):
        arguments = ["convert", f"{directory}/run", f"{directory}/{to}", f"--to={to}"]
        assert cli(arguments) == 0
    return directory


@pytest.fixture(autouse=True)
def _scratch(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)  # so that the cache is not used


def gathered(tmp_path):
    return list((tmp_path / "scratch").glob("jaxforge-*"))


def fetch(location, directory):
    """Copy a directory of the bucket to this machine."""
    for key in buckets.keys(str(location)):
        (directory / key).parent.mkdir(parents=True, exist_ok=True)
        (directory / key).write_bytes((location / key).read_bytes())
    return directory


@pytest.mark.parametrize(
    "server", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True
)
def test_import_creates_run_in_bucket(server, bucket, exported, tmp_path):
    run = urls.path(f"{bucket}/run")
    command = [
        "convert",
        "--to=jaxforge",
        f"{exported}/dcp",
        str(run),
        f"--config={exported}/run.toml",
    ]
    assert cli(command) == 0
    assert cli(["verify", f"{exported}/run", str(run)]) == 0
    assert (run / "checkpoints/step_4" / COMMITTED).exists()
    assert f'dir = "{run}"' in (run / "config.toml").read_text()
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.toml"]
    assert gathered(tmp_path) == []
    more = [f"--config={exported}/run.toml", f"--checkpoint.dir={run}", "--train.max_steps=5"]
    assert train.main(more) == 0
    assert (run / "checkpoints/step_5" / COMMITTED).exists()
    with pytest.raises(UserError, match=f"{run}/checkpoints/step_4.* already"):
        cli(command)
    assert gathered(tmp_path) == []


@ONE_SERVICE
@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_export_from_bucket_equals_local_export(bucket, exported, tmp_path, to, capsys):
    remote = urls.path(f"{bucket}/out")
    command = ["convert", f"{exported}/run", str(remote), f"--to={to}"]
    assert cli(command) == 0
    stderr = capsys.readouterr().err
    assert "disk must hold it once" in stderr
    assert ("`latest` is not created" in stderr) == (to == "dcp")
    back = fetch(remote, tmp_path / "back")
    names = {path.relative_to(back).as_posix() for path in back.rglob("*") if path.is_file()}
    local = exported / to
    local_names = {p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file()}
    assert names == {name for name in local_names if not name.startswith("latest")}
    config = [f"--config={exported}/run.toml"]
    assert cli(["verify", str(local), str(back), *config]) == 0
    assert gathered(tmp_path) == []
    with pytest.raises(UserError, match="already"):
        cli(command)


def test_import_copies_model_documents(bucket, exported):
    run = urls.path(f"{bucket}/run")
    assert cli(["convert", "--to=jaxforge", f"{exported}/hf", str(run)]) == 0
    retained = run / "huggingface" / "config.json"
    assert retained.read_bytes() == (exported / "hf" / "config.json").read_bytes()
    assert hf_state.read_imported_documents(run).config["model_type"]


@ONE_SERVICE
def test_interrupted_copy_is_repeated(bucket, exported, tmp_path):
    """The interruption is at a file, or between the checkpoint and its `config.toml`."""
    run = urls.path(f"{bucket}/run")
    step = run / "checkpoints/step_4"
    (step / "of" / "another").write_text("conversion")
    (step / upload.UNFINISHED).write_text("another")
    command = [
        "convert",
        "--to=jaxforge",
        f"{exported}/dcp",
        str(run),
        f"--config={exported}/run.toml",
    ]
    for name in ("manifest.ocdbt", "config.toml"):
        with refused(name), pytest.raises(StorageError, match=name):
            cli(command)
        assert is_durable(step) == (name == "config.toml")
        assert gathered(tmp_path) == []
    assert cli(command) == 0
    assert cli(["verify", f"{exported}/run", str(run)]) == 0
    names = {path.name for path in step.iterdir()}
    assert not names & {"of", upload.UNFINISHED}
    assert gathered(tmp_path) == []


def test_changed_source_is_converted_again(bucket, exported, tmp_path):
    out = urls.path(f"{bucket}/out")
    command = ["convert", f"{exported}/run", str(out), "--to=hf"]
    with refused("config.json"), pytest.raises(StorageError):
        cli(command)
    assert not (out / "config.json").exists()
    assert cli([*command, "--dtype=bfloat16"]) == 0
    back = fetch(out, tmp_path / "back")
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {str(t.dtype) for t in checkpoints.find(back).raw().values()} == {"bfloat16"}


@contextlib.contextmanager
def refused(name):
    """Make the bucket refuse objects of a name."""
    write = files.write

    def refusing(location, data):
        if str(location).endswith(f"/{name}"):
            raise StorageError(f"{location}: no")
        write(location, data)

    with mock.patch.object(files, "write", refusing):
        yield


@pytest.mark.slow
def test_original_with_images_in_bucket_is_read_again_by_export(bucket, tmp_path, capsys):
    models = pytest.importorskip("tests.torch_compat.multimodal_models")
    models.network("gemma3").save_pretrained(tmp_path / "hf")
    original, run = urls.path(f"{bucket}/gemma"), urls.path(f"{bucket}/run")
    for path in (tmp_path / "hf").iterdir():
        (original / path.name).write_bytes(path.read_bytes())
    assert cli(["convert", str(original), str(run), "--to=jaxforge"]) == 0
    assert cli(["convert", str(run), str(tmp_path / "back"), "--to=hf"]) == 0
    first, other = (checkpoints.find(tmp_path / name).raw() for name in ("hf", "back"))
    assert first.keys() == other.keys()
    assert all(first[name].all().tobytes() == other[name].all().tobytes() for name in first)
    (original / "model.safetensors").unlink()
    capsys.readouterr()
    with pytest.raises(UserError, match=r"bucket.*gemma.*cannot be read.*--text-only"):
        cli(["convert", str(run), str(tmp_path / "again"), "--to=hf"])
