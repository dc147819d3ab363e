"""Rollback of runs whose data give a NaN loss."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge import program as program_module
from jaxforge.exit_codes import Exit
from jaxforge.runs import attempts
from jaxforge.telemetry.goodput import account
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from tests.conftest import tiny_config
from tests.helpers import stored_progress
from torch_compat.formats.ocdbt import open_arrays

pytestmark = pytest.mark.usefixtures("one_device")

POISON = 255  # a token that makes the loss NaN
ROWS, LENGTH = 8, 32


@pytest.fixture(scope="module")
def poisonous():
    """Patch the step: its loss is NaN for batches that contain the token POISON."""
    make = program_module.make_gradients

    def make_poisonous(*args):
        gradients = make(*args)

        def poisonous_gradients(params, state, batch, scale):
            grads, loss = gradients(params, state, batch, scale)
            poisoned = jnp.any(batch["input_ids"] == POISON)
            terms = {"poisoned": jnp.where(poisoned, jnp.nan, loss.value)}
            return grads, loss._replace(aux=loss.aux._replace(loss_terms=terms))

        return poisonous_gradients

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_module, "make_gradients", make_poisonous)
        yield


def config(tmp_path, poisoned, interval=10, **sections):
    """Return the config of a run of 40 steps; batches in `poisoned` contain POISON."""
    data = tmp_path / "data"
    if not data.exists():
        data.mkdir()
        tokens = np.arange(90 * ROWS * (LENGTH + 1), dtype=np.uint16) % 7
        for batch in poisoned:
            tokens[batch * ROWS * (LENGTH + 1) + 5] = POISON
        np.save(data / "a.npy", tokens)
    return tiny_config(
        train={"max_steps": 40, "on_nonfinite": "rollback", "nan_consecutive_max": 10,
               "batch_size": ROWS, **sections.pop("train", {})},
        data={"dataset_path": str(data), "shuffle": False, "num_workers": 1},
        checkpoint={"dir": str(tmp_path / "run"), "interval": interval, "keep_last_n": 0},
        **sections,
    )  # fmt: skip


def lines(tmp_path):
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(tmp_path):
    return {line["step"]: line["train/loss"] for line in lines(tmp_path) if "train/loss" in line}


def saved(tmp_path):
    steps = (tmp_path / "run" / "checkpoints").glob("step_*")
    return sorted(int(path.name.removeprefix("step_")) for path in steps)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, poisonous):
    """The directory of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole")
    assert launch.fit(config(directory, range(22, 32))) is Exit.COMPLETED
    return directory


def test_run_continues_past_ten_nans_in_a_row(whole):
    assert saved(whole) == list(range(0, 41, 10))
    logged = losses(whole)
    assert list(logged) == list(range(1, 41))
    assert all(loss is not None for loss in logged.values())
    assert logged[40] < 0.5 < logged[1]
    # 22 good steps, then 10 bad ones: rollback to step 20. The 12 batches since then are skipped.
    # The checkpoint of step 30, in the middle of the bad steps, is not good.
    last = stored_progress(whole / "run", 40)
    (rollback,) = last["rollbacks"]
    assert (rollback["from"], rollback["to"], rollback["samples"]) == (32, 20, 12 * ROWS)
    assert (last["samples"], last["tokens"]) == (52 * ROWS, 40 * ROWS * LENGTH)
    assert (last["skipped"], last["updates"], last["consecutive_bad"]) == (0, 40, 0)
    assert [line for line in lines(whole) if line.get("train/rollbacks") == 1]


def test_time_of_a_rollback_is_accounted_for(whole):
    (attempt,) = attempts.read(whole / "run")[0][0]
    seconds = account([attempt])
    assert sum(seconds.values()) == pytest.approx(attempt.seen - attempt.began, rel=0.01)
    assert all(seconds[name] > 0 for name in ("compile", "save", "rollback", "step", "rework"))
    line = [line for line in lines(whole) if "goodput/ratio" in line][-1]
    assert (attempt.step, line["goodput/rework_sec"]) == (40, seconds["rework"])


