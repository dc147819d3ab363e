"""Whose fault a bad step is: the machine's answers differ, those of data and numbers do not."""

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
    """A step on two microbatches whose second and tenth sequence meet a NaN in the embedding."""
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


def test_same_answer_is_the_data_and_names_them(bad_step, caplog):
    assert examine(bad_step, None) is None
    assert "gave the same answer: its data or its numbers are at fault" in caplog.text
    assert "not finite: sample 161 (nan nats); sample 169 (nan nats)" in caplog.text


def test_another_answer_is_the_machine(bad_step, caplog, monkeypatch):
    odd = jax.devices()[3]
    real = attribution._try
    monkeypatch.setattr(attribution, "_try", lambda d: real(d) + (d == odd))

    def flipped(state, batch, controls):
        state, metrics = bad_step[0].step(state, batch, controls)
        return state, {**metrics, "loss": jnp.full_like(metrics["loss"], 2.0)}

    assert examine(bad_step, flipped) is Exit.MACHINE
    assert f"the machine is at fault; these devices come to another result: {odd}" in (
        caplog.text.replace(" than the others", "")
    )


def test_devices_that_agree_are_not_accused():
    assert outlier_devices() == []


def test_worst_rows_are_those_that_are_not_finite_else_the_largest():
    losses = np.array([[1.0, np.nan], [np.inf, 2.0]])
    assert [location for location, _ in worst_rows(losses)] == [1, 2]
    assert worst_rows(np.array([[1.0, 3.0], [4.0, 2.0]]))[:2] == [(2, 4.0), (1, 3.0)]
