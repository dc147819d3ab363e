"""Replay of steps of finished runs: exactness, documents."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.commands import replay as command
from jaxforge.config import rules
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.model.layer import Capture
from jaxforge.optim.chain import global_norm
from jaxforge.runs import run_directory
from jaxforge.tools.replay import past as the_past
from jaxforge.tools.replay.past import open_past
from jaxforge.tools.replay.steps import (
    RepeatedStep,
    find_documents,
    replayed,
    token_loss_function,
)
from jaxforge.training import launch
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("two_devices")

LENGTH, ROWS, STEPS = 32, 8, 30
AFTER_SAVE = 5
"""A step directly after a checkpoint, so that no step before it must be replayed."""
POISON = 5
"""The sequence of the data that is noise; the others are regular."""


def write_data(directory):
    """Write 48 sequences of LENGTH + 1 tokens."""
    directory.mkdir(exist_ok=True)
    counting = np.arange(48 * (LENGTH + 1)) % 7 + 1
    noise = np.random.default_rng(0).integers(1, 256, LENGTH // 2)
    begin = POISON * (LENGTH + 1) + 10
    counting[begin : begin + len(noise)] = noise
    np.save(directory / "x.npy", counting.astype(np.uint16))


def config(tmp_path, **sections):
    write_data(tmp_path / "data")
    keys = {
        "train": {"max_steps": STEPS, "batch_size": ROWS // 2},
        "distributed": {"dp_shard": 2},
        "data": {"dataset_path": str(tmp_path / "data")},
        "checkpoint": {"dir": str(tmp_path / "run"), "interval": 4},
    }
    return tiny_config(
        **{name: keys.get(name, {}) | sections.get(name, {}) for name in {*keys, *sections}}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that stopped after step 18 and resumed with another learning rate."""
    tmp_path = tmp_path_factory.mktemp("replay")
    stopping = {"max_steps": STEPS, "batch_size": ROWS // 2, "exit_interval": 18}
    launch.fit(config(tmp_path, train=stopping))
    launch.fit(config(tmp_path, optimizer={"lr": 1e-2}))
    return tmp_path / "run"


def differences(run, first, last, *overrides):
    return {item.step: item.difference for item in replayed(run, first, last, overrides)}


def test_replayed_steps_match_log_bit_exactly(run):
    """Steps before and after the first checkpoint, and after a restart."""
    assert differences(run, 2, 5) == dict.fromkeys(range(2, 6), 0.0)
    assert differences(run, 17, 21) == dict.fromkeys(range(17, 22), 0.0)


def test_earlier_start_replaces_later_configs(tmp_path):
    for step, lr in ((0, 0.1), (10, 0.2), (20, 0.3), (10, 0.4)):
        run_directory.record_start(tmp_path, config(tmp_path, optimizer={"lr": lr}), step)
    rates = [run_directory.config_of_step(tmp_path, n).optimizer.lr for n in (1, 10, 11, 30)]
    assert rates == [0.1, 0.1, 0.4, 0.4]


def test_open_past_uses_config_of_the_step(run):
    with open_past(run, 18) as past:
        assert past.config.optimizer.lr == 3e-3
    with open_past(run, 19) as past:
        assert past.config.optimizer.lr == 1e-2


@pytest.mark.slow
def test_replay_on_another_mesh_differs_by_rounding(run):
    mesh = ("--distributed.dp_shard=1", "--distributed.tp=2", "--train.batch_size=8")
    assert all(0 <= difference < 1e-6 for difference in differences(run, 13, 14, *mesh).values())


def test_replay_on_fewer_devices_keeps_the_batch(run, monkeypatch):
    with open_past(run, 6) as past:
        before = past.config.train.microbatch_size(2)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with open_past(run, 6) as past:
        assert past.mesh.size == 1
        assert past.config.train.microbatch_size(1) == before


def last_step_with(run, sequence):
    """Return the last step that read a sequence, and its row; an epoch has six steps."""
    with open_past(run, STEPS - 5) as past:
        walk = past.walk(STEPS - 5)
        for step in range(STEPS - 5, STEPS + 1):
            names = [walk.name_of(row) for row in range(ROWS)]
            if f"sequence {sequence}" in names:
                return step, names.index(f"sequence {sequence}")
            walk.advance()
    raise AssertionError("no step of the epoch read the sequence")


@pytest.mark.slow
def test_noise_document_has_the_largest_loss(run, capsys):
    step, row = last_step_with(run, POISON)
    arguments = ["--step", str(step), "--check", "--json", str(run / "o.json")]
    assert command.main([str(run), *arguments]) == 0
    assert f"sequence {POISON}" in capsys.readouterr().out
    result = json.loads((run / "o.json").read_text())
    first = result["documents"][0]
    assert (first["row"], first["sequence"]) == (row, f"sequence {POISON}")
    assert first["loss"] == max(document["loss"] for document in result["documents"])
    assert result["step"]["difference"] == 0
    with pytest.raises(UserError, match="--json does not apply to several steps"):
        command.main([str(run), "--steps", "1:2", "--json", "o.json"])


def test_first_different_value_is_named():
    assert RepeatedStep(3, 2.0, 1.0, True, (2.0, 1.0)).comparison == "the same"
    assert RepeatedStep(3, 2.0, 1.0, False, (2.0, 1.0)).comparison == "the same, update skipped"
    assert RepeatedStep(3, 2.5, 1.0, True, (2.0, 2.0)).comparison == "loss was 2 (2.5e-01 apart)"
    assert RepeatedStep(3, 2.0, 1.0, True, (2.0, 2.0)).comparison.startswith("grad norm was 2 ")


def test_token_losses_average_to_step_loss(run):
    with open_past(run, AFTER_SAVE) as past:
        walk = past.walk(AFTER_SAVE)
        losses = token_loss_function(past.model, past.mesh)(walk.state.variables, walk.batch)
        assert losses.shape == (1, ROWS, LENGTH)
        assert losses.mean() == pytest.approx(float(walk.advance()["loss"]), rel=1e-6)


def test_documents_are_split_by_eos_or_segments():
    tokens = np.array([[[5, 6, 0, 7, 8, 0, 9, 9]]])
    labels = np.array([[[6, 0, 7, 8, 0, 9, -100, -100]]])
    losses = np.arange(8.0).reshape(1, 1, 8)
    batch = {"input_ids": tokens, "labels": labels}
    result = find_documents(batch, losses, eos=0)
    summaries = [(doc.start, doc.end, doc.tokens, doc.loss) for doc in result]
    assert summaries == [(0, 3, 3, 1.0), (3, 6, 3, 4.0)]
    packed = {**batch, "segment_ids": np.array([[[1, 1, 1, 1, 2, 2, 2, 2]]])}
    ranges = [(doc.start, doc.end) for doc in find_documents(packed, losses, eos=0)]
    assert ranges == [(0, 4), (4, 8)]
    [whole] = find_documents(batch, losses, eos=None)
    assert (whole.start, whole.end) == (0, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "31"], "step 31 does not exist: steps are 1 to train.max_steps = 30"),
        (["--step", "0"], "step 0 does not exist"),
        (["--steps", "4-6"], "--steps 4-6: must be A:B"),
        (["--steps", "6:4"], "--steps 6:4: must be A:B"),
        ([], "--step N, --steps A:B or --capsule FILE is required"),
        (["--steps", "1:2", "--top", "3"], "--top does not apply to several steps"),
    ],
)
def test_invalid_replay_steps_are_refused(run, arguments, message):
    with pytest.raises(UserError, match=message):
        command.main([str(run), *arguments])


