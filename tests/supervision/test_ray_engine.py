"""The table of hosts of a job on Ray, without Ray."""

import dataclasses
import signal

import pytest

from jaxforge.errors import UserError
from jaxforge.supervision import ray_engine
from jaxforge.supervision.ray_engine import SharedView, Table
from jaxforge.supervision.rosters import Status
from tests.machine import PATIENCE


def connected(table, host, *, ask=None, timeout=PATIENCE):
    status = Status(host, f"supervisor {host}")
    return SharedView("node", 3, timeout, ask or table.exchange, lambda: status)


def test_lost_host_is_gone_until_it_is_heard_again():
    table = Table(30.0)
    first, second = connected(table, 0), connected(table, 1)
    first.view()
    assert sorted(second.view().alive) == [0, 1]
    assert table.lose(0)
    assert not table.lose(0)  # known
    second.publish()
    assert (second.view().gone, sorted(second.view().last)) == ({0, 2}, [0])
    first.publish()
    second.publish()
    assert sorted(second.view().alive) == [0, 1]


def test_silent_host_is_gone():
    table = Table(0.0)
    connected(table, 0).view()
    assert connected(table, 1).view().gone == {0, 2}


def test_news_of_a_host_are_sent_at_once_and_other_statuses_each_second():
    table, calls = Table(30.0), []
    status = Status(0, "supervisor 0")
    view = SharedView("node", 1, 30.0, lambda s: calls.append(s) or table.exchange(s),
                      lambda: status)  # fmt: skip
    view.view()
    view.view()
    assert calls == [status]
    status = dataclasses.replace(status, phase="running")
    view.view()
    assert calls[1:] == [status]
    assert table.is_running()


def test_stop_of_the_job_reaches_each_host_once(monkeypatch):
    received = []
    monkeypatch.setattr(signal, "raise_signal", received.append)
    table = Table(30.0)
    view = connected(table, 0)
    view.publish()
    table.stop(signal.SIGTERM)
    view.publish()
    view.publish()
    assert received == [signal.SIGTERM]


def test_host_that_is_cut_off_from_the_table_ends(monkeypatch):
    ends = []
    monkeypatch.setattr(ray_engine, "end_now", ends.append)
    connected(None, 0, ask=lambda _: None).publish()
    assert not ends
    connected(None, 0, ask=lambda _: None, timeout=-1.0).publish()
    assert ends == [69]


def test_missing_ray_is_explained(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'jaxforge\[ray\]'"):
        ray_engine.supervise(["true"], 1, None, None, None, {"GPU": 8})


def test_resources_are_options_of_an_actor():
    options = ray_engine._actor_options({"GPU": 8, "CPU": 16, "TPU": 4})
    assert (options["num_gpus"], options["num_cpus"], options["resources"]) == (8, 16, {"TPU": 4})
