"""Runs that branch off from a checkpoint of another run."""

import hashlib
import signal

import numpy as np
import pytest

from jaxforge.commands import train
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.runs import starts
from tests.conftest import tiny_config
from tests.helpers import cli, devices_here, stored_progress
from tests.processes.conftest import Run
from tests.tools.report.pages import page_of
from tests.torch_compat.runs import values

pytestmark = pytest.mark.usefixtures("one_device")

COMMON = ["--model.n_layers=1", "--train.max_steps=8", "--checkpoint.interval=4",
          "--checkpoint.keep_last_n=0", "--train.ema_decay=0.9", "--scheduler.name=wsd",
          "--scheduler.warmup_steps=2"]  # fmt: skip
CONSTANT = ["--scheduler.stable_steps=100", "--scheduler.decay_steps=1"]


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run of eight steps at a constant rate, with checkpoints of steps 4 and 8."""
    parent = Run(tmp_path_factory.mktemp("parent"), "parent")
    with devices_here(1):
        parent.finish_here(*COMMON, *CONSTANT)
    return parent


def digest(directory):
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def last(run, step):
    return values(run.directory / "checkpoints" / f"step_{step}")


def progress(run, step):
    return stored_progress(run.directory, step)


def test_branch_with_settings_of_parent_repeats_it(parent, tmp_path):
    before, branch = digest(parent.directory), Run(tmp_path, "branch")
    branch.finish_here(*COMMON, *CONSTANT, f"--branch-from={parent.directory}@4")
    assert digest(parent.directory) == before
    losses = {step: loss for step, loss in parent.losses().items() if step > 4}
    assert branch.losses() == losses
    expected, result = last(parent, 8), last(branch, 8)
    assert any(name.startswith("ema.") for name in expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(result[name], value, err_msg=name)
    ids = {progress(run, 8)["run_id"] for run in (parent, branch)}
    assert len(ids) == 2
    assert progress(branch, 8)["samples"] == progress(parent, 8)["samples"]


def test_branch_decays_with_its_own_schedule_and_resumes(parent, tmp_path):
    branch = Run(tmp_path, "branch")
    decay = [*COMMON, "--train.max_steps=12", "--scheduler.stable_steps=6",
             "--scheduler.decay_steps=4", "--scheduler.wsd_decay_type=linear",
             "--scheduler.min_lr_ratio=0", f"--branch-from={parent.directory}@latest"]  # fmt: skip
    branch.finish_here(*decay, "--train.exit_interval=10", code=Exit.INTERVAL.code)
    branch.finish_here(*decay)
    rates = {line["step"]: line["train/lr"] for line in branch.lines() if "train/lr" in line}
    # The rate of the next update: a quarter less after each of the four.
    assert rates == pytest.approx({9: 0.75 * 3e-3, 10: 0.5 * 3e-3, 11: 0.25 * 3e-3, 12: 0})
    first, second = starts.read(branch.directory)
    assert first["parent"] == {"run": str(parent.directory), "step": 8, "is_branch": True}
    assert "parent" not in second
    config = (branch.directory / "config.toml").read_text()
    assert f'branch_from = "{parent.directory}@8"' in config
    facts = page_of(branch.directory).facts()
    assert facts["branch of"] == f"{parent.directory} at step 8"


@pytest.mark.slow  # quick: the test above resumes after a save
def test_branch_killed_before_its_first_save_begins_again(parent, tmp_path):
    branch = Run(tmp_path, "branch")
    command = [*COMMON, *CONSTANT, "--train.max_steps=200", "--checkpoint.interval=100",
               f"--branch-from={parent.directory}@8"]  # fmt: skip
    process = branch.start(*command)
    branch.wait_for_step(12, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert branch.steps() == []
    branch.finish_here(*command, "--train.max_steps=16")
    assert sorted(branch.losses()) == list(range(9, 17))


@pytest.mark.slow
def test_lost_checkpoints_of_branch_are_not_begun_anew(parent, tmp_path):
    branch = Run(tmp_path, "branch")
    command = [*COMMON, *CONSTANT, "--train.max_steps=10", f"--branch-from={parent.directory}@8"]
    branch.finish_here(*command)
    (branch.directory / "checkpoints").rename(tmp_path / "away")
    with pytest.raises(UserError, match="saved checkpoints, and no checkpoint is left"):
        branch.finish_here(*command)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--branch-from=PARENT@5"], r"no checkpoint at .*step_5: .*the newest of .* is step 8"),
        (["--branch-from=PARENT"], r"branch_from = .*parent.* must be RUN@STEP or RUN@latest"),
        (["--branch-from=PARENT@4", "--checkpoint.dir=PARENT"], "is the run in dir itself"),
        (["--branch-from=PARENT@4", "--checkpoint.load_path=PARENT"], "both name a start"),
        (["--branch-from=PARENT@4", "--checkpoint.exclude_from_loading=['optimizer']"],
         "does not apply to branch_from, which loads the full state"),
        (["--branch-from=PARENT@4", "--model.dim=32"], r"step_4 does not fit \[model\]"),
        (["--branch-from=PARENT@4", "--optimizer.name=lion"],
         "has the state of another optimizer than optimizer.name asks for"),
    ],
)  # fmt: skip
def test_branch_that_cannot_be_loaded_is_refused(parent, tmp_path, settings, message):
    words = [word.replace("PARENT", str(parent.directory)) for word in settings]
    before = digest(parent.directory)
    with pytest.raises(UserError, match=message):
        Run(tmp_path, "branch").finish_here(*COMMON, *CONSTANT, *words)
    assert digest(parent.directory) == before


@pytest.mark.slow
def test_branch_with_changed_data_is_refused_unless_allowed(tmp_path):
    """The position of a branch is one in the data of its parent."""
    file, rng = tmp_path / "data" / "tokens.npy", np.random.default_rng(0)
    file.parent.mkdir()
    parent, branch = Run(tmp_path, "parent"), Run(tmp_path, "branch")
    settings = [*COMMON, *CONSTANT, "--data.dataset_type=auto",
                f"--data.dataset_path={file.parent}"]  # fmt: skip
    np.save(file, rng.integers(0, 256, 9000).astype(np.uint16))
    parent.finish_here(*settings, "--train.max_steps=4")
    np.save(file, rng.integers(0, 256, 9000).astype(np.uint16))
    settings += [f"--branch-from={parent.directory}@4"]
    with pytest.raises(UserError, match="the data have changed since step 4 of this run"):
        branch.finish_here(*settings)
    branch.finish_here(*settings, "--data.on_change=continue")
    assert (progress(parent, 4)["samples"], progress(branch, 8)["samples"]) == (32, 64)


def test_branch_of_weights_alone_is_refused(parent, tmp_path):
    command = ["convert", str(parent.directory), str(tmp_path / "weights"), "--to=jaxforge"]
    assert cli([*command, "--weights-only"]) == 0
    with pytest.raises(UserError, match=r"step 0 of .*weights holds weights only"):
        Run(tmp_path, "branch").finish_here(*COMMON, f"--branch-from={tmp_path / 'weights'}@0")


@pytest.mark.slow
def test_directory_of_another_run_is_refused(parent, tmp_path):
    branch = Run(tmp_path, "branch")
    branch.finish_here(*COMMON, *CONSTANT, f"--branch-from={parent.directory}@4")
    with pytest.raises(UserError, match=r"@8: the run in .* branched off from .*@4\. Name a new"):
        branch.finish_here(*COMMON, *CONSTANT, f"--branch-from={parent.directory}@8")
    with pytest.raises(UserError, match=r"the run in .* is not a branch\. Name a new"):
        parent.finish_here(*COMMON, *CONSTANT, f"--branch-from={branch.directory}@8")
    branch.finish_here(*COMMON, *CONSTANT)  # resumes; the run is complete


def test_dry_run_checks_the_parent(parent, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    words = Run(tmp_path, "branch").command(*COMMON, f"--branch-from={parent.directory}@latest")
    assert train.main([*words[3:], "--dry-run"]) == 0
    row = f"a new run that branches off from step 8 of {parent.directory}"
    assert row in capsys.readouterr().out
    with pytest.raises(UserError, match="has the state of another optimizer"):
        train.main([*words[3:], "--dry-run", "--optimizer.name=lion"])


def test_run_from_load_path_names_its_parent(parent, tmp_path):
    run = Run(tmp_path, "run")
    run.finish_here(*COMMON, *CONSTANT, "--train.max_steps=9",
                    f"--checkpoint.load_path={parent.directory}")  # fmt: skip
    assert page_of(run.directory).facts()["started from"] == f"{parent.directory} at step 8"


def test_start_path_of_branch_is_its_checkpoint():
    section = tiny_config(checkpoint={"branch_from": "gs://bucket/a@b@12"}).checkpoint
    assert section.start_path == "gs://bucket/a@b/checkpoints/step_12"
    assert section.branch.step == 12