def test_captured_points_add_up_to_residual_stream(run):
    with open_past(run, AFTER_SAVE) as past:
        walk = past.walk(AFTER_SAVE)
        tokens = walk.batch["input_ids"][0]

        @jax.jit
        def seen(params, tokens):
            names = ("residual", "attention", "mlp")
            batch = {"input_ids": tokens}
            hidden, out = past.model.forward(params, batch, capture=Capture(names))
            last = past.model.final_norm(params, out.activations["residual"][-1])
            return hidden, last, *(out.activations[name] for name in names)

        result = map(np.asarray, seen(walk.state.variables, tokens))
        hidden, last, residual, attention, mlp = result
        np.testing.assert_allclose(last, hidden, rtol=1e-5, atol=1e-6)
        added = attention[1] + mlp[1]
        np.testing.assert_allclose(residual[1] - residual[0], added, rtol=1e-4, atol=1e-5)
        assert float(global_norm({"x": jnp.asarray(added)})) > 0


def test_replay_keeps_global_batch_on_other_devices():
    """Replay does not fix the batch size per device that the config left open."""
    config = load_config(None, ["--train.global_batch_size=8", "--distributed.dp_shard=4"])
    there = the_past.on_these_devices(config, 1, None, ["--distributed.dp_shard=2"])
    rules.check(there, 2)
    assert there.train.microbatch_size(2) == 8


def test_replay_keeps_batch_on_another_mesh_unless_overridden(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    config = load_config(None, ["--train.batch_size=4", "--distributed.dp_shard=8"])

    def size(*mesh):
        return the_past.on_these_devices(config, 1, None, mesh).train.batch_size

    assert size("--distributed.dp_shard=4", "--distributed.tp=2") == 8
    assert size("--distributed.dp_shard=-1", "--distributed.tp=4") == 16
    assert size("--distributed.dp_shard=4", "--train.batch_size=4") == 4
    with pytest.raises(UserError, match="a microbatch of 32 sequences cannot be split over 3"):
        size("--distributed.dp_shard=3")
