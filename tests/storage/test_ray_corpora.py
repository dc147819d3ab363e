"""Preparation on a Ray cluster from bucket to bucket, with failing requests and lost processes."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import emulator_of

from jaxforge.commands import prepare
from jaxforge.storage import buckets, files
from tests.data.corpus.interruptions import snapshot, write_records
from tests.machine import PATIENCE, wait_until

ray = pytest.importorskip("ray")

OPTIONS = ("--unit-bytes", "20000", "--validation-fraction", "0.1")


@pytest.fixture(scope="module")
def cluster():
    """Return a cluster of two nodes whose processes use the emulators."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    for kind in ("s3", "gs"):
        os.environ.update(emulator_of(kind).env)
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    yield cluster
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_records(directory, 100)
    return directory


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("reference") / "out"
    prepare.main([str(corpus), "--output", str(output), *OPTIONS, "--workers", "1"])
    return snapshot(output)


def finished(output):
    names = buckets.keys(f"{output}/.prepare/parts")
    return len([name for name in names if name.endswith(".json")])


def busy_worker():
    """Return a process of Ray that is running a task, or None."""
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith("ray::run_task"):
            return process.pid
    return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_lost_worker_and_node_leave_the_same_bytes(cluster, corpus, reference, kind):
    node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    server = emulator_of(kind)
    url = server.url("ray")
    for path in corpus.iterdir():
        files.write(f"{url}/in/{path.name}", path.read_bytes())
    before = server.refused
    server.fail(9)
    command = [sys.executable, "-m", "jaxforge.prepare", f"{url}/in", "--output", f"{url}/out",
               *OPTIONS, "--engine", "ray", "--address", cluster.address]  # fmt: skip
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: finished(f"{url}/out") > 2 and busy_worker())
    os.kill(busy_worker(), signal.SIGKILL)
    lost = finished(f"{url}/out")
    wait_until(lambda: finished(f"{url}/out") > lost + 2)
    cluster.remove_node(node, allow_graceful=False)
    shown = driver.communicate(timeout=PATIENCE)
    server.throttle(0)
    assert driver.returncode == 0, shown
    assert server.refused - before > 20
    names = [name for name in buckets.keys(f"{url}/out") if name != "train.toml"]
    content = {name: files.read(f"{url}/out/{name}") for name in names}
    assert content == reference
