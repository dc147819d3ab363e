"""Runs that learn nothing or lose their directory must fail."""

import json
import shutil

import numpy as np
import pytest

from jaxforge.errors import StorageError, UserError
from jaxforge.exit_codes import Exit
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("one_device")

EOS, ROWS, LENGTH = 7, 8, 32


def config(tmp_path, unlabelled, steps=3, **sections):
    """Return the config of a run whose first batches contain only EOS: no label is valid."""
    tokens = np.random.default_rng(0).integers(8, 200, steps * ROWS * (LENGTH + 1), np.uint16)
    tokens[: unlabelled * ROWS * (LENGTH + 1)] = EOS
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", tokens)
    data = {
        "dataset_path": str(tmp_path / "data"), "shuffle": False, "pack_sequences": True,
        "eos_token_id": EOS, "num_workers": 1,
    }  # fmt: skip
    return tiny_config(
        train={"max_steps": steps, "batch_size": ROWS}, data=data,
        checkpoint={"dir": str(tmp_path / "run"), "interval": steps}, **sections,
    )  # fmt: skip


def lines(tmp_path):
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    return [
        splitline for splitline in map(json.loads, text.splitlines()) if "train/loss" in splitline
    ]


def test_run_without_labels_raises_user_error(tmp_path, capsys):
    with pytest.raises(UserError, match=r"nothing was learned: none of 3 update\(s\) was applied"):
        launch.fit(config(tmp_path, unlabelled=3))
    for line in lines(tmp_path):
        assert (line["train/loss"], line["smoothed/loss"]) == (None, None)
        assert (line["train/valid_tokens"], line["interval/nan_steps"]) == (0, 0)
    log = capsys.readouterr().err
    assert "Training complete" not in log
    assert log.count("without valid labels") == 1


@pytest.mark.parametrize("interval", [1, 3])
def test_step_without_labels_warns_and_has_no_loss(tmp_path, capsys, interval):
    job = config(tmp_path, unlabelled=1, metrics={"log_interval": interval})
    assert launch.fit(job) is Exit.COMPLETED
    first, *_, last = lines(tmp_path)
    assert (first["train/loss"], first["smoothed/loss"]) == (None, None)
    assert last["smoothed/loss"] > 4
    assert (last["interval/nan_steps"], last["train/skipped_steps"]) == (0, 1)
    assert capsys.readouterr().err.count("up to step 1: 1 step(s) without valid labels") == 1


@pytest.mark.parametrize("change", [shutil.rmtree, lambda run: run.rename(run.with_name("moved"))])
def test_run_fails_when_its_directory_disappears(tmp_path, change):
    class Removes(Callback):
        def on_step_end(self, context):
            if context.step == 2:
                change(tmp_path / "run")

    with pytest.raises(StorageError, match="was removed, moved or replaced"):
        launch.fit(config(tmp_path, unlabelled=0, steps=9), [Removes()])
