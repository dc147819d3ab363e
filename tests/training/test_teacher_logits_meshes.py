"""Saved logits of a teacher on several devices."""

import json

import numpy as np
import pytest

from jaxforge.data.sources import open_training_data
from jaxforge.data.teacher_logits import TEACHER_IDS, TEACHER_LOGITS
from jaxforge.exit_codes import Exit
from jaxforge.tools.teacher_logits import save
from jaxforge.training import launch
from tests.training.objectives import prepare_data, student

pytestmark = pytest.mark.usefixtures("two_devices")


def on_mesh(config, *, logits=None, **axes):
    teacher = None if logits else config.distillation.teacher
    section = {"teacher": teacher, "logits": logits and str(logits)}
    axes = {"dp_shard": 1, **axes}
    return config.model_copy(
        update={
            "distributed": config.distributed.model_copy(update=axes),
            "distillation": config.distillation.model_copy(update=section),
        }
    )


@pytest.mark.slow  # quick, with one device: test_teacher_logits.py
def test_mesh_changes_neither_saved_logits_nor_the_run(tmp_path):
    prepare_data(tmp_path, distributed={"dp_shard": 2})
    config = student(tmp_path, "any")
    saved = []
    for name, axes in (("rows", {"dp_shard": 2}), ("sequences", {"cp": 2})):
        save(on_mesh(config, **axes), tmp_path / name)
        data = open_training_data(on_mesh(config, logits=tmp_path / name))
        saved.append(data.batch(range(len(data))))
    first, second = saved
    np.testing.assert_allclose(first[TEACHER_LOGITS], second[TEACHER_LOGITS], rtol=1e-5, atol=1e-6)
    gaps = -np.diff(first[TEACHER_LOGITS], append=-np.inf)
    is_distinct = (gaps > 1e-5) & (np.roll(gaps, 1, -1) > 1e-5)
    np.testing.assert_array_equal(first[TEACHER_IDS][is_distinct], second[TEACHER_IDS][is_distinct])
    losses = []
    for name, logits in (("online", None), ("offline", tmp_path / "rows")):
        of_run = on_mesh(student(tmp_path, name), logits=logits, cp=2)
        assert launch.fit(of_run) is Exit.COMPLETED
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
    assert len(losses[0]) == 4
    np.testing.assert_allclose(*losses, rtol=2e-6)
