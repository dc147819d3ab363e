"""Metrics in MLflow, read back through MLflow's own client."""

import io
import math

import pytest
from rich.console import Console

from jaxforge.errors import UserError
from jaxforge.telemetry.metric_writers import open_writers
from jaxforge.telemetry.sinks import Sample
from jaxforge.telemetry.writers import MlflowSink
from tests.conftest import tiny_config


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return f"file://{tmp_path}/mlruns"


def config(store, log_interval=10, **keys):
    writer = {"name": "mlflow", "location": store, **keys}
    return tiny_config(metrics={"log_interval": log_interval, "writers": writer})


def client(store):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store)


def test_restart_continues_the_run_with_every_metric(store):
    settings = config(store, project="e", run_name="first")
    sink = MlflowSink(settings, "id1")
    sink.write(1, {"train/loss": 2.5, "moe/tokens": [1, 3], "eval/loss": math.nan})
    sink.write_samples(1, [Sample("a", "b")])
    sink.close(exit_code=1)
    again = MlflowSink(settings, "id1")
    again.write(2, {"train/loss": 2.25})
    assert again.run_id == sink.run_id
    again.close(exit_code=0)
    reader = client(store)
    run = reader.get_run(sink.run_id)
    history = reader.get_metric_history(sink.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.5), (2, 2.25)]
    assert run.data.metrics == {"train/loss": 2.25, "moe/tokens/0": 1.0, "moe/tokens/1": 3.0}
    assert run.data.params["model.dim"] == "64"
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert reader.get_experiment_by_name("e").experiment_id == run.info.experiment_id
    assert [file.path for file in reader.list_artifacts(run.info.run_id, "samples")] == [
        "samples/step_1.json"
    ]


def test_store_has_the_config_without_secrets(store, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "opensesame")
    settings = tiny_config(
        metrics={"writers": [
            {"name": "mlflow", "location": store},
            {"name": "trackio", "run_name": "token=opensesame"},
        ]},
    )  # fmt: skip
    MlflowSink(settings, "id1").close(exit_code=0)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"opensesame" not in stored
    assert any(path.name == "model.n_layers" for path in tmp_path.rglob("*"))


def test_failed_run_is_marked_as_failed(store):
    sink = MlflowSink(config(store), "id1")
    sink.close(exit_code=16)
    assert client(store).get_run(sink.run_id).info.status == "FAILED"


def test_other_run_id_begins_another_run(store):
    first, second = (MlflowSink(config(store), run_id) for run_id in ("id1", "id2"))
    assert first.run_id != second.run_id
    joined = MlflowSink(config(store, run_id=first.run_id), "id3")
    assert joined.run_id == first.run_id


def test_file_stores_metrics(tmp_path):
    pytest.importorskip("sqlalchemy", reason="the extra mlflow is not installed")
    database = f"sqlite:///{tmp_path}/mlflow.db"
    sink = MlflowSink(config(database), "id1")
    sink.write(1, {"train/loss": 2.5})
    sink.close(exit_code=0)
    assert client(database).get_run(sink.run_id).data.metrics == {"train/loss": 2.5}


@pytest.mark.parametrize("uri", ["mlruns", "file://{}/mlruns", "ftp://host/store"])
def test_store_that_mlflow_cannot_use_is_refused_at_the_start(tmp_path, monkeypatch, uri):
    """A run that only logged the failure would end with code 0 and without metrics."""
    monkeypatch.chdir(tmp_path)
    settings = config(uri.format(tmp_path), log_interval=1)
    settings = settings.model_copy(
        update={"checkpoint": settings.checkpoint.model_copy(update={"dir": str(tmp_path)})}
    )
    with pytest.raises(UserError, match=r'MLflow refuses: .*or to a file such as "sqlite:///'):
        open_writers(Console(file=io.StringIO()), settings, "id1", 0)


def test_unknown_run_is_refused(store):
    with pytest.raises(UserError, match=r"mlflow in metrics.writers: MLflow refuses"):
        MlflowSink(config(store, run_id="0" * 32), "id1")
