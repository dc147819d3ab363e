"""Known mistakes of other loops after a bad step, a resume or an evaluation."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.checkpoint import restore
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import Saved, starting_state
from jaxforge.config import load_unresolved
from jaxforge.optim.schedule import learning_rate
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.step.train_step import CompiledSteps
from jaxforge.training import training_data
from jaxforge.training.evaluation import make_eval_step
from jaxforge.training.training_data import Phases
from tests.conftest import tiny_config
from tests.helpers import progress_of, random_batches, setup

POISON = 63  # a token whose embedding is NaN
MODEL = {"dim": 32, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 64, "ffn_hidden_dim": 48}
BAD, STOP = 1, 3  # index of the bad batch, and step of the checkpoint


def copied(state):
    """Return a copy of a state, whose memory the next step reuses."""
    return jax.tree.map(np.array, jax.device_get(state))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Five steps, the second of them bad; saved after the third while the fourth runs."""
    ours = setup(tiny_config(model=MODEL, train={"seq_len": 16, "batch_size": 4}))
    batches = random_batches(ours.config, 5)
    for i, batch in enumerate(batches):
        batch["input_ids"][batch["input_ids"] == POISON] = 0
        batch["input_ids"][0, 0, 0] = POISON if i == BAD else 1
    state = ours.state()
    weight = state.params["token_embedding"]["embedding"]["weight"]
    state.params["token_embedding"]["embedding"]["weight"] = weight.at[POISON].set(jnp.nan)
    state, _ = ours.run(state, batches[:STOP])
    directory, middle = tmp_path_factory.mktemp("run"), copied(state)
    saved = checkpoints(directory, ours)
    saved.save(progress_of(state), state)
    state, _ = ours.run(state, batches[STOP:])
    saved.close()
    return types.SimpleNamespace(
        ours=ours, batches=batches, directory=directory, middle=middle, end=copied(state)
    )


def checkpoints(directory, ours):
    return Checkpoints(directory, ours.config.checkpoint, ours.model.axes, stack=ours.model.stack)


@pytest.fixture
def restored(run):
    """State and progress of a restarted run."""
    ours, result = run.ours, checkpoints(run.directory, run.ours)
    with jax.set_mesh(ours.mesh):
        yield starting_state(ours, result)
    result.close()


def test_bad_step_consumes_batch_without_learning_tokens(run, restored):
    _, progress = restored
    labels = [batch["labels"] for i, batch in enumerate(run.batches[:STOP]) if i != BAD]
    assert (progress.step, progress.samples) == (STOP, STOP * 4)
    assert progress.tokens == sum(step_labels.size for step_labels in labels)
    assert progress.valid_tokens == sum(np.sum(step_labels != -100) for step_labels in labels)
    assert int(run.middle.guard.total) == 1
    assert int(run.middle.opt_state[1].updates) == STOP - 1


def test_save_is_independent_of_later_steps(run, restored):
    assert_same(copied(restored[0]), run.middle)


def test_resume_after_bad_step_equals_uninterrupted_run(run, restored):
    """Guard, counters and schedule are equal too; no update or batch is repeated."""
    state, _ = run.ours.run(restored[0], run.batches[STOP:])
    assert_same(copied(state), run.end)


def test_evaluation_does_not_change_training(run, restored):
    """In PyTorch, `eval()` holds until `train()` is called."""
    ours, (state, _) = run.ours, restored
    evaluate = make_eval_step(ours.model, ours.config.train, ours.mesh)
    evaluate(state.params, ours.put(run.batches[0]), np.ones(MODEL["vocab_size"], np.int32))
    assert_same(copied(state), run.middle)
    state, _ = ours.run(state, run.batches[STOP:])
    assert_same(copied(state), run.end)


def test_resume_uses_newest_and_not_best_checkpoint(run, restored, tmp_path, monkeypatch):
    """`load_path` is ignored too, since the run has checkpoints."""
    keys = {"keep_last_n": 1, "keep_best_n": 1, "load_path": "nowhere"}
    ours = setup(tiny_config(model=MODEL, checkpoint=keys))
    saved = checkpoints(tmp_path, ours)
    for step, loss in ((1, 1.0), (2, 3.0), (3, 2.0)):
        saved.save(Progress(step=step), restored[0], {"eval/loss": loss})
    saved.close()
    again = checkpoints(tmp_path, ours)
    assert again.steps() == [1, 3]
    monkeypatch.setattr(restore, "start_from", lambda source, *_, **__: source)
    assert starting_state(ours, again) == Saved(again, 3)
    again.close()


RAMP = {
    "max_steps": 9, "batch_size": 4, "grad_accum_steps": 4,
    "batch_ramp": [{"grad_accum_steps": 1}, {"start": 3, "grad_accum_steps": 2},
                   {"start": 6, "grad_accum_steps": 4}],
}  # fmt: skip


def test_batch_ramp_resumes_at_its_position(monkeypatch):
    """The run began with another batch size: after two steps, the position is 100 and not 8."""
    monkeypatch.setattr(
        training_data.loader,
        "training_batches",
        lambda c, m, d, first, n, _, accum: [(first, n, accum)],
    )
    config = tiny_config(train=RAMP)
    location, phases = Progress(step=2, samples=100), Phases.of(config.data)
    spans = training_data.batches_from(location, config, None, None, phases, config.train.ramp(1))
    assert list(spans) == [(100, 1, 1), (104, 3, 2), (128, 3, 4)]


def test_every_batch_size_is_compiled_before_first_step(monkeypatch):
    shapes = []
    monkeypatch.setattr(Program, "lower", lambda _, batch: shapes.append(batch["labels"].shape))
    program = Program(tiny_config(train=RAMP))
    program.lower_sizes({"labels": jnp.zeros((2, 4, 16), jnp.int32)})
    assert sorted(shapes) == [(1, 4, 16), (2, 4, 16), (4, 4, 16)]
    steps = CompiledSteps({n: lambda *_, n=n: n for n in (1, 2, 4)})
    assert [steps[n](None, None, None) for n in (2, 4, 1)] == [2, 4, 1]
    assert steps.largest() == 4


def test_learning_rate_floor_scales_with_peak():
    """Some implementations scale the peak only."""
    settings = ["lr=1e-3", "lr_scale_rule=linear", "lr_base_batch=256"]
    config = load_unresolved(
        None,
        [*(f"--optimizer.{setting}" for setting in settings), "--train.global_batch_size=4096",
         "--train.max_steps=100", "--scheduler.warmup_steps=10"],
    ).resolve(1)  # fmt: skip
    rate = learning_rate(config)
    np.testing.assert_allclose([rate(10), rate(100)], [16e-3, 1.6e-3], rtol=1e-6)
