"""Evaluations that stop at any batch and resume: each batch once, equal metrics."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from jaxforge.aux_outputs import Mean
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.training import evaluation
from jaxforge.training.callbacks.evaluation import ResumableEvaluation, passes
from jaxforge.training.evaluation import BatchSums, Evaluator
from tests.conftest import tiny_config

SETS = {"a": 4, "b": 2, "c": 3}  # batches
STEPS = 3  # at most
STATE = TrainState(None, "params", None, None, None)


@pytest.fixture
def validations(monkeypatch):
    """Return an evaluation whose model sums the batches, and the list of batches that it saw."""
    drawn_batches = Counter()

    def step(params, batch, _):
        drawn_batches[batch] += 1
        name, i = batch
        nats, tokens = np.float32(0.1 * i + ord(name)), np.float32(i + 3)
        functions = {"mean": Mean(np.float32(0.7 * i), tokens), "sum": np.float32(0.1 * i)}
        return BatchSums(nats, tokens, np.int32(i), {"term": np.float32(0.3 * i)}, functions)

    def batches(config, mesh, dataset):
        return iter(dataset)

    monkeypatch.setattr(evaluation, "eval_batches", batches)
    evaluator = object.__new__(Evaluator)
    evaluator._config = evaluator._mesh = evaluator._byte_lengths = evaluator._frozen = None
    evaluator._datasets = {name: [(name, i) for i in range(n)] for name, n in SETS.items()}
    evaluator._has_bytes = dict.fromkeys(SETS, True)
    evaluator._step = step
    return ResumableEvaluation(evaluator, dict.fromkeys(SETS, STEPS)), drawn_batches


def after(n):
    """Return a function that requests a stop from its n-th call on."""
    asked = iter(range(n))
    return lambda: next(asked, None) is None


def run(evaluation, progress, stop):
    return evaluation.run(STATE, progress, stop, lambda name, batch: None)


def through_json(progress):
    return Progress.from_json(json.loads(json.dumps(progress.to_json())))


@pytest.mark.parametrize("batches_between_stops", [1, 2, 3, 5, 7])
def test_stopped_evaluation_resumes_without_skips_or_repeats(validations, batches_between_stops):
    validation, drawn_batches = validations
    whole = run(validation, Progress(), lambda: False)
    once = dict(drawn_batches)
    assert set(once.values()) == {1}
    assert len(once) == 3 + 2 + 3
    assert whole["eval/a/mean"] == pytest.approx(0.7 * (0 + 1 + 2) / (3 + 4 + 5))
    assert whole["eval/sum"] == pytest.approx(0.1 * (3 + 1 + 3))
    drawn_batches.clear()
    progress, stops = Progress(step=4), 0
    while (metrics := run(validation, progress, after(batches_between_stops))) is None:
        stops += 1
        assert stops < 10, "it comes no further"
        progress = through_json(progress)
    assert stops == (8 - 1) // batches_between_stops
    assert metrics == whole
    assert dict(drawn_batches) == once
    assert progress.validation is None


def test_stopped_evaluation_stores_pending_sets_and_sums(validations):
    validation, _ = validations
    progress = Progress()
    assert run(validation, progress, after(4)) is None
    at = progress.validation
    assert (at.pending, at.completed) == (["b", "c"], ["a"])
    assert {name: sums["batches"] for name, sums in at.sums.items()} == {"a": 3, "b": 1}
    assert progress.stage == "validation"


@pytest.mark.parametrize("batches_between_stops", [1, 3, 20])
def test_average_is_evaluated_after_parameters(validations, batches_between_stops):
    validation, _ = validations
    state, seen = dataclasses.replace(STATE, params={"w": "raw"}, ema={"w": "average"}), []

    def step(params, batch, _):
        seen.append((params["w"], batch))
        loss = 2.0 if params["w"] == "average" else 3.0
        return BatchSums(np.float32(loss), np.float32(1), np.int32(1))

    validation._evaluator._step = step
    names = passes(SETS, tiny_config(train={"ema_decay": 0.9}).train)
    progress, notes = Progress(step=4), []
    progress.begin_validation(names)
    while not (
        metrics := validation.run(state, progress, after(batches_between_stops), note(notes))
    ):
        progress = through_json(progress)
    batches = [("a", i) for i in range(3)] + [("b", i) for i in range(2)]
    batches += [("c", i) for i in range(3)]
    assert seen == [(p, batch) for p in ("raw", "average") for batch in batches]
    assert notes == batches
    assert {name: value for name, value in metrics.items() if name.endswith("loss")} == {
        **dict.fromkeys(("eval/loss", "eval/a/loss", "eval/b/loss", "eval/c/loss"), 3.0),
        **dict.fromkeys(
            ("eval/ema_loss", "eval/a/ema_loss", "eval/b/ema_loss", "eval/c/ema_loss"), 2.0
        ),
    }


def note(notes):
    return lambda name, batch: notes.append((name, batch))


def test_stopped_evaluation_of_dropped_average_ends(validations):
    validation, drawn_batches = validations
    progress = Progress(step=4)
    progress.begin_validation(passes(SETS, tiny_config(train={"ema_decay": 0.9}).train))
    metrics = run(validation, progress, lambda: False)
    assert not [name for name in metrics if "ema" in name]
    assert set(drawn_batches.values()) == {1}
