"""Capsules: content, redaction, damage, and verification by replay."""

import dataclasses
import json
import subprocess
import tomllib
import zipfile

import jax
import numpy as np
import pytest

from jaxforge.cli.redaction import redacted
from jaxforge.commands.replay import main
from jaxforge.errors import UserError
from jaxforge.tools.replay import capsule as archive
from jaxforge.tools.replay.capsule import capsule_of, code_state, step_range, verify
from jaxforge.training import launch
from tests.conftest import tiny_config

LENGTH, STEPS = 32, 8
ONE_MORE_BIT = 1.0000002
MESH = ("--distributed.dp_shard=2", "--distributed.tp=2", "--train.batch_size=4")


def write_data(directory, seed):
    directory.mkdir(exist_ok=True)
    tokens = np.random.default_rng(seed).integers(0, 256, 40 * (LENGTH + 1))
    np.save(directory / "x.npy", tokens.astype(np.uint16))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("capsule")
    write_data(path / "data", 0)
    launch.fit(
        tiny_config(
            model={"dim": 32, "n_layers": 1},
            train={"max_steps": STEPS, "batch_size": 1},
            distributed={"dp_shard": 8},
            data={"dataset_path": str(path / "data")},
            checkpoint={"dir": str(path / "run"), "interval": 4},
        )
    )
    return path / "run"


@pytest.fixture(scope="module")
def capsule(run):
    return capsule_of(run)


def with_about(capsule, **changed):
    return dataclasses.replace(capsule, about={**capsule.about, **changed})


def test_verify_from_start_is_bit_exact(capsule, tmp_path, capsys):
    file, said = tmp_path / "x.zip", tmp_path / "x.json"
    archive.write(file, capsule)
    assert main([str(file), "--steps", "2", "--json", str(said)]) == 0
    assert "2 steps match the log, bit for bit" in capsys.readouterr().out
    said = json.loads(said.read_text())
    assert said["is_exact"]
    assert not any(said["ingredients"].values())
    assert [(item["step"], item["difference"]) for item in said["steps"]] == [(1, 0.0), (2, 0.0)]


@pytest.mark.slow
def test_verify_from_checkpoint_is_bit_exact(run, capsule):
    result = verify(capsule, 2, run)
    assert [step.step for step in result.steps] == [5, 6]
    assert result.is_exact


def test_verified_range_of_steps(run, capsule):
    assert step_range(capsule, 3, None) == (1, 3)
    assert step_range(capsule, 99, None) == (1, STEPS)
    assert step_range(capsule, 99, run) == (5, STEPS)  # the newest checkpoint with later steps
    assert step_range(capsule, 1, run / "checkpoints" / "step_4") == (5, 5)
    with pytest.raises(UserError, match="the capsule's curve ends at step 8, not after step 8"):
        step_range(capsule, 1, run / "checkpoints" / "step_8")


def test_bit_flip_in_curve_fails_verification(capsule, tmp_path, capsys):
    # A curve without the first step.
    _, second, *remaining = capsule.files[archive.CURVE].splitlines()
    values = json.loads(second)
    values["train/loss"] *= ONE_MORE_BIT
    files = {**capsule.files, archive.CURVE: "\n".join([json.dumps(values), *remaining, ""])}
    archive.write(tmp_path / "x.zip", dataclasses.replace(capsule, files=files))
    assert main([str(tmp_path / "x.zip"), "--steps", "1"]) == 1
    said = capsys.readouterr().out
    assert "not every step matches the log bit for bit; although all ingredients" in said
    assert "step      2" in said
    assert "step      1" not in said


@pytest.mark.slow
def test_different_ingredients_are_named(capsule):
    about = capsule.about
    code = {"jaxforge": {**about["code"]["jaxforge"], "sha256": "0" * 64}}
    changed = {
        "packages": {**about["packages"], "jaxlib": "0.9.0"},
        "code": code,
        "environment": {"XLA_FLAGS": "--a=1"},
    }
    result = verify(with_about(capsule, **changed), 2)
    assert [name for name, lines in result.differences.items() if lines] == [
        "environment", "code", "packages",
    ]  # fmt: skip
    assert result.differences["packages"] == [f"jaxlib: 0.9.0 -> {about['packages']['jaxlib']}"]
    assert result.is_exact


@pytest.mark.slow
def test_verify_on_another_mesh_differs_by_rounding(capsule):
    result = verify(capsule, 1, overrides=MESH)
    assert result.differences["mesh"]
    assert result.differences["config"] == list(MESH)
    assert 0 <= result.steps[0].difference < 1e-5
    assert result.is_exact or "different: mesh, config" in result.verdict


