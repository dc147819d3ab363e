"""Preparation on a Ray cluster: the same bytes, whatever workers and nodes are lost."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import ray_engine
from jaxforge.errors import UserError
from tests.data.corpus.interruptions import snapshot, write_records
from tests.machine import PATIENCE, wait_until

ray = pytest.importorskip("ray")

ROOT = Path(__file__).parents[3]

FILES = 200


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_records(directory, FILES)
    return directory


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("reference") / "out"
    prepare.main([*options(corpus, output), "--workers", "1"])
    return snapshot(output)


def options(corpus, output, *more):
    command = (corpus, "--output", output, "--unit-bytes", 30_000,
               "--validation-fraction", "0.1", *more)  # fmt: skip
    return [*map(str, command)]


def start(cluster, corpus, output):
    """Start a driver in another process."""
    words = options(corpus, output, "--engine", "ray", "--address", cluster.address)
    command = [sys.executable, "-m", "jaxforge.prepare", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers_of(output):
    """Return the processes that are preparing a unit."""
    texts = (read(path) for path in output.with_name(".out.partial").glob("parts/*.lock"))
    return [int(match[1]) for text in texts if (match := re.match(r"process (\d+)", text))]


def read(path):
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def finished(output):
    return len(list(output.with_name(".out.partial").glob("parts/*.json")))


def test_lost_worker_driver_and_node_leave_the_same_bytes(cluster, corpus, reference, tmp_path):
    output = tmp_path / "out"
    driver = start(cluster, corpus, output)
    wait_until(lambda: finished(output) > 2 and workers_of(output))
    os.kill(workers_of(output)[0], signal.SIGKILL)
    lost = finished(output)
    wait_until(lambda: finished(output) > lost)
    driver.kill()
    first = driver.communicate()
    before = finished(output)
    assert before > 2
    assert not output.exists()
    driver = start(cluster, corpus, output)
    wait_until(lambda: finished(output) > before + 2)
    cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
    shown = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 0, shown
    assert "resuming from" in shown[1]
    assert re.search(r"\.jsonl.* is repeated: (WorkerCrashed|NodeDied)", first[1] + shown[1])
    assert snapshot(output) == reference


@pytest.mark.slow
def test_repeated_records_are_dropped_over_the_cluster(cluster, tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(6):
        texts = [f"text {j}" for j in range(i, 3 * i + 2)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "corpus" / f"{i}.jsonl").write_text(lines)
    example = f"{ROOT / 'examples' / 'corpus' / 'deduplicate_exact.py'}:same_text"
    words = options(tmp_path / "corpus", "", "--unit-bytes", 60, "--map", example)
    outputs = {name: tmp_path / name for name in ("local", "ray")}
    engines = {"local": [], "ray": ["--engine", "ray", "--address", cluster.address]}
    for name, engine in engines.items():
        command = [str(outputs[name]) if word == "" else word for word in words]
        assert prepare.main([*command, *engine]) == 0
    manifest = json.loads((outputs["ray"] / "train" / "manifest.json").read_text())
    rules = manifest["statistics"]["rules"]
    validation = json.loads((outputs["ray"] / "validation" / "manifest.json").read_text())
    rules += validation["statistics"]["rules"]
    assert sum(rule["unchanged"] for rule in rules) == 17  # texts 0 to 16
    assert sum(rule["dropped"] for rule in rules) == sum(2 * i + 2 for i in range(6)) - 17
    assert snapshot(outputs["ray"]) == snapshot(outputs["local"])


def test_error_of_a_unit_names_file_and_record(cluster, tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(4):
        (tmp_path / "corpus" / f"{i}.jsonl").write_text('{"text": "a"}\n' * 40)
    (tmp_path / "corpus" / "2.jsonl").write_text('{"text": "a"}\n' * 6 + "bad\n")
    words = options(tmp_path / "corpus", tmp_path / "out", "--unit-bytes", 100)
    where = r"2\.jsonl \(from byte 0\):7: not JSON"
    with pytest.raises(UserError, match=where.replace(r" \(from byte 0\)", "")):
        prepare.main([*words, "--engine", "ray", "--address", cluster.address, "--workers", "1"])


def test_missing_cluster_is_a_users_mistake(corpus, tmp_path, monkeypatch):
    def refuse(**_):
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(UserError, match=r"no Ray cluster at --address auto .* Start one with"):
        prepare.main([*options(corpus, tmp_path / "out"), "--engine", "ray"])


def test_ray_must_be_installed(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"--engine ray needs ray: pip install 'jaxforge\[ray\]'"):
        prepare.main([*options(corpus, tmp_path / "out"), "--engine", "ray"])


def test_unit_that_is_always_lost_is_an_error():
    error = ray.exceptions.WorkerCrashedError()
    for n in range(1, 10):
        ray_engine._check_losses(n, "a.jsonl", error)
    with pytest.raises(UserError, match=r"a\.jsonl: the process was lost 10 times"):
        ray_engine._check_losses(10, "a.jsonl", error)
