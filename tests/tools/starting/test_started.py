"""The output of `prepare` trains without changes."""

import json

import pytest

from jaxforge.commands import prepare, train


@pytest.mark.slow
def test_prepared_config_trains_from_any_directory(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("all work and no play\n" * 2000)
    monkeypatch.chdir(tmp_path)
    assert prepare.main(["text.txt", "--output", "mine", "--machine", "cpu"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = str(tmp_path / "mine" / "train.toml")
    settings = ["--train.max_steps=3", "--checkpoint.interval=100", "--model.n_layers=1"]
    assert train.main(["--config", config, *settings]) == 0
    lines = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "train/loss" in line][-1] == 3
    assert (tmp_path / "runs" / "mine" / "checkpoints" / "step_3").is_dir()
    log = (tmp_path / "runs" / "mine" / "logs" / "process_0.log").read_text()
    assert log.count(" WARNING ") == log.count("checkpoint.interval = 100 exceeds") == 1
