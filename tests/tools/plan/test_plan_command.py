import json
import math
import re
import subprocess
import sys

import jax
import pytest

from jaxforge.commands import plan as plan_main
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model
from jaxforge.tools.plan import plan_report
from jaxforge.tools.plan.checks import (
    checkpoint_bytes,
    kept_checkpoints,
    known_teacher,
    missing_data_warnings,
)
from jaxforge.tools.plan.plan import as_json, plan
from jaxforge.tools.plan.topology import Topology
from jaxforge.training import launch, updates
from tests.conftest import tiny_config
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, environment

CPUS = Topology.parse("cpu:8")
MESH = {"dp_shard": 4, "tp": 2}


def planned(**sections):
    return tiny_config(distributed=MESH, metrics={"collect": ["params_norm"]}, **sections)


@pytest.fixture(scope="module")
def tiny_plan():
    return plan(planned(), CPUS)


def test_plan_reports_compiled_step(tiny_plan):
    report = as_json(tiny_plan)
    assert report["fits"] is True
    assert report["errors"] == []
    assert report["mesh"] == MESH
    assert "step" not in report  # rates of CPUs are unknown
    assert {item["kind"] for item in report["collectives"]} >= {"all-gather", "all-reduce"}
    assert {axis for item in report["collectives"] for axis in item["axes"]} == set(MESH)
    assert all(item["count"] > 0 and item["bytes"] > 0 for item in report["collectives"])
    json.dumps(report)


def test_memory_parts_match_state_sizes(tiny_plan):
    memory = tiny_plan.step.memory
    config = tiny_plan.config
    state = checkpoint_bytes(config)
    assert memory.parameters == pytest.approx(state / 3 / 8, rel=0.05)  # AdamW: two moments
    assert memory.optimizer == pytest.approx(2 * memory.parameters, rel=0.01)
    assert memory.gradients >= memory.parameters  # whole over the data axes
    assert memory.peak >= memory.parameters + memory.optimizer
    assert memory.capacity > memory.peak


def test_frozen_model_is_a_part_of_the_peak(tiny_plan, tmp_path):
    """The reference has the matrices of the model in the compute dtype."""
    section = {"objective": "dpo"}
    pairs = {"dataset_path": str(tmp_path / "pairs")}  # not on this machine
    start = {"load_path": "reference", "dir": str(tmp_path / "run")}
    with_reference = plan(planned(train=section, data=pairs, checkpoint=start), CPUS)
    memory = with_reference.step.memory
    assert memory.frozen_model == pytest.approx(memory.parameters, rel=0.05)
    assert memory.parts["frozen model"] == memory.frozen_model
    assert "frozen model" not in tiny_plan.step.memory.parts
    assert sum(memory.parts.values()) == memory.peak


def test_saved_logits_that_are_not_on_this_machine_are_a_warning(tmp_path):
    config = planned(
        train={"objective": "distillation"}, distillation={"logits": str(tmp_path / "logits")}
    )
    (warning,) = missing_data_warnings(config)
    assert re.match("distillation.logits = .* is not on this machine: not checked", warning)


def test_teacher_that_is_not_on_this_machine_is_a_warning(tmp_path):
    config = planned(
        train={"objective": "distillation"}, distillation={"teacher": str(tmp_path / "teacher")}
    )
    teacher, (warning,) = known_teacher(config, is_elsewhere=True)
    assert teacher is None
    assert re.match("distillation.teacher = .* is not on this machine: its memory is", warning)
    with pytest.raises(UserError, match=r"distillation.teacher = .*no checkpoint"):
        known_teacher(config, is_elsewhere=False)


class Stop(Exception):
    """Raised instead of compiling."""


def test_run_compiles_the_planned_step(tiny_plan, tmp_path, monkeypatch):
    live = []

    def compile_step(lowered, flags):
        live.append(lowered.as_text())
        raise Stop

    monkeypatch.setattr(updates.compilation, "compile_step", compile_step)
    with pytest.raises(Stop):
        launch.fit(planned(checkpoint={"dir": str(tmp_path / "run")}))
    assert live == [tiny_plan.step.executables[1].lowered.as_text()]


def test_invalid_config_is_not_compiled():
    refused = plan(tiny_config(distributed={"dp_shard": 3}), CPUS)
    assert refused.step is None
    assert not refused.fits
    assert any("distributed.dp_shard = 3" in error for error in refused.errors)


def test_oversized_step_gets_advice(tiny_plan, monkeypatch, capsys):
    memory = tiny_plan.step.memory
    small = memory._replace(capacity=memory.peak - 1)
    monkeypatch.setattr(
        "jaxforge.tools.plan.plan.compile_step",
        lambda config, *_, **__: tiny_plan.step._replace(memory=small, config=config),
    )
    config = tiny_config(distributed=MESH, train={"batch_size": 4, "grad_sync": "update"})
    monkeypatch.setattr(plan_report.load, "load_unresolved", lambda *_: config)

    args = plan_main.parser().parse_args(["--config=x.toml", "--topology=cpu:8"])
    assert plan_report.run(args, CPUS, []) == 2
    said = capsys.readouterr().out
    assert "it does not fit" in said
    assert "train.batch_size = 2" in said
    assert 'train.grad_sync = "microbatch"' in said


def command_line(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jaxforge.plan", *arguments],
        cwd=ROOT, env={**environment(), "JAX_PLATFORMS": "none"}, text=True, capture_output=True,
        timeout=PATIENCE,
    )  # fmt: skip


@pytest.mark.slow
def test_command_sets_compiler_environment():
    done = command_line("--config=configs/debug.toml", "--topology=cpu:4", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["devices"] == math.prod(report["mesh"].values()) == 4
    assert report["memory_per_device"]["peak_bytes"] > 0


def test_config_mistakes_become_plan_errors(capsys):
    args, settings = plan_main.parser().parse(
        [f"--config={ROOT / 'configs' / 'debug.toml'}", "--topology=cpu:4", "--json",
         "--model.n_heads=3", "--train.batch_sizes=1"]
    )  # fmt: skip
    assert plan_report.run(args, Topology.parse("cpu:4"), settings) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is False
    assert any("batch_size" in error for error in report["errors"])


def test_topology_mistake_prints_message_without_traceback():
    done = command_line("--config=configs/debug.toml", "--topology=v7:2x2")
    assert done.returncode == 2
    assert "--topology: topology 'v7:2x2': expected one of v5e" in done.stderr
    assert "Traceback" not in done.stderr


def test_kept_checkpoints_are_counted():
    config = tiny_config(train={"max_steps": 100}, checkpoint={"interval": 10, "keep_last_n": 3})
    assert kept_checkpoints(config) == 3
    every = tiny_config(train={"max_steps": 95}, checkpoint={"interval": 10, "keep_last_n": 0})
    assert kept_checkpoints(every) == 10
    assert (
        checkpoint_bytes(config)
        == 3
        * sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(build_model(config).abstract))
        + 4
    )  # plus the count of updates
