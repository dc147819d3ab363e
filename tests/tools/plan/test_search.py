import argparse
import json
import tempfile
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jaxforge.commands import plan as command_line
from jaxforge.config import axes, rules
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import load_config
from jaxforge.config.train import TrainConfig
from jaxforge.errors import UserError
from jaxforge.parallel import targets
from jaxforge.step.execution import RECOMPUTATIONS
from jaxforge.tools.plan import plan_report, search
from jaxforge.tools.plan.topology import Topology
from tests.conftest import tiny_config

NODE = Topology.parse("h100:1x8")
QUIET = Console(quiet=True)


@pytest.fixture
def node(monkeypatch):
    """A node with this machine's devices, since nothing is compiled."""
    monkeypatch.setattr(search, "devices_of", lambda topology: jax.devices()[:8])


def config():
    return tiny_config(train={"batch_size": 2, "grad_accum_steps": 4}, distributed={"dp_shard": -1})


def test_candidates_are_valid_and_keep_the_update(node):
    result = [item for item, _ in search.candidates(config(), NODE)]
    assert len(result) > 50
    for item in result:
        rules.check(item.config, 8)
        rows = item.config.train.microbatch_size(axes.data_parallel(item.mesh))
        assert rows * item.config.train.grad_accum_steps == 2 * 8 * 4
    meshes = {tuple(item.mesh.items()) for item in result}
    for axis in ("pp", "dp_replicate", "dp_shard", "tp"):
        assert {dict(mesh)[axis] for mesh in meshes} >= {1, 2}
    assert {item.config.train.activation_checkpointing for item in result} == set(RECOMPUTATIONS)
    assert {item.config.train.grad_sync for item in result} == {"update", "microbatch"}


def test_sequences_follow_global_batch_size():
    configured = tiny_config(
        train={"global_batch_size": 48, "grad_accum_steps": 1, "batch_size": 6}
    )
    assert search.sequences(configured, 8) == 48


def test_configured_candidate_has_batch_size(node):
    train = TrainConfig(global_batch_size=32, grad_accum_steps=2, seq_len=32)
    configured = config().model_copy(update={"train": train})
    (item,) = search.configured_candidate(configured, NODE)
    assert item.config.train.batch_size == 2
    rules.check(item.config, 8)


@pytest.mark.slow
def test_candidates_are_sorted_by_estimated_time(node):
    result = list(search.fitting_candidates(config(), NODE))
    assert [item.seconds for item in result] == sorted(item.seconds for item in result)
    assert result[0].config.train.activation_checkpointing == "none"


def test_candidates_that_cannot_fit_are_dropped(node, monkeypatch):
    monkeypatch.setitem(search.CHIPS, "h100", search.CHIPS["h100"]._replace(capacity=10_000))
    assert not list(search.fitting_candidates(config(), NODE))
    invalid = (
        config()
        .model_copy(update={"distributed": config().distributed.model_copy(update={"tp": 3})})
        .model_copy(update={"train": config().train.model_copy(update={"global_batch_size": 64})})
    )
    with pytest.raises(UserError, match="no mesh of h100:1x8 fits this update"):
        search.search(invalid, NODE, most=3, jobs=1, console=QUIET)


def report(tokens):
    return {
        "fits": tokens > 0,
        "errors": [],
        "compile_seconds": 1.0,
        "memory_per_device": {"peak_bytes": 1, "capacity_bytes": 2},
        "step": {"tokens_per_second": tokens, "seconds": 1.0, "waited_seconds": 0.0, "mfu": 0.5},
    }


@pytest.fixture
def speeds(monkeypatch):
    """Return compile results: the third candidate is best, the second does not fit."""
    tokens = iter([50.0, 100.0, 0.0, 300.0, 200.0])
    monkeypatch.setattr(search, "compiled_report", lambda *_: report(next(tokens)))


@pytest.mark.slow
def test_search_sorts_by_speed(node, speeds):
    match = search.search(config(), NODE, most=4, jobs=1, console=QUIET)
    assert [item.tokens_per_second for item in match] == [300, 200, 100, 50, 0]
    assert load_config_of(match[0]) == match[0].candidate.config


def load_config_of(result):
    with tempfile.TemporaryDirectory() as location:
        path = Path(location, "best.toml")
        path.write_text(result.candidate.config.to_toml())
        return load_config(path)


def test_search_compiles_the_config_itself(node, monkeypatch):
    (configured,) = search.configured_candidate(config(), NODE)
    train = configured.config.train
    assert "auto" not in (train.grad_sync, train.activation_checkpointing)
    monkeypatch.setattr(
        search, "compiled_report", lambda item, _: report(2.0 if item == configured.config else 1.0)
    )
    match = search.search(config(), NODE, most=2, jobs=1, console=QUIET)
    assert match[0].candidate.config == configured.config
    assert len(match) == 3


@pytest.mark.slow
@pytest.mark.skipif(not targets.has_gpu_compiler(), reason="needs XLA's compiler for GPUs")
def test_ranking_has_the_best_of_everything_that_compiles():
    """Every way to make an update on two H100 is compiled; the first six have a fast one."""
    config = JobConfig.model_validate({
        "model": {"dim": 2048, "n_layers": 4, "n_heads": 16, "vocab_size": 32000,
                  "max_seq_len": 2048},
        "train": {"batch_size": 4, "seq_len": 2048, "loss_fn": "chunked_cross_entropy"},
        "distributed": {"dp_shard": -1},
    })  # fmt: skip
    pair = Topology.parse("h100:1x2")
    every = list(search.fitting_candidates(config, pair))
    speeds = [
        search.CompiledCandidate(item, search.compiled_report(item.config, pair)).tokens_per_second
        for item in every
    ]
    assert len(every) > 20
    assert max(speeds[:6]) >= 0.97 * max(speeds)


def test_search_prints_and_writes_best_config(node, speeds, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan_report.load, "load_unresolved", lambda *_: config())
    args = command_line.parser().parse_args(
        ["--config=x", "--topology=h100:1x8", "--search=4", "--jobs=1",
         f"--output={tmp_path}/best.toml"]
    )  # fmt: skip
    best = list(search.fitting_candidates(config(), NODE))[2].config
    assert plan_report.run(args, NODE, []) == 0
    monkeypatch.undo()
    written = load_config(tmp_path / "best.toml")
    assert dict(written.train) == dict(best.train)
    assert dict(written.distributed) == dict(best.distributed)
    assert f"--train.batch_size={best.train.batch_size}" in capsys.readouterr().out


def test_compiled_candidates_are_cached(monkeypatch, tmp_path):
    runs = []

    def run(command, **_):
        runs.append(command)
        return argparse.Namespace(returncode=0, stdout=json.dumps(report(7.0)), stderr="")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(search.subprocess, "run", run)
    first = search.compiled_report(config(), NODE)
    assert search.compiled_report(config(), NODE) == first == report(7.0)
    assert len(runs) == 1
    search.compiled_report(config(), Topology.parse("h100:2x4"))
    assert len(runs) == 2


def test_compiler_crash_affects_its_candidate_only(monkeypatch, tmp_path):
    ended = argparse.Namespace(returncode=-6, stdout="", stderr="one\nCheck failed: two\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(search.subprocess, "run", lambda *_, **__: ended)
    result = search.compiled_report(config(), NODE)
    assert result == {"fits": False, "errors": ["the compiler failed (-6): Check failed: two"]}
