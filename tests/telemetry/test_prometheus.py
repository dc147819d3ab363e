"""Metrics for Prometheus and probes of Kubernetes, over real HTTP."""

import json
import logging
import logging.handlers
import math
import queue
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import jaxforge as jf
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.telemetry import prometheus
from jaxforge.telemetry.goodput import CATEGORIES
from jaxforge.telemetry.prometheus import GAUGES, MetricsServer, RunMetrics
from jaxforge.training.health.watchdog import Limits, Watchdog
from jaxforge.training.instruments import serving_metrics
from tests.conftest import tiny_config
from tests.machine import PATIENCE
from tests.processes.launching import free_port

ROOT = Path(__file__).parents[2]
LABELS = {"process", "category", "jaxforge_activity", "version"}


def get(port, path, accept=""):
    """Return status, content type and text of a response."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def values_of(families):
    """Return the values of samples by name and labels without the process."""
    values = {}
    for family in families:
        for sample in family.samples:
            assert set(sample.labels) <= LABELS
            labels = {name: text for name, text in sample.labels.items() if name != "process"}
            values[sample.name, *labels.values()] = sample.value
    return values


def scrape(port):
    """Return the values of a run, parsed strictly as OpenMetrics."""
    status, kind, text = get(port, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
    assert text.endswith("# EOF\n")
    return values_of(openmetrics.text_string_to_metric_families(text))


class Probe(jf.Callback):
    """A client that asks at some events of a run."""

    def __init__(self, port):
        self.port, self.ready, self.scraped = port, {}, {}

    def ask(self, moment):
        self.ready[moment] = get(self.port, "/readyz")[::2]
        assert get(self.port, "/healthz")[::2] == (200, "ok\n")
        self.scraped[moment] = scrape(self.port)

    def on_train_begin(self, config):
        self.ask("begin")

    def on_step_end(self, context):
        if context.step in (1, 12):
            self.ask(context.step)

    def on_train_end(self, step, tokens_seen, reason):
        self.ask("end")


@pytest.mark.usefixtures("one_device")
def test_run_serves_metrics_and_readiness(tmp_path):
    probe = Probe(free_port())
    config = tiny_config(
        train={"max_steps": 13},
        checkpoint={"dir": str(tmp_path / "run"), "interval": 5},
        metrics={"prometheus_port": probe.port, "prometheus_address": "127.0.0.1",
                 "log_interval": 2},
    )  # fmt: skip
    assert jf.fit(config, callbacks=[probe]) is Exit.COMPLETED
    assert probe.ready == {
        "begin": (503, "not training: start\n"), 1: (200, "ok\n"), 12: (200, "ok\n"),
        "end": (503, "not training: other\n"),
    }  # fmt: skip
    begin, late, end = (probe.scraped[moment] for moment in ("begin", 12, "end"))
    assert begin["jaxforge_step",] == 0
    assert ("jaxforge_loss",) not in begin
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (logged,) = (x for x in lines if x["step"] == 12 and "train/loss" in x)
    assert (late["jaxforge_step",], late["jaxforge_logged_step",]) == (12, 12)
    assert late["jaxforge_max_steps",] == 13
    for metric in ("train/loss", "train/tokens", "train/lr", "train/step_time_sec"):
        assert late[f"jaxforge_{GAUGES[metric].name}",] == pytest.approx(logged[metric])
    assert 0 < late["jaxforge_goodput_ratio",] < 1
    seconds = {name: end["jaxforge_time_seconds_total", name] for name in CATEGORIES}
    assert all(seconds[name] > 0 for name in ("start", "compile", "step", "save"))
    assert late["jaxforge_time_seconds_total", "step"] <= seconds["step"]
    assert late["jaxforge_activity", "step"] == 1
    assert end["jaxforge_checkpoint_age_seconds",] >= 0
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(probe.port, "/healthz")


@pytest.fixture
def server():
    """The server of a process that has logged every metric, with its watchdog."""
    watchdog = Watchdog(Limits(60, 30))
    metrics = RunMetrics(3, 100, watchdog.clock, watchdog.activity)
    metrics.write(7, {"train/secret": 1.0} | dict.fromkeys(GAUGES, 2.0) | {"train/loss": math.nan})
    server = MetricsServer(metrics, watchdog.clock, lambda: watchdog.idle(0.0), "127.0.0.1", 0)
    server.start()
    yield server, watchdog
    server.stop()


def test_text_format_has_every_metric(server):
    status, kind, text = get(server[0].port, "/metrics")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert 'jaxforge_learning_rate{process="3"} 2.0\n' in text
    assert "secret" not in text
    values = values_of(text_string_to_metric_families(text))
    assert values["jaxforge_device_memory_peak_bytes",] == 2**31
    assert values["jaxforge_step_time_seconds",] == 2
    assert math.isnan(values["jaxforge_loss",])
    names = {name for name, *_ in values}
    listed = (ROOT / "docs" / "metrics.md").read_text().partition("## Prometheus")[2]
    listed = listed.partition("\n## ")[0]
    assert names == set(re.findall(r"`(jaxforge_\w+)[`{]", listed))


def test_dashboard_queries_existing_metrics(server):
    names = {name for name, *_ in scrape(server[0].port)}
    dashboard = json.loads((ROOT / "examples/launch/grafana_dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries.append(dashboard["templating"]["list"][1]["query"]["query"])
    used = {name for query in queries for name in re.findall(r"jaxforge_\w+", query)}
    assert len(used) > 15
    assert used <= names
    grids = [panel["gridPos"] for panel in dashboard["panels"]]
    covered = [(x, y) for p in grids for x in range(p["x"], p["x"] + p["w"])
               for y in range(p["y"], p["y"] + p["h"])]  # fmt: skip
    assert len(covered) == len(set(covered))


def test_expired_watchdog_is_unhealthy(server):
    server, watchdog = server
    assert get(server.port, "/healthz")[0] == 200
    watchdog.idle(59.0)
    assert get(server.port, "/healthz")[0] == 200
    watchdog.idle(1.0)
    status, _, text = get(server.port, "/healthz")
    assert status == 503
    assert text == (
        "hung: no progress in training for 60 s, before the first step "
        "(train.watchdog_setup_sec = 60)\n"
    )
    assert get(server.port, "/")[::2] == (404, "there are /metrics, /healthz and /readyz\n")


def test_taken_port_is_reported_and_the_run_continues(monkeypatch):
    records = logging.handlers.QueueHandler(queue.SimpleQueue())
    monkeypatch.setattr(prometheus.log, "handlers", [records])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tiny_config(metrics={"prometheus_port": port, "prometheus_address": "127.0.0.1"})
        with serving_metrics(config, Watchdog(Limits(0, 0))) as metrics:
            metrics.write(1, {"train/loss": 1.0})
    message = records.queue.get_nowait().getMessage()
    assert records.queue.empty()
    assert f"port {port} of 127.0.0.1 is in use by another process. The run continues" in message
    assert "set another metrics.prometheus_port" in message


def test_server_is_off_by_default():
    with serving_metrics(tiny_config(), Watchdog(Limits(0, 0))) as metrics:
        assert metrics is None


def test_missing_library_is_explained(monkeypatch):
    monkeypatch.setattr(prometheus, "_LIBRARY", "no_such_library")
    config = tiny_config(metrics={"prometheus_port": 1})
    context = serving_metrics(config, Watchdog(Limits(0, 0)))
    with pytest.raises(UserError, match=r"pip install 'jaxforge\[prometheus\]'"):
        context.__enter__()
