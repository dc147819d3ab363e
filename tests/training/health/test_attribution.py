"""Attribution of bad steps: results of faulty hardware differ, results of bad data do not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.exit_codes import Exit
from jaxforge.step.train_step import Controls
from jaxforge.training.health import attribution
from jaxforge.training.health.attribution import (
    Attribution,
    make_row_losses,
    outlier_devices,
    worst_rows,
)
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup


@pytest.fixture(scope="module")
def bad_step():
    """A step on two microbatches; the embedding gives NaN for the second and tenth sequence."""
    ours = setup(tiny_config(model={"n_layers": 1}, distributed={"dp_shard": 2},
                             train={"grad_accum_steps": 2, "batch_size": 4}))  # fmt: skip
    (batch,) = random_batches(ours.config, 1)
    batch["input_ids"][batch["input_ids"] == 255] = 254
    batch["input_ids"][0, 1, 3] = batch["input_ids"][1, 1, 0] = 255

    def state():
        state = ours.state()
        table = state.params["token_embedding"]["embedding"]["weight"]
        params = jax.tree.map(lambda leaf: leaf, state.params)
        params["token_embedding"]["embedding"]["weight"] = table.at[255].set(jnp.nan)
        return dataclasses.replace(state, params=params)

    return ours, state, ours.put(batch)


def examine(bad_step, step):
    ours, state, batch = bad_step
    with jax.set_mesh(ours.mesh):
        row_losses = make_row_losses(ours.model, ours.config.train, ours.mesh)
        after, metrics = ours.step(state(), batch, Controls())
        before = jax.device_get(after)
        after, fault = Attribution(row_losses, lambda position: f"sample {position}").examine(
            step or ours.step, after, batch, metrics, Controls(), first=160
        )
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(after))
    return fault


def test_same_result_names_sequences(bad_step, caplog):
    assert examine(bad_step, None) is None
    assert "gave the same result: the cause is data or numerics" in caplog.text
    assert "not finite: sample 161 (nan nats); sample 169 (nan nats)" in caplog.text


def test_different_result_blames_hardware(bad_step, caplog, monkeypatch):
    outlier = jax.devices()[3]
    real = attribution.device_checksum
    monkeypatch.setattr(attribution, "device_checksum", lambda d: real(d) + (d == outlier))

    def flipped(state, batch, controls):
        state, metrics = bad_step[0].step(state, batch, controls)
        return state, {**metrics, "loss": jnp.full_like(metrics["loss"], 2.0)}

    assert examine(bad_step, flipped) is Exit.MACHINE
    assert f"the hardware is faulty. These devices compute another result: {outlier}" in (
        caplog.text.replace(" than the others", "")
    )


def test_agreeing_devices_are_not_reported():
    assert outlier_devices() == []


def test_worst_rows_are_nonfinite_or_largest():
    losses = np.array([[1.0, np.nan], [np.inf, 2.0]])
    assert [location for location, _ in worst_rows(losses)] == [1, 2]
    assert worst_rows(np.array([[1.0, 3.0], [4.0, 2.0]]))[:2] == [(2, 4.0), (1, 3.0)]
