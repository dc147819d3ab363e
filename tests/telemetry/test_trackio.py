"""Metrics in Trackio, read back from its own local store."""

import math

import pytest

from jaxforge.commands import train
from jaxforge.errors import UserError
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.sinks import Sample
from jaxforge.telemetry.writers import TrackioSink
from tests.conftest import tiny_config

trackio = pytest.importorskip("trackio")
from trackio import fragments, sqlite_storage, utils  # noqa: E402
from trackio.sqlite_storage import SQLiteStorage  # noqa: E402

SECRET = "hf_" + "s3cr3tOfTheTest" * 2


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """Local files below the test's directory; Trackio reads its variable when it is imported."""
    for module in (trackio, utils, sqlite_storage, fragments):
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path


def config(**keys):
    return tiny_config(metrics={"writers": {"name": "trackio", "project": "ours", **keys}})


def points(run_id):
    return SQLiteStorage.get_logs("ours", run_id)


def test_restart_continues_the_run_with_every_metric(store, capsys):
    sink = TrackioSink(config(run_name="long"), "id1")
    sink.write(1, {"train/loss": 2.5, "moe/tokens": [1, 3], "eval/loss": math.nan})
    sink.write_samples(1, [Sample("a", "b")])
    sink.close(exit_code=1)
    again = TrackioSink(config(run_name="long"), "id1")
    again.write(2, {"train/loss": 2.25})
    again.close(exit_code=0)
    losses = [(row["step"], row["train/loss"]) for row in points("long-id1") if "train/loss" in row]
    assert losses == [(1, 2.5), (2, 2.25)]
    first = points("long-id1")[0]
    assert (first["moe/tokens/0"], first["moe/tokens/1"]) == (1.0, 3.0)
    assert "eval/loss" not in first
    assert "samples" in points("long-id1")[1]
    said = capsys.readouterr()
    assert said.out == ""
    assert "Trackio project initialized" in said.err


def test_other_run_id_begins_another_run(store):
    for run_id in ("id1", "id2"):
        sink = TrackioSink(config(), run_id)
        sink.write(1, {"train/loss": 1.0})
        sink.close(exit_code=0)
    assert [len(points(run_id)) for run_id in ("id1", "id2")] == [1, 1]


def test_store_has_the_config_without_secrets(store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MY_PASSWORD", "opensesame")
    settings = tiny_config(
        metrics={"writers": [
            {"name": "trackio", "project": "ours"},
            {"name": "mlflow", "location": "https://me:opensesame@host/path"},
        ]},
        checkpoint={"dir": f"{store}/{SECRET}"},
    )  # fmt: skip
    sink = TrackioSink(settings, "id1")
    sink.write(1, {"train/loss": 1.0})
    sink.close(exit_code=0)
    stored = b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
    assert b"n_layers" in stored
    assert SECRET.encode() not in stored
    assert b"opensesame" not in stored


def test_refused_project_names_the_setting(store):
    with pytest.raises(UserError, match=r"trackio in metrics.writers: Trackio refuses"):
        TrackioSink(config(project="registry-ours"), "id1")


def test_server_without_a_write_token_is_refused(store, monkeypatch):
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"write token"):
        TrackioSink(config(), "id1")


def test_unreachable_server_delays_no_step(store, monkeypatch):
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", SECRET)
    writer = MetricWriter("Trackio", TrackioSink(config(), "id1"), 1)
    writer.write(1, {"train/loss": 1.0})
    assert writer.close()


@pytest.mark.slow
def test_training_logs_to_trackio(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").touch()
    settings = ["--config=x.toml", "--metrics.writers={'name':'trackio','project':'ours'}",
                "--metrics.log_interval=1", "--train.max_steps=2", "--train.batch_size=1",
                "--train.seq_len=16", "--train.mixed_precision=fp32", "--model.dim=32",
                "--model.n_layers=1", "--model.n_heads=2", "--model.vocab_size=64",
                "--checkpoint.dir=run", "--checkpoint.interval=100",
                "--distributed.dp_shard=-1"]  # fmt: skip
    assert train.main(settings) == 0
    assert train.main([*settings, "--train.max_steps=3"]) == 0
    (run_id,) = SQLiteStorage.get_runs("ours")
    assert [row["step"] for row in points(run_id) if "train/loss" in row] == [1, 2, 3]
