"""Starts that would lose data or change a run: refusals and warnings."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxforge.commands import train
from jaxforge.config import load_config, load_unresolved, rules
from jaxforge.data.sources import open_training_data
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.runs import run_directory
from jaxforge.tools.plan import dry_run
from jaxforge.training import launch
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("one_device")


def config(run, max_steps=2, **sections):
    train_section = {"max_steps": max_steps, **sections.pop("train", {})}
    checkpoint = {"dir": str(run), "interval": 1}
    return tiny_config(train=train_section, checkpoint=checkpoint, **sections)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps; tests use copies."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert launch.fit(config(run)) is Exit.COMPLETED
    return run


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def dry(run, *settings, **sections):
    """Do a dry run on the run directory and return its exit code."""
    path = run.with_name("dry.toml")
    path.write_text(config(run, **sections).to_toml())
    return dry_run.run(load_unresolved(path, settings), "")


@pytest.mark.parametrize("start", [lambda run: launch.fit(config(run, 4)), lambda run: dry(run)])
def test_run_with_lost_checkpoints_does_not_restart(run, start):
    shutil.rmtree(run / "checkpoints")
    metrics = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        UserError, match=r"logged 2 steps and saved checkpoints, and no checkpoint is left"
    ):
        start(run)
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert not list(run.glob("*before*"))


def test_damaged_metrics_are_renamed(tmp_path):
    text = '{"step": 1}\n' + "[" * 100_000 + '\n{"step": "x"}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    run_directory.check_not_lost(tmp_path)
    run_directory.rename_old_metrics(tmp_path)
    assert (tmp_path / "metrics.before_1.jsonl").read_text() == text


@pytest.mark.slow
def test_metrics_before_first_checkpoint_are_renamed(run, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / "starts.jsonl").unlink()
    lines = [json.dumps({"step": step, "train/loss": 9.0}) for step in (1, 2, 3)]
    text = "\n".join([*lines, '{"step": 4, "tr'])
    for _ in range(2):
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        (run / "metrics.jsonl").write_text(text)
        assert launch.fit(config(run)) is Exit.COMPLETED
        logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in logged if "train/loss" in line] == [1, 2]
    for number in (1, 2):
        assert (run / f"metrics.before_{number}.jsonl").read_text() == text
    assert "metrics.jsonl is now metrics.before_2.jsonl" in capsys.readouterr().err


def test_edited_config_is_compared_with_last_start(run, capsys):
    path = run / "config.toml"
    text = path.read_text()
    assert "lr = 0.003" in text
    path.write_text(text.replace("lr = 0.003", "lr = 0.002"))
    settings = ["--train.max_steps=3", f"--checkpoint.dir={run}"]
    assert launch.fit(load_config(path, settings)) is Exit.COMPLETED
    log = capsys.readouterr().err
    assert "changed since this run last started: optimizer.lr 0.003 -> 0.002" in log
    assert "changed since this run last started: train.max_steps 2 -> 3" in log


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_config_of_moved_run_raises_at_old_path(run, option):
    command = ["--config", str(run / "config.toml"), "--train.max_steps=3", *option]
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("finished", "gone"))
    with pytest.raises(UserError, match=rf"where no run is\. .* --checkpoint\.dir={run} resumes"):
        train.main(command)
    assert train.main([*command, f"--checkpoint.dir={run}"]) == 0


def test_dry_run_reports_failures_of_a_start(run, capsys):
    assert dry(run) == 0
    out = capsys.readouterr().out
    assert "run: resumes from step 2\n" in out, out
    with pytest.raises(UserError, match=r"step_2 does not fit \[model\]: "):
        dry(run, "--model.dim=32")
    with pytest.raises(UserError, match=r"another optimizer than optimizer\.name"):
        dry(run, "--optimizer.name=lion")


def test_dry_run_compares_data(tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    np.save(data / "a.npy", np.arange(999, dtype=np.uint16) % 256)
    assert launch.fit(config(run, 1, data={"dataset_path": str(data)})) is Exit.COMPLETED
    np.save(data / "a.npy", np.arange(998, dtype=np.uint16) % 256)
    with pytest.raises(UserError, match="had 999 tokens, and has 998"):
        dry(run, data={"dataset_path": str(data)})


@pytest.fixture(scope="module")
def trained_on_data(tmp_path_factory):
    """A run of one step on token shards."""
    location = tmp_path_factory.mktemp("data")
    np.save(location / "a.npy", np.arange(999, dtype=np.uint16) % 256)
    run = location / "run"
    assert launch.fit(config(run, 1, data={"dataset_path": str(location)})) is Exit.COMPLETED
    return run


@pytest.mark.slow
def test_new_model_may_train_on_random_tokens(tmp_path, capsys):
    assert launch.fit(config(tmp_path, 1, data={"dataset_type": "auto"})) is Exit.COMPLETED
    assert "no data are set, so tokens are random" in "".join(capsys.readouterr())
    assert launch.fit(config(tmp_path, 2, data={"dataset_type": "auto"})) is Exit.COMPLETED


@pytest.mark.parametrize("start", [lambda config: launch.fit(config), lambda config: dry(
    Path(config.checkpoint.dir), data={"dataset_type": "auto"})])  # fmt: skip
def test_resume_without_data_on_random_tokens_raises(trained_on_data, tmp_path, start, capsys):
    run = shutil.copytree(trained_on_data, tmp_path / "run")
    with pytest.raises(UserError, match=r'random tokens would spoil .*dataset_type = "synthetic"'):
        start(config(run, 2, data={"dataset_type": "auto"}))
    assert "tokens are random" not in "".join(capsys.readouterr())


def test_loaded_weights_train_on_random_tokens_only_if_configured(trained_on_data, tmp_path):
    def run(dataset_type):
        job = config(tmp_path / "new", 2, data={"dataset_type": dataset_type})
        load = job.checkpoint.model_copy(update={"load_path": str(trained_on_data)})
        return launch.fit(job.model_copy(update={"checkpoint": load}))

    with pytest.raises(UserError, match="random tokens would spoil"):
        run("auto")
    assert run("synthetic") is Exit.COMPLETED


def test_dataset_takes_precedence_over_random_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(999, dtype=np.uint16) % 256)
    result = open_training_data(
        tiny_config(data={"dataset_type": "synthetic", "dataset_path": str(tmp_path)})
    )
    assert len(result) == 999 // 33


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr": 3e4}, r"lr = 30000 moves every weight by about 30000 .*; did you mean 0\.0003\?"),
        ({"name": "lion", "lr": 11}, r"lr = 11 moves"),
        (
            {"name": "muon", "muon": {"adam_lr": 3e3}},
            r"muon\.adam_lr = 3000 .*; did you mean 0\.003",
        ),
    ],
)
def test_absurd_learning_rate_raises(keys, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(optimizer=keys)


def test_home_directory_is_expanded_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    keys = ["checkpoint.dir", "checkpoint.load_path", "checkpoint.non_persistent_dir",
            "checkpoint.replica_dir", "data.dataset_path", "data.tokenizer_path",
            "train.executable", "profiling.trace_dir", "train.compilation_cache_dir",
            "data.cache_dir"]  # fmt: skip
    listed = ["--data.datasets=[{path='~/a'}]", "--eval.datasets=[{name='x',dataset_path='~/a'}]"]
    result = load_config(None, [*(f"--{key}=~/a" for key in keys), *listed])
    for key in keys:
        section, _, name = key.partition(".")
        assert getattr(getattr(result, section), name) == "/home/me/a", key
    assert result.data.datasets[0].path == result.eval.datasets[0].dataset_path == "/home/me/a"
    with pytest.raises(UserError, match=r"--checkpoint\.dir=~nobody0/x: the home directory of ~"):
        load_config(None, ["--checkpoint.dir=~nobody0/x"])


def test_eos_without_effect_raises_or_warns(tmp_path, messages):
    np.save(tmp_path / "a.npy", np.arange(999, dtype=np.uint16) % 100)

    def data(eos, **keys):
        return {"dataset_path": str(tmp_path), "pack_sequences": True, "eos_token_id": eos, **keys}

    with pytest.raises(
        UserError,
        match=r"eos_token_id = 500 must be less than "
        r"model\.vocab_size = 256",
    ):
        rules.check(tiny_config(data=data(500)), 1)
    with pytest.raises(UserError, match=r"token 256, which ends documents, is outside"):
        open_training_data(tiny_config(data=data(None, tokenizer_path="byte")))
    open_training_data(tiny_config(data=data(7)))
    assert not messages.messages
    open_training_data(tiny_config(data=data(200)))
    assert "token 200, which ends documents, is not among the first 999 tokens" in messages.text