def test_resume_after_rollback_equals_uninterrupted_run(whole, tmp_path):
    stop = {"exit_interval": 33}
    assert launch.fit(config(tmp_path, range(22, 32), train=stop)) is Exit.INTERVAL
    assert launch.fit(config(tmp_path, range(22, 32))) is Exit.COMPLETED
    assert losses(tmp_path) == losses(whole)
    first, second = attempts.read(tmp_path / "run")[0][0]
    assert (first.code, second.code) == (Exit.INTERVAL.code, 0)
    assert second.seconds["restore"] > 0


@pytest.mark.slow
def test_average_of_parameters_rolls_back(tmp_path, poisonous):
    """The average covers the parameters of all checkpoints, and no step that was undone."""
    decay = 0.7
    job = config(tmp_path, [4, 5], 1, model={"n_layers": 1},
                 train={"max_steps": 7, "nan_consecutive_max": 2, "ema_decay": decay})  # fmt: skip
    assert launch.fit(job) is Exit.COMPLETED
    assert stored_progress(tmp_path / "run", 7)["rollbacks"][0]["from"] == 6
    assert saved(tmp_path) == list(range(8))
    arrays = [open_arrays(tmp_path / "run/checkpoints" / f"step_{n}" / "state") for n in range(8)]
    names = [name for name in arrays[0] if name.startswith("params.")]
    for name in names:
        mean, *others = (of_step[name].all().astype(np.float64) for of_step in arrays)
        for params in others:
            mean = decay * mean + (1 - decay) * params
        average = arrays[-1][name.replace("params.", "ema.", 1)].all()
        np.testing.assert_allclose(average, mean, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_repeated_trouble_rolls_back_further_up_to_limit(tmp_path, poisonous, capsys):
    limits = {"nan_consecutive_max": 2, "max_rollbacks": 3}
    assert launch.fit(config(tmp_path, range(12, 90), 5, train=limits)) is Exit.NON_FINITE
    log = capsys.readouterr().err
    assert "rolled back from step 14 to step 10" in log
    assert "rolled back from step 12 to step 5" in log
    assert "rolled back from step 7 to step 0" in log
    assert "no further rollback: train.max_rollbacks = 3 is reached" in log
    assert saved(tmp_path) == [0]
    assert list(losses(tmp_path).values()) == [None, None]


def test_stop_ends_run_before_bad_update(tmp_path, poisonous, capsys):
    stop = {"on_nonfinite": "stop", "rerun_bad_steps": True}
    assert launch.fit(config(tmp_path, [3], train=stop)) is Exit.NON_FINITE
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
    assert losses(tmp_path)[4] is None
    assert saved(tmp_path) == []
    log = capsys.readouterr().err
    assert "step 4, rerun from the same state, gave the same result" in log
    assert "sequence 24 (" in log


@pytest.mark.parametrize("interval", [1, 10])
def test_no_action_follows_last_bad_step(tmp_path, poisonous, interval):
    """Steps 3 to 5 are bad; all metrics logged under step 5 belong to step 5."""
    recorded, tokens = [], []

    class Seen(Callback):
        def on_step_end(self, context):
            recorded.append(context.step)
            tokens.append(context.tokens_seen)

        def on_train_end(self, step, tokens_seen, reason):
            recorded.append((step, tokens_seen))

    job = config(
        tmp_path, range(2, 5), train={"on_nonfinite": "skip", "nan_consecutive_max": 3},
        metrics={"log_interval": interval},
    )  # fmt: skip
    assert launch.fit(job, [Seen()]) is Exit.NON_FINITE
    assert recorded == [1, 2, 3, 4, 5, (5, 2 * ROWS * LENGTH)]
    assert tokens == [n * ROWS * LENGTH for n in (1, 2, 2, 2, 2)]
    logged = lines(tmp_path)
    assert max(line["step"] for line in logged) == 5
    assert logged[-1]["train/samples"] == 5 * ROWS
    assert logged[-1]["train/loss"] is None
    total = sum(line["interval/skipped_steps"] for line in logged)
    assert (total, logged[-1]["train/skipped_steps"]) == (3, 3)


def test_steps_after_halt_call_no_hook(tmp_path, poisonous):
    steps = []

    class Seen(Callback):
        def on_step_end(self, context):
            steps.append(context.step)

    limits = {"nan_consecutive_max": 2, "max_steps": 8}
    job = config(tmp_path, [4, 5], 3, train=limits, metrics={"log_interval": 100})
    assert launch.fit(job, [Seen()]) is Exit.COMPLETED
    assert steps == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]
