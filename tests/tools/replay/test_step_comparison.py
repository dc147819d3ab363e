"""Comparison of a step of two runs: the first different value is named."""

import json

import pytest

from jaxforge.commands import replay as command
from jaxforge.commands import train
from jaxforge.errors import UserError
from jaxforge.tools.replay.compare import first_difference
from jaxforge.tools.replay.step_comparison import ReplayedRun, compare_values, replay_step
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of six steps with a checkpoint every two steps."""
    path = tmp_path_factory.mktemp("against") / "run"
    train.run(
        tiny_config(
            train={"max_steps": 6, "batch_size": 4},
            checkpoint={"dir": str(path), "interval": 2},
            distributed={"dp_shard": 2},
        )
    )
    return path


def compared(capsys, run, *options, step=5):
    """Return exit code and report of a comparison."""
    capsys.readouterr()
    code = command.main([str(run), f"--step={step}", f"--against={run}", "--json=-", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_step_on_another_mesh_has_no_difference(run, capsys):
    code, report = compared(
        capsys, run, "--other=--distributed.tp=2", "--other=--distributed.dp_shard=1",
        "--other=--train.batch_size=8",
    )  # fmt: skip
    assert (code, report["first"]) == (0, None)
    stages = {row["stage"] for row in report["rows"]}
    assert stages == {"weights", "batch", "forward", "loss", "gradients", "updates"}
    assert any(row["error"] for row in report["rows"])


FIRST = {
    "--model.norm_eps=1e-2": ("forward", "layers.0.attention"),
    "--train.seed=7": ("batch", "input_ids"),
    "--optimizer.weight_decay=0.5": ("updates", ""),
}


@pytest.fixture(scope="module")
def values_of(run):
    """Values of the run's own step."""
    return replay_step(ReplayedRun(run), 5)


@pytest.mark.parametrize("setting", FIRST)
def test_first_changed_value_is_named(run, values_of, setting):
    other = replay_step(ReplayedRun(run, [setting]), 5, values_of.grads_tree)
    result = first_difference(list(compare_values(values_of, other)))
    stage, name = FIRST[setting]
    assert result.stage == stage
    assert result.name.startswith(name)


def test_invalid_comparison_arguments_are_refused(run):
    with pytest.raises(UserError, match="--other requires --against"):
        command.main([str(run), "--step=5", "--other=--train.z_loss_weight=0.1"])
    with pytest.raises(UserError, match="supports one step only"):
        command.main([str(run), "--steps=1:2", f"--against={run}"])
