"""Activations captured during training: contents, intervals, and no effect on the run."""

import json

import numpy as np
import pytest

import jaxforge
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import build_model
from jaxforge.parallel.mesh import make_mesh
from jaxforge.training import launch
from jaxforge.training.callbacks import activations as activation_files
from jaxforge.training.callbacks import activations as capturing
from jaxforge.training.callbacks.activations import ActivationCapture
from jaxforge.training.summary import schedule_summary
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("one_device")

LENGTH = 32
POINTS = ("attention_weights", "residual", "logits")


def config(path, name, interval=2, **section):
    data = path / "data"
    if not data.exists():
        data.mkdir()
        text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 200, np.uint8)
        np.save(data / "a.npy", text.astype(np.uint16))
    sets = [{"name": name, "dataset_path": str(data)} for name in ("web", "other")]
    return tiny_config(
        train={"max_steps": 6, "batch_size": 8, **section},
        data={"dataset_path": str(data)},
        eval={
            "datasets": sets, "activations_interval": interval, "activations_sequences": 10,
            "activations_points": ["res*", "*weights", "logits"], "activations_layers": [1],
        },
        checkpoint={"dir": str(path / name), "interval": 100},
    )  # fmt: skip


def logged(path, name):
    lines = map(json.loads, (path / name / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that captures, a run that does not, and a stopped run with an unwritable directory."""
    path = tmp_path_factory.mktemp("captured")
    assert launch.fit(config(path, "whole")) is Exit.COMPLETED
    assert launch.fit(config(path, "silent", interval=0)) is Exit.COMPLETED
    location = path / "stopped" / "activations"
    location.parent.mkdir()
    location.write_text("no directory")
    assert launch.fit(config(path, "stopped", exit_interval=3)) is Exit.INTERVAL
    location.unlink()
    (location / ".step_4.partial").mkdir(parents=True)
    once = [{"mlp": np.zeros(3)}]  # left by a step that is repeated
    activation_files.write(activation_files.step_directory(path / "stopped", 4), once, {})
    assert launch.fit(config(path, "stopped")) is Exit.COMPLETED
    return path


def test_capture_is_written_at_each_interval(runs):
    run = jaxforge.Run(runs / "whole")
    assert run.captured_steps == [2, 4, 6]
    result = run.activations(4)
    assert {name: x.shape for name, x in result.items()} == {
        "tokens": (10, LENGTH),
        "residual": (10, 1, LENGTH, 64),
        "attention_weights": (10, 1, 4, LENGTH, LENGTH),
        "logits": (10, LENGTH, 256),
    }
    windows = np.load(runs / "data" / "a.npy")[: 10 * (LENGTH + 1)].reshape(10, -1)
    np.testing.assert_array_equal(result["tokens"], windows[:, :-1])
    reported = json.loads((runs / "whole/activations/step_4/activations.json").read_text())
    assert reported == {
        "step": 4,
        "set": "web",
        "points": ["residual", "attention_weights", "logits"],
        "layers": [1],
        "sequences": list(range(10)),
    }
    with pytest.raises(UserError, match=r"no activations of step 5: there are \[2, 4, 6\]"):
        run.activations(5)


def test_capture_does_not_change_losses(runs):
    assert logged(runs, "whole") == logged(runs, "silent")
    assert not (runs / "silent" / "activations").exists()


def test_resumed_run_captures_same_activations(runs):
    def files(name):
        directory = runs / name / "activations"
        paths = (path for path in directory.rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): path.read_bytes() for path in paths}

    whole = files("whole")
    assert len(whole) == 3 * 5
    assert files("stopped") == {name: x for name, x in whole.items() if "step_2/" not in name}
    assert logged(runs, "stopped") == logged(runs, "whole")


def test_unwritable_activations_warn_and_run_continues(runs):
    log = (runs / "stopped" / "logs" / "process_0.log").read_text()
    assert log.count("are not saved: ") == 1
    assert "activations of step 2 are not saved: [Errno 20] Not a directory" in log


def test_each_captured_sequence_ticks_the_watchdog(tmp_path, monkeypatch):
    """Ticks continue if nothing can be written, for the watchdogs of other processes."""
    job = config(tmp_path, "run")
    capture = ActivationCapture(job, make_mesh(job), build_model(job), range(40))
    monkeypatch.setattr(
        capturing, "sequence_activations", lambda *job: ({"x": np.zeros(2)} for _ in job[-1])
    )
    signs = []
    capture({}, 2, lambda: signs.append("written"))
    (tmp_path / "run" / "activations" / "step_2").rename(tmp_path / "run" / "moved")
    (tmp_path / "run" / "activations").rmdir()
    (tmp_path / "run" / "activations").write_text("no directory")
    capture({}, 2, lambda: signs.append("lost"))
    assert signs == ["written"] * 10 + ["lost"] * 10


def test_summary_lists_captures(runs):
    text = (runs / "whole" / "schedule_summary.txt").read_text()
    each = 10 * LENGTH * (64 + 4 * LENGTH + 256) * 4
    assert sum(x.nbytes for name, x in jaxforge.Run(runs / "whole").activations(2).items()
               if name != "tokens") == each  # fmt: skip
    assert (
        "activations\n  every 2 updates, of 10 sequences of the first evaluation set\n  3 in all, "
        in text
    )
    assert f"{each / 1e9:.3g} GB each: residual, attention_weights, logits" in text
    assert "activations\n  none\n" in schedule_summary(config(runs, "x", interval=0), 1)


def test_capture_interval_may_be_share_of_run():
    config = load_config(None, ["--train.max_steps=200", "--eval.activations_interval=25%"])
    assert [step for step in range(201) if step and config.eval.is_capture_due(step)] == [
        50, 100, 150, 200,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["activations_points=residul"],
            'unknown point "residul"; did you mean "residual"? Choose',
        ),
        (["activations_points=x"], 'activations_points: unknown point "x"; choose from att'),
        (["activations_points=[]", "activations_interval=2"], "is empty: give"),
        (["activations_layers=[-1]"], "activations_layers"),
    ],
)
def test_unknown_capture_points_raise(settings, message):
    with pytest.raises(UserError) as caught:
        load_config(None, [f"--eval.{setting}" for setting in settings])
    assert message in str(caught.value)
