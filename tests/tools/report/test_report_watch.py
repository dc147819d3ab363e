"""`report --watch`: served content, access, and incremental reading."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from jaxforge.commands.report import main
from jaxforge.errors import UserError
from jaxforge.runs.metrics_file import MetricsFile
from jaxforge.tools.report.run_page import LivePage, ReportHandler, Server
from tests.machine import PATIENCE, wait_until
from tests.tools.report.pages import line, write_run


@pytest.fixture
def served(tmp_path):
    """Return a function that queries a server of tmp_path/run, which does not exist yet."""
    with Server(LivePage([tmp_path / "run"], "steps"), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        def ask(path, host=None):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
            connection.request("GET", path, headers={"Host": host or f"localhost:{server.port}"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers

        yield ask
        server.shutdown()


def append(path, *lines):
    with (path / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(item) + "\n" for item in lines))


def test_watch_serves_updates_of_a_run(tmp_path, served):
    status, page, headers = served("/")
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert "connect-src 'self'" in page
    assert "run: waiting for its first step" in page
    path = write_run(tmp_path / "run", [line(1)], tail='{"step": 2, "ti')
    _, first, _ = served("/data.json?since=")
    known = json.loads(first)
    assert known["data"]["charts"][0]["curves"][0]["last"] == 5.99
    assert served(f"/data.json?since={known['version']}")[:2] == (204, "")
    (path / "metrics.jsonl").write_text("")
    append(path, line(1), line(2))
    _, second, _ = served(f"/data.json?since={known['version']}")
    assert json.loads(second)["data"]["charts"][0]["curves"][0]["last"] == 5.98
    assert "5.9800" in json.loads(second)["facts"]


def test_watch_shows_damaged_lines(tmp_path, served):
    write_run(tmp_path / "run", [line(1)], tail="no <b>\n")
    status, page, _ = served("/")
    assert status == 200
    assert "metrics.jsonl:2: not a JSON object" in page


def test_idle_connections_do_not_block_others(tmp_path, monkeypatch):
    """Beyond the limit the oldest connection is closed, and idle connections time out."""
    write_run(tmp_path / "run", [line(1)])
    before = threading.active_count()
    with Server(LivePage([tmp_path / "run"], "steps"), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = ("127.0.0.1", server.port)
        with contextlib.ExitStack() as stack:
            idle = [
                stack.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(100)
            ]
            asked = http.client.HTTPConnection(*address, timeout=PATIENCE)
            asked.request("GET", "/")
            assert asked.getresponse().status == 200
            assert idle[0].recv(1) == b""  # it was closed
            assert threading.active_count() - before < 70
        server.shutdown()
    monkeypatch.setattr(ReportHandler, "timeout", 0.01)
    with Server(LivePage([tmp_path / "run"], "steps"), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as silent:
            assert silent.recv(1) == b""
        server.shutdown()


def test_server_error_is_answered_and_printed(tmp_path, served, monkeypatch, capsys):
    monkeypatch.setattr(LivePage, "page", lambda self: 1 / 0)
    status, said, _ = served("/")
    assert (status, said) == (500, "failed: see the terminal")
    printed = []

    def is_printed():
        printed.append(capsys.readouterr().err)
        return "ZeroDivisionError" in "".join(printed)

    wait_until(is_printed)


def test_foreign_hosts_are_refused(served):
    assert served("/", host="evil.example")[0] == 403
    assert served("/data.json", host="evil.example:80")[0] == 403
    assert served("/../../etc/passwd")[0] == 404


def test_update_reads_appended_lines_only(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run", [line(s) for s in range(1, 6)])
    metrics = MetricsFile(path)
    before, _ = metrics.read()
    append(path, line(6))
    began = []
    monkeypatch.setattr(MetricsFile, "_begin", lambda self: began.append(1))
    after, _ = metrics.read()
    assert after["train/loss"].step.tolist() == [*before["train/loss"].step.tolist(), 6]
    assert not began


def test_rewritten_metrics_are_read_again(tmp_path):
    """The rewritten file is longer than before."""
    path = write_run(tmp_path / "run", [line(s) for s in range(1, 6)])
    metrics = MetricsFile(path)
    metrics.read()
    (path / "metrics.jsonl").write_text("")
    append(path, line(1), line(2), *(line(s, **{"train/loss": 1.0}) for s in range(3, 8)))
    loss = metrics.read()[0]["train/loss"]
    assert loss.step.tolist() == list(range(1, 8))
    assert loss.value.tolist() == [5.99, 5.98, *[1.0] * 5]


def test_occupied_port_raises(tmp_path):
    with Server(LivePage([tmp_path], "steps"), 0) as server:
        with pytest.raises(UserError, match=f"port {server.port} is taken; name another") as error:
            main([str(tmp_path), "--watch", str(server.port)])
        assert error.value.exit_code == 2
    with pytest.raises(UserError, match="remove --output"):
        main(["--output", "x.html", "--watch", str(tmp_path)])


@pytest.mark.processes
def test_ctrl_c_stops_server(tmp_path):
    command = [sys.executable, "-m", "jaxforge", "report", str(tmp_path), "--watch", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as served:
        assert served.stdout.readline().startswith("http://127.0.0.1:")
        os.kill(served.pid, signal.SIGINT)
        out, err = served.communicate(timeout=PATIENCE)
    assert (served.returncode, out.strip(), err) == (0, "ended", "")