def test_other_data_fail_verification_without_replay(capsule, tmp_path, capsys):
    write_data(tmp_path / "data", 1)
    archive.write(tmp_path / "x.zip", capsule)
    arguments = [str(tmp_path / "x.zip"), f"--data.dataset_path={tmp_path / 'data'}"]
    assert main([*arguments, "--json", "-"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert not said["is_exact"]
    assert not said["steps"]
    assert said["ingredients"]["data"]
    assert "the data have changed since the capsule was made" in said["verdict"]


def test_verify_without_data_raises(capsule):
    with pytest.raises(UserError, match="/nowhere"):
        verify(capsule, 1, overrides=["--data.dataset_path=/nowhere"])


def test_capsule_lists_the_ingredients_of_a_step(capsule):
    about = capsule.about
    assert about["mesh"]["dp_shard"] == 8
    assert about["machine"]["devices"] == 8
    assert about["data"][""]["files"] == 1
    assert tomllib.loads(capsule.files["configs/from_step_0.toml"])["optimizer"]["lr"] == 3e-3
    assert all(about["packages"].values())
    assert len(capsule.files[archive.CURVE].splitlines()) == STEPS


def test_capsule_contains_no_secrets(run, tmp_path, monkeypatch):
    secrets = [
        "hunter2hunter2",
        "sig0123456789",
        "T0/B0/webhook",
        "wandb0123456789",
        "not-asked-for",
    ]
    password, signature, webhook, key, other = secrets
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("SOME_VARIABLE", other)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--dump_to=/tmp/{key}")
    text = (run / "config.toml").read_text()
    changes = {
        "# load_path is not set": f'load_path = "s3://me:{password}@bucket/x?X-Signature={signature}"',
        "writers = []": f'writers = [{{name = "wandb", run_name = "run {key}", '
        f'project = "https://hooks.example.com/{webhook}"}}]',
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    planted = tmp_path / "run"
    planted.mkdir()
    for part in ("configs", "checkpoints", "metrics.jsonl"):
        (planted / part).symlink_to(run / part)
    (planted / "config.toml").write_text(text)
    file = tmp_path / "x.zip"
    assert main([str(planted), "--capsule", str(file)]) == 0
    with zipfile.ZipFile(file) as result:
        whole = "".join(result.read(name).decode() for name in result.namelist())
    assert not [secret for secret in secrets if secret in whole]
    assert 'load_path = "s3://bucket/x"' in whole
    assert "--dump_to=/tmp/removed" in whole
    with pytest.raises(UserError, match="exists: name a new file"):
        main([str(planted), "--capsule", str(file)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('url = "gs://bucket/data"', 'url = "gs://bucket/data"'),
        ('url = "sftp://me:pw@host/a/b#c"', 'url = "sftp://host/a/b"'),
        ('sinks = [{url = "https://me@host:8/x?token=y"}]', 'sinks = [{url = "https://host:8"}]'),
        ('token = "abc"', 'token = ""'),
        ('hf_token = "abc"', 'hf_token = ""'),
        ('{"api_key": "a\\"b", "n": 1}', '{"api_key": "", "n": 1}'),
        ("password = 'x y'", 'password = ""'),
        ('token_dtype = "uint16"', 'token_dtype = "uint16"'),
        ('eos_token = "<eos>"', 'eos_token = "<eos>"'),
        ("eos_token_id = 3", "eos_token_id = 3"),
        ('name = "hf_abcdefghijklmnopqrst"', 'name = "removed"'),
    ],
)
def test_redaction_removes_secrets_from_text(text, expected):
    assert redacted(text, {}) == expected


def test_redaction_removes_secrets_of_the_environment():
    environment = {"MY_TOKEN": "s3cr3t-value", "HOME": "/home/me", "SHORT_KEY": "1"}
    assert redacted("/home/me/s3cr3t-value/1", environment) == "/home/me/removed/1"


def test_damaged_capsule_is_refused(capsule, tmp_path):
    file = tmp_path / "x.zip"
    archive.write(file, capsule)
    assert archive.read(file).files == capsule.files
    whole = file.read_bytes()
    for torn in (whole[: len(whole) // 2], whole[100:], b"", _flipped(whole, 200)):
        file.write_bytes(torn)
        with pytest.raises(UserError, match="not a capsule, or is damaged"):
            archive.read(file)
    with pytest.raises(UserError, match="cannot read the capsule"):
        archive.read(tmp_path / "none.zip")
    with pytest.raises(UserError, match="not a file"):
        archive.read(tmp_path)
    with file.open("wb") as vast:
        vast.truncate(1 << 40)
    with pytest.raises(UserError, match="1,099,511,627,776 bytes are too many"):
        archive.read(file)


def _flipped(content, at):
    return content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("about", "files", "message"),
    [
        ({"format": 1}, {}, "has format 1"),
        ({"format": 2}, {"../x": ""}, "unknown entry '../x'"),
    ],
)
def test_capsule_of_another_format_is_refused(tmp_path, about, files, message):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as result:
        result.writestr("capsule.json", json.dumps(about))
        for name, text in files.items():
            result.writestr(name, text)
    with pytest.raises(UserError, match=message):
        archive.read(tmp_path / "x.zip")


def _rewritten(file, capsule, about=(), **files):
    """Write a capsule with other ingredients and files."""
    names = {"curve": "curve.jsonl", "config": "config.toml"}
    changed = {**capsule.files, **{names.get(name, name): text for name, text in files.items()}}
    retained = {name: text for name, text in changed.items() if text is not None}
    archive.write(file, archive.Capsule({**capsule.about, **dict(about)}, retained))
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curve": None}, "it has no curve.jsonl"),
        ({"config": None}, "it has no config.toml"),
        ({"curve": ""}, "curve.jsonl has no step"),
        ({"curve": "[1]\n"}, "curve.jsonl:1: not a JSON object"),
        ({"curve": "[" * 3000 + "\n"}, "curve.jsonl:1: not a JSON object"),
        ({"curve": '{"step": "x"}\n'}, "curve.jsonl:1: step is not the number of a step"),
        ({"curve": '{"step": 1}\n'}, "curve.jsonl:1: no loss or gradient norm"),
        ({"curve": '{"step": 1, "train/loss": "x"}\n'}, "curve.jsonl:1: train/loss is not a numb"),
        ({"configs/from_step_" + "9" * 5000 + ".toml": "x"}, "is damaged .unknown entry"),
        ({"about": {"mesh": []}}, "capsule.json has no table mesh"),
        ({"about": {"packages": None}}, "capsule.json has no table packages"),
        ({"about": {"mesh": {"tp": "2"}}}, "mesh of capsule.json is not a size for each axis"),
        ({"about": {"mesh": {"x": 2}}}, "mesh of capsule.json is not a size for each axis"),
    ],
)
def test_forged_capsule_is_refused_with_short_message(capsule, tmp_path, changes, message):
    file = _rewritten(tmp_path / "x.zip", capsule, **changes)
    with pytest.raises(UserError, match=message) as caught:
        archive.read(file)
    assert len(str(caught.value)) < 500


def test_decompression_bomb_is_refused(capsule, tmp_path, monkeypatch):
    """The limit applies to declared sizes, and to the bytes read if the declared size is wrong."""
    file = tmp_path / "x.zip"
    large = {"curve.jsonl": " " * (8 << 20)}
    _rewritten(file, capsule, **large)
    with pytest.raises(UserError, match=r"bytes would become 8,"):
        archive.read(file)
    content = file.read_bytes()
    assert content.count((8 << 20).to_bytes(4, "little")) == 2  # in its header and in the index
    file.write_bytes(content.replace((8 << 20).to_bytes(4, "little"), (100).to_bytes(4, "little")))
    reads = []
    monkeypatch.setattr(
        zipfile.ZipExtFile,
        "read",
        lambda self, n=-1, read=zipfile.ZipExtFile.read: reads.append(n) or read(self, n),
    )
    with pytest.raises(UserError, match=r"is damaged .*CRC"):
        archive.read(file)
    assert reads[-1] == 101


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.zip", "--steps", "0"], "--steps 0: must be a number of steps, for a capsule"),
        (["x.zip", "--steps", "1:2"], "--steps 1:2: must be a number of steps"),
        (["x.zip"], "cannot read the capsule x.zip"),
        (["x.zip", "--capsule", "y"], "--capsule does not apply to a capsule"),
        (["runs/x", "--capsule", "y", "--train.seed=1"], "Remove this setting"),
        (["runs/x", "--capsule", "y", "--steps", "3"], "--steps does not apply to --capsule"),
        (["runs/x", "--capsule", "y"], "no run at runs/x: it has no config.toml"),
    ],
)
def test_invalid_capsule_arguments_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        main(arguments)


def test_capsule_on_other_devices_raises(run, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    with pytest.raises(UserError, match="does not fit 3 devices: make the capsule where"):
        capsule_of(run)


def test_code_state_reflects_git(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    assert set(code_state(file)) == {"sha256"}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *arguments], check=True)
    clean = code_state(file)
    assert not clean["changed"]
    file.write_text("x = 2\n")
    changed = code_state(file)
    assert changed["commit"] == clean["commit"]
    assert changed["changed"]
    assert changed["sha256"] != clean["sha256"]
    assert len(changed["difference_sha256"]) == 64
