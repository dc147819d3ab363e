"""Dropout of adapters: masks, and steps on several meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.model.dropout import Dropout, layer_keys
from jaxforge.optim.random_bits import draw_key, random_words
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup
from tests.step.test_lora import random_adapters

RATE = 0.25


def config(**sections):
    lora = {"rank": 4, "dropout": RATE, **sections.pop("lora", {})}
    optimizer = {"lr": 0.01, **sections.pop("optimizer", {})}
    return tiny_config(lora=lora, optimizer=optimizer, **sections)


def mask(*, seed=42, step=0, layer=0, salt=1, shape=(1, 4, 64), channels=256):
    """Return the mask of tokens [m, b, s] as a matrix [tokens, channels]."""
    keys = random_words(draw_key(seed, "lora.dropout", jnp.int32(step)), shape).reshape(-1)
    keys = layer_keys(keys, jnp.int32(layer))
    return np.asarray(Dropout(RATE, salt).drop(jnp.ones((len(keys), channels)), keys))


def correlation(first, second):
    """Return the correlation of two masks in standard deviations of independent ones."""
    products = (first - (1 - RATE)) * (second - (1 - RATE))
    return abs(products.mean()) / ((1 - RATE) * RATE) * products.size**0.5


def test_share_of_dropped_elements_is_the_rate():
    elements = mask()
    deviation = ((1 - RATE) * RATE) ** 0.5
    means = (elements.mean(), elements.size), (elements.mean(0), 256), (elements.mean(1), 256)
    for mean, n in means:
        assert np.max(np.abs(mean - (1 - RATE))) < 5 * deviation / n**0.5
    # Means of tokens and of channels vary like those of independent elements.
    for axis, n in ((0, len(elements)), (1, 256)):
        assert 0.7 < elements.mean(axis).std() / (deviation / n**0.5) < 1.3


@pytest.mark.parametrize(
    "other",
    [{"step": 1}, {"step": 2**20}, {"seed": 43}, {"layer": 1}, {"layer": 79}, {"salt": 2}],
    ids=str,
)
def test_masks_are_independent(other):
    assert correlation(mask(), mask(**other)) < 5


def test_masks_of_tokens_and_channels_are_independent():
    elements = mask()
    shifts = ((shift, axis) for axis in (0, 1) for shift in (1, 2, 16, 64))
    assert max(correlation(elements, np.roll(elements, *shift)) for shift in shifts) < 5


def test_microbatches_do_not_change_the_masks_of_rows():
    np.testing.assert_array_equal(mask(shape=(1, 4, 64)), mask(shape=(2, 2, 64)))


def compare_with_one_device(**settings):
    """Run steps on a mesh, and on one device with all rows in one microbatch."""
    program = setup(config(**settings))
    batches = random_batches(program.config, 2)
    rows = sum(len(batch) for batch in batches[0]["labels"])
    alone = setup(config(train={"batch_size": rows}, model=settings.get("model", {})))
    whole = [{k: x.reshape(1, rows, -1) for k, x in batch.items()} for batch in batches]
    params = random_adapters(alone.state().params, std=0.1)
    stacked = {**params, "layers": jax.tree.map(program.model.stack.stack, params["layers"])}
    _, metrics = program.run(program.state(stacked), batches)
    _, expected = alone.run(alone.state(params), whole)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-4)


@pytest.mark.slow
def test_mesh_does_not_change_the_masks():
    compare_with_one_device(distributed={"dp_shard": 2, "tp": 2}, train={"grad_accum_steps": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"distributed": {"dp_replicate": 2, "dp_shard": 2}},
        {"distributed": {"dp_shard": 2, "tp": 2}, "train": {"grad_sync": "microbatch"}},
        {"distributed": {"dp_shard": 2, "cp": 2, "tp": 2}},
        {"distributed": {"dp_shard": 2, "cp": 2, "cp_strategy": "ring"}},
        {"distributed": {"pp": 2, "dp_shard": 2}, "train": {"grad_accum_steps": 2}},
        {
            "model": {"n_layers": 4},
            "distributed": {"pp": 2, "pp_schedule": "interleaved_1f1b"},
            "train": {"grad_accum_steps": 4, "activation_checkpointing": "full"},
        },
        {"model": {"n_layers": 3}, "distributed": {"pp": 2}, "train": {"grad_accum_steps": 2}},
        {"model": {"n_layers": 5, "sliding_window": 8, "attention_pattern": ["sliding", "full"]}},
        {"train": {"activation_checkpointing": "full"}},
        {"train": {"activation_checkpointing": "dots_saveable"}},
    ],
    ids=str,
)
def test_execution_does_not_change_the_masks(settings):
    compare_with_one_device(**settings)


def test_each_step_has_other_masks():
    program = setup(config(optimizer={"lr": 1e-9}))
    batches = random_batches(program.config, 1) * 2
    params = random_adapters(program.state().params)
    first, second = program.run(program.state(params), batches)[1]["loss"]
    assert first != second
    np.testing.assert_array_equal(
        program.run(program.state(params), batches)[1]["loss"], [first, second]
    )


def test_evaluation_drops_nothing():
    with_dropout, without = (setup(config(lora={"dropout": rate})) for rate in (RATE, 0.0))
    params = random_adapters(without.state().params)
    tokens = jnp.arange(32).reshape(2, 16)
    program, expected = (p.model.hidden(params, tokens) for p in (with_dropout, without))
    np.testing.assert_array_equal(program, expected)


def test_gradients_without_keys_are_refused():
    program = setup(config())
    with pytest.raises(ValueError, match=r"lora.dropout needs the keys of step.mask_keys"):
        jax.eval_shape(
            lambda s, b: program.gradients(s.params, s.model_state, b)[0],
            program.abstract_state(), program.abstract_batch(),
        )  # fmt: skip
