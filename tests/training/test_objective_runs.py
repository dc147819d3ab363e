"""Runs of `train.objective`: frozen models, resumes, evaluations."""

import json
import re

import numpy as np
import pytest

from jaxforge.commands import train
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.inference.evaluation import evaluate
from jaxforge.tools.replay.past import open_past
from jaxforge.training import launch
from tests.training.objectives import config, dpo, export, prepare_data, progress, stored, student
from torch_compat.checkpoint import checkpoints

pytestmark = pytest.mark.usefixtures("one_device")


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: {**line} for line in lines if "dpo/margin" in line}, [
        line for line in lines if any(key.startswith("eval/") for key in line)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of all runs, with prepared data and a base model."""
    directory = tmp_path_factory.mktemp("objectives")
    prepare_data(directory)
    return directory


@pytest.fixture(scope="module")
def whole(runs):
    """A run of DPO of four steps without interruption."""
    assert launch.fit(dpo(runs, "whole")) is Exit.COMPLETED
    return runs / "whole"


def test_dpo_run_resumes_bit_exactly(runs, whole):
    assert launch.fit(dpo(runs, "parts", train={"exit_interval": 2})) is Exit.INTERVAL
    assert launch.fit(dpo(runs, "parts")) is Exit.COMPLETED
    assert stored(runs / "parts", 4) == stored(whole, 4)
    names = [name for name in stored(whole, 4) if "reference" in name]
    assert not names, "the reference is not in checkpoints"
    assert progress(whole, 4)["frozen"]
    by_step, evaluations = metrics(whole)
    assert list(by_step) == [1, 2, 3, 4]
    np.testing.assert_allclose(by_step[1]["dpo/margin"], 0, atol=1e-6)  # the model is the reference
    np.testing.assert_allclose(by_step[1]["train/loss"], np.log(2), rtol=1e-6)
    assert by_step[4]["dpo/margin"] > 0
    assert by_step[4]["dpo/accuracy"] > 0.5
    evaluated = evaluations[-1]
    assert {f"eval/dpo/{n}" for n in ("loss", "accuracy", "margin")} <= evaluated.keys()
    assert evaluated["eval/dpo/loss"] < np.log(2)
    # The same metrics as after a resume.
    assert metrics(runs / "parts")[1][-1]["eval/dpo/loss"] == evaluated["eval/dpo/loss"]


@pytest.fixture(scope="module")
def other(runs):
    """A run of another base model."""
    assert launch.fit(config(runs, "other", train={"max_steps": 2, "seed": 1})) is Exit.COMPLETED
    return runs / "other"


def test_changed_reference_is_refused(runs, whole, other):
    settings = {"train": {"max_steps": 5}, "dpo": {"reference": str(other)}}
    with pytest.raises(UserError, match=r"dpo.reference = .* is not the model that the run began"):
        launch.fit(dpo(runs, "whole", **settings))


@pytest.mark.slow
def test_run_that_starts_from_dpo_has_another_reference(runs, whole):
    start = {"load_path": str(whole), "exclude_from_loading": []}
    assert (
        launch.fit(dpo(runs, "second", checkpoint=start, train={"max_steps": 5})) is Exit.COMPLETED
    )
    assert progress(runs / "second", 5)["frozen"] != progress(whole, 4)["frozen"]


@pytest.mark.slow
def test_adapters_have_their_base_as_reference(runs):
    lora, steps = {"rank": 2}, {"max_steps": 2}
    assert launch.fit(dpo(runs, "adapted", lora=lora, train=steps)) is Exit.COMPLETED
    base = {"reference": str(runs / "base")}
    with_copy = dpo(runs, "with_copy", lora=lora, dpo=base, train=steps)
    assert launch.fit(with_copy) is Exit.COMPLETED
    assert stored(runs / "adapted", 2) == stored(runs / "with_copy", 2)
    assert not progress(runs / "adapted", 2)["frozen"]
    assert metrics(runs / "adapted")[1][-1]["eval/dpo/margin"] > 0.001


def test_evaluate_reports_metrics_of_pairs(runs, whole):
    _, sums = evaluate(whole)
    logged = metrics(whole)[1][-1]
    for name in ("dpo/loss", "dpo/margin", "dpo/accuracy", "loss"):
        np.testing.assert_allclose(sums[""].metrics()[name], logged[f"eval/{name}"], rtol=1e-5)
    _, sums = evaluate(whole, sets=[f"text={runs / 'text' / 'train'}"])
    assert "dpo/loss" not in sums["text"].metrics()


@pytest.mark.slow
def test_replay_repeats_a_step_with_its_reference(whole):
    with open_past(whole, 3) as past:
        again = past.walk(3).advance()
    logged = metrics(whole)[0][3]
    assert float(again["loss"]) == logged["train/loss"]


@pytest.mark.slow
def test_student_learns_from_a_larger_teacher(runs, other):
    assert launch.fit(student(runs, "student", max_steps=2)) is Exit.COMPLETED
    lines = [json.loads(x) for x in (runs / "student" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "distillation/kl" in line] == [1, 2]
    assert any("eval/distillation/kl" in line for line in lines)
    assert any("terms/kl" in line for line in lines)
    longer = student(runs, "student", max_steps=3)
    section = longer.distillation.model_copy(update={"teacher": str(other)})
    changed = longer.model_copy(update={"distillation": section})
    with pytest.raises(UserError, match=r"distillation.teacher.* is not the model that the run"):
        launch.fit(changed)


@pytest.mark.slow
def test_hugging_face_teacher_equals_the_run_that_it_was_exported_from(runs):
    """The student has another shape, so that the teacher's comes from its `config.json`."""
    export(checkpoints.find(runs / "base"), runs / "base_hf")
    assert launch.fit(student(runs, "of_run", max_steps=2)) is Exit.COMPLETED
    assert launch.fit(student(runs, "of_hf", max_steps=2, teacher="base_hf")) is Exit.COMPLETED
    assert stored(runs / "of_hf", 2) == stored(runs / "of_run", 2)
    assert progress(runs / "of_hf", 2)["frozen"] == progress(runs / "of_run", 2)["frozen"]


def test_dry_run_counts_the_teacher(runs, capsys):
    """The base model has 44,400 parameters in float32."""
    states = []
    for objective in ("next_token", "distillation"):
        config = student(runs, "dry", objective=objective)
        (runs / "dry.toml").write_text(config.to_toml())
        assert train.main(["--config", str(runs / "dry.toml"), "--dry-run"]) == 0
        states.append(float(re.search(r"state ([\d.e-]+) GB", capsys.readouterr().out)[1]))
    assert states[1] - states[0] == pytest.approx(4 * 44_400 / 1e9, rel=0.02)


def test_missing_teacher_is_named(runs):
    with pytest.raises(UserError, match=r"distillation.teacher = .*/missing: .*no checkpoint"):
        launch.fit(student(runs, "without", teacher="missing"))


@pytest.mark.slow
def test_distillation_resumes_bit_exactly(runs):
    assert launch.fit(student(runs, "undivided")) is Exit.COMPLETED
    assert launch.fit(student(runs, "divided", exit_interval=2)) is Exit.INTERVAL
    assert launch.fit(student(runs, "divided")) is Exit.COMPLETED
    assert stored(runs / "divided", 4) == stored(runs / "undivided", 4)
