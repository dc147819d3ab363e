"""Runs of `train.objective` in real processes: kills, and two processes that share a model."""

import signal

import numpy as np
import pytest

from jaxforge.tools.teacher_logits import save
from tests.machine import wait_until
from tests.processes.conftest import Run
from tests.processes.launching import finish_both, start_both
from tests.training.objectives import dpo, prepare_data, student

pytestmark = pytest.mark.usefixtures("one_device")

OBJECTIVES = ["dpo", "distillation", "logits"]
STEPS = 300
OVERRIDES = [f"--train.max_steps={STEPS}", "--checkpoint.interval=25", "--eval.enabled=false",
             "--train.global_batch_size=4"]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory with data, a base model and its logits."""
    directory = tmp_path_factory.mktemp("frozen")
    prepare_data(directory)
    save(student(directory, "any"), directory / "logits")
    return directory


def run_of(objective, prepared, name):
    """Return a run with an objective; "logits" is a distillation from saved logits."""
    config = (dpo if objective == "dpo" else student)(prepared, name)
    if objective == "logits":
        section = {"teacher": None, "logits": str(prepared / "logits")}
        section = config.distillation.model_copy(update=section)
        config = config.model_copy(update={"distillation": section})
    run = Run(prepared, f"{objective}_{name}")
    run.config.write_text(config.to_toml())
    return run


@pytest.mark.slow  # quick, without a kill: training/test_objective_runs.py
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_killed_run_resumes_with_the_same_losses(objective, prepared):
    undisturbed, killed = (run_of(objective, prepared, name) for name in ("undisturbed", "killed"))
    undisturbed.finish_here(*OVERRIDES)
    process = killed.start(*OVERRIDES)
    wait_until(killed.steps, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert max(killed.losses()) < STEPS, "the run ended before the kill"
    killed.finish_here(*OVERRIDES)
    assert killed.losses() == undisturbed.losses()
    assert sorted(killed.losses()) == list(range(1, STEPS + 1))


@pytest.mark.slow  # quick, in one process: step/test_dpo.py and step/test_distillation.py
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_processes_have_the_losses_of_one(objective, prepared):
    steps = ["--train.max_steps=8"]
    alone, both = (run_of(objective, prepared, name) for name in ("alone", "both"))
    alone.finish_here(*OVERRIDES, *steps)
    finish_both(
        start_both(both, *OVERRIDES, *steps, "--distributed.dp_shard=2", "--train.batch_size=2")
    )
    losses = [list(run.losses().values()) for run in (both, alone)]
    assert len(losses[0]) == 8
    np.testing.assert_allclose(*losses, rtol=2e-6)
