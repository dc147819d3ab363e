"""Evaluation sets with schedules of their own, and saves that start before evaluations."""

import json
import math

import numpy as np
import pytest

from jaxforge.config import load_unresolved
from jaxforge.config.eval import EvalSchedule
from jaxforge.exit_codes import Exit
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from tests.conftest import tiny_config
from tests.helpers import stored_progress
from tests.training.looking import Looking
from tests.training.observers import run


@pytest.mark.parametrize("interval", [1, 3, 4])
@pytest.mark.parametrize("start", [0, 1, 4, 5, 12, 13])
def test_due_steps_are_multiples_of_interval_from_start(interval, start):
    schedule = EvalSchedule(interval, start, 1)
    expected = [step for step in range(1, 13) if step % interval == 0 and step >= start]
    assert list(schedule.due_steps(12)) == expected
    assert [step for step in range(1, 13) if schedule.is_due(step)] == expected


SETS = """
[train]
max_steps = 40
[eval]
enabled = true
interval = 4
start_step = 8
datasets = [
  {name = "a", dataset_path = "a"},
  {name = "b", dataset_path = "b", interval = "25%", start_step = 0, steps = 3},
]
"""


def test_sets_inherit_missing_keys_and_accept_durations(tmp_path):
    (tmp_path / "x.toml").write_text(SETS)
    section = load_unresolved(tmp_path / "x.toml").resolve(None, lambda *_: 1).eval
    assert section.schedules() == {"a": EvalSchedule(4, 8, 50), "b": EvalSchedule(10, 0, 3)}
    assert [section.due_sets(step) for step in (4, 8, 10, 20)] == [[], ["a"], ["b"], ["a", "b"]]


def without_reads(events, first, last):
    part = events[events.index(first) : events.index(last)]
    return [event for event in part if event.startswith(("launch", "save ", "eval", "amend"))]


def test_result_is_written_to_earlier_save_before_next_save():
    events, *_ = run(steps=6, evaluate=2, save=2)
    assert without_reads(events, "launch 2", "launch 5") == [
        "launch 2", "save 2", "save hook 2", "eval begins 2", "evaluate from 0", "eval hook 2",
        "launch 3", "launch 4", "amend 2", "save 4", "save hook 4", "eval begins 4",
        "evaluate from 0", "eval hook 4",
    ]  # fmt: skip
    assert "amend 6" in events


def test_stopped_evaluation_is_written_to_earlier_save():
    events, reason, trainer = run(steps=9, evaluate=2, save=2, stop_at=2)
    assert reason is Exit.SIGNAL
    assert without_reads(events, "launch 2", "close") == [
        "launch 2", "save 2", "save hook 2", "eval begins 2", "evaluate from 0", "amend 2",
    ]  # fmt: skip
    assert trainer.position.progress.validation is not None


class Judges(Looking):
    judges_state = False


@pytest.mark.parametrize(("make", "is_first"), [(Looking, False), (Judges, True)])
def test_save_waits_for_callbacks_that_judge_state(make, is_first):
    events, *_ = run(steps=3, evaluate=2, save=2, callbacks=[make])
    assert "look 2" in events
    assert (events.index("save 2") < events.index("eval begins 2")) == is_first


def test_partial_evaluation_ranks_no_checkpoint():
    """An evaluation without the metric that ranks checkpoints changes nothing about the best."""
    sections = {"checkpoint": {"keep_best_n": 1, "best_metric": "eval/perplexity"}}
    events, _, trainer = run(steps=5, evaluate=2, save=4, sections=sections)
    assert trainer.position.progress.best_step is None
    assert [event for event in events if event.startswith("save ") and "hook" not in event] == [
        "save 4", "save 5",
    ]  # fmt: skip


class Log(Callback):
    """A log of evaluations and losses that fails at batch `at` of an evaluation."""

    def __init__(self, at=None):
        self.events, self.losses, self._at = [], [], at
        self.n_evaluations = np.int64(0)

    def on_step_end(self, context):
        self.losses.append(context.loss)

    def on_eval_begin(self, step):
        self.events.append(f"begin {step}")

    def on_eval_step(self, name, batch, step):
        self.events.append(f"{name}{batch}")
        if (name, batch, step) == self._at:
            raise ZeroDivisionError

    def on_eval_end(self, metrics, step, context):
        assert int(context.state.step) == step
        self.n_evaluations += 1
        self.events.append(f"end {step}")

    def state_dict(self):
        return {"n": self.n_evaluations}

    def load_state_dict(self, state):
        self.n_evaluations = state["n"]


def config(root, name, *, is_evaluated=True):
    rng = np.random.default_rng(0)
    for data in ("a", "b"):
        (root / data).mkdir(exist_ok=True)
        np.save(root / data / "x.npy", rng.integers(0, 256, 24 * 33).astype(np.uint16))
    sets = [
        {"name": "a", "dataset_path": str(root / "a"), "steps": 2},
        {"name": "b", "dataset_path": str(root / "b"), "interval": 3, "start_step": 6, "steps": 1},
    ]
    evaluation = {"enabled": True, "interval": 2, "datasets": sets, "functions": ["accuracy"]}
    return tiny_config(
        train={"max_steps": 6, "batch_size": 8},
        data={"dataset_path": str(root / "a")},
        eval=evaluation if is_evaluated else {},
        checkpoint={"dir": str(root / name), "interval": 4},
    )


def logged(root, name):
    rows = map(json.loads, (root / name / "metrics.jsonl").read_text().splitlines())
    return {
        (row["step"], key): value
        for row in rows
        for key, value in row.items()
        if key.startswith("eval/")
    }


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_killed_evaluation_is_repeated_from_save_before_it(tmp_path):
    whole, plain, first, second = Log(), Log(), Log(at=("a", 1, 4)), Log()
    assert launch.fit(config(tmp_path, "whole"), [whole]) is Exit.COMPLETED
    assert whole.events == [
        "begin 2", "a0", "a1", "end 2", "begin 4", "a0", "a1", "end 4",
        "begin 6", "a0", "a1", "b0", "end 6",
    ]  # fmt: skip
    metrics = logged(tmp_path, "whole")
    assert {step for step, key in metrics if key.startswith("eval/a/")} == {2, 4, 6}
    assert {step for step, key in metrics if key.startswith("eval/b/")} == {6}
    assert {step for step, key in metrics if key == "eval/loss"} == {6}
    assert 0 <= metrics[4, "eval/a/accuracy"] <= 1
    assert metrics[6, "eval/accuracy"] == pytest.approx(
        (2 * metrics[6, "eval/a/accuracy"] + metrics[6, "eval/b/accuracy"]) / 3
    )
    stored = stored_progress(tmp_path / "whole", 6)
    assert stored["validation"] is None
    assert math.isclose(stored["best_metric"], metrics[6, "eval/loss"])

    assert launch.fit(config(tmp_path, "plain", is_evaluated=False), [plain]) is Exit.COMPLETED
    assert plain.losses == whole.losses  # functions are not a part of the training loss

    with pytest.raises(ZeroDivisionError):
        launch.fit(config(tmp_path, "run"), [first])
    stopped = stored_progress(tmp_path / "run", 4)
    assert stopped["validation"]["pending"] == ["a"]
    assert launch.fit(config(tmp_path, "run"), [second]) is Exit.COMPLETED
    assert second.events == whole.events[4:]
    assert logged(tmp_path, "run") == metrics
    assert [*first.losses, *second.losses] == whole.losses
    states = [stored_progress(tmp_path / name, 6)["callbacks"] for name in ("whole", "run")]
    assert states[0] == states[1]
    assert second.n_evaluations == 3
