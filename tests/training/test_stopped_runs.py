"""Runs that stop within an evaluation, during compilation, or by a time limit."""

import json
import os
import shutil
import signal
import threading

import numpy as np
import pytest

from jaxforge.exit_codes import Exit
from jaxforge.parallel import compilation
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from tests.conftest import tiny_config
from tests.helpers import stored_progress
from tests.machine import PATIENCE
from tests.training.looking import Checking

pytestmark = pytest.mark.usefixtures("one_device")

ROWS, LENGTH = 8, 32


class Log(Callback):
    """A log of events that sends a signal at event `at`."""

    def __init__(self, at=None):
        self.events, self._at = [], at

    def _note(self, event):
        self.events.append(event)
        if event == self._at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_eval_begin(self, step):
        self._note(f"begin {step}")

    def on_eval_end(self, metrics, step):
        self._note(f"end {step}")

    def on_checkpoint_save(self, step, path):
        self._note(f"save {step}")

    def on_train_end(self, step, tokens_seen, reason):
        self._note(f"{reason} {step}")


def config(tmp_path, name, checkpoint=None, **keys):
    for data, n in (("a", 40), ("b", 24)):
        (tmp_path / data).mkdir(exist_ok=True)
        np.save(tmp_path / data / "x.npy", (np.arange(n * (LENGTH + 1)) % 251).astype(np.uint16))
    sets = [{"name": n, "dataset_path": str(tmp_path / n)} for n in ("a", "b")]
    return tiny_config(
        train={"max_steps": 8, "batch_size": ROWS, **keys},
        data={"dataset_path": str(tmp_path / "a")},
        eval={"enabled": True, "interval": 4, "datasets": sets},
        checkpoint={"dir": str(tmp_path / name), "interval": 100, **(checkpoint or {})},
    )


def lines(tmp_path, name):
    text = (tmp_path / name / "metrics.jsonl").read_text()
    timeless = [json.loads(line) for line in text.splitlines()]
    return {
        (line["step"], key): value
        for line in timeless
        for key, value in line.items()
        if key.startswith(("eval/", "train/loss"))
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    assert launch.fit(config(path, "whole")) is Exit.COMPLETED
    return lines(path, "whole")


@pytest.mark.parametrize("step", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_stopped_evaluation_resumes_at_its_batch(tmp_path, whole, step):
    first = Log(at=f"begin {step}")
    assert launch.fit(config(tmp_path, "run"), [first]) is Exit.SIGNAL
    stopped = ["save 8", "begin 8"] if step == 8 else ["begin 4", "save 4"]
    assert first.events[-3:] == [*stopped, f"Exit.SIGNAL {step}"]
    halfway = stored_progress(tmp_path / "run", step)
    assert halfway["stage"] == "validation"
    assert halfway["validation"]["pending"] == ["a", "b"]
    second, checks = Log(), Checking([])
    checks.events = second.events
    assert launch.fit(config(tmp_path, "run"), [second, checks]) is Exit.COMPLETED
    remaining = [] if step == 8 else ["save 8", "begin 8", "end 8"]
    assert second.events == [f"look {step}", f"end {step}", *remaining, "Exit.COMPLETED 8"]
    assert lines(tmp_path, "run") == whole
    assert stored_progress(tmp_path / "run", step)["validation"] is None
    third = Log()
    assert launch.fit(config(tmp_path, "run"), [third]) is Exit.COMPLETED
    assert third.events == ["Exit.COMPLETED 8"]  # nothing is evaluated or saved again


def test_signal_interrupts_compilation(tmp_path, monkeypatch):
    left, done = [], threading.Event()

    def compiles_for_minutes(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        done.wait(PATIENCE)

    monkeypatch.setattr(launch, "end_now", left.append)
    monkeypatch.setattr(compilation, "compile_step", compiles_for_minutes)
    log = Log()
    assert launch.fit(config(tmp_path, "run"), [log]) is Exit.SIGNAL
    assert not done.is_set()
    done.set()
    assert log.events == ["save 0", "Exit.SIGNAL 0"]
    assert left == [Exit.SIGNAL.code]  # the compiler is still running


def test_run_stops_at_duration_or_step(tmp_path, whole):
    by_step, by_clock = Log(), Log()
    assert launch.fit(config(tmp_path, "run", exit_interval=3), [by_step]) is Exit.INTERVAL
    assert by_step.events == ["save 3", "Exit.INTERVAL 3"]
    clock = config(tmp_path, "run", exit_duration_in_mins=1e-9)
    assert launch.fit(clock, [by_clock]) is Exit.DURATION
    assert by_clock.events == ["begin 4", "save 4", "Exit.DURATION 4"]  # within the evaluation
    assert launch.fit(config(tmp_path, "run")) is Exit.COMPLETED
    assert lines(tmp_path, "run") == whole


class Dies(Callback):
    def on_step_end(self, context):
        if context.step == 5:
            raise ZeroDivisionError


def test_replica_in_memory_is_used_after_failure(tmp_path, whole):
    replica = {"replica_interval": 2, "replica_dir": str(tmp_path / "memory")}
    with pytest.raises(ZeroDivisionError):
        launch.fit(config(tmp_path, "run", checkpoint=replica), [Dies()])
    assert {path.parent.name[:6] for path in tmp_path.rglob("0.data")} == {"step_2", "step_4"}
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    log = Log()
    stop = config(tmp_path, "run", checkpoint=replica, exit_interval=6)
    assert launch.fit(stop, [log]) is Exit.INTERVAL
    assert log.events == ["save 6", "Exit.INTERVAL 6"]  # the evaluation of step 4 is not repeated
    assert not list(tmp_path.rglob("0.data"))  # step 6 is on disk
    assert launch.fit(config(tmp_path, "run")) is Exit.COMPLETED
    assert lines(tmp_path, "run") == whole


@pytest.mark.slow
def test_new_run_in_emptied_directory_ignores_old_replicas(tmp_path):
    replica = {"replica_interval": 2, "replica_dir": str(tmp_path / "memory")}
    with pytest.raises(ZeroDivisionError):
        launch.fit(config(tmp_path, "run", checkpoint=replica), [Dies()])
    shutil.rmtree(tmp_path / "run")
    log = Log()
    again = config(tmp_path, "run", checkpoint=replica, exit_interval=1)
    assert launch.fit(again, [log]) is Exit.INTERVAL
    assert log.events == ["save 1", "Exit.INTERVAL 1"]


@pytest.mark.slow
def test_local_checkpoint_is_used_while_it_exists(tmp_path, whole):
    local = {"non_persistent_interval": 3, "non_persistent_dir": str(tmp_path / "local")}
    with pytest.raises(ZeroDivisionError):
        launch.fit(config(tmp_path, "run", checkpoint=local), [Dies()])
    assert [path.name for path in (tmp_path / "local" / "checkpoints").glob("step_*")] == ["step_3"]
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    log = Log()
    stop = config(tmp_path, "run", checkpoint=local, exit_interval=6)
    assert launch.fit(stop, [log]) is Exit.INTERVAL
    assert log.events == ["begin 4", "end 4", "save 6", "Exit.INTERVAL 6"]  # a permanent checkpoint
    assert launch.fit(config(tmp_path, "run")) is Exit.COMPLETED
    assert lines(tmp_path, "run") == whole
