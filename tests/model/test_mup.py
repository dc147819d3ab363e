"""Tests of muP: no change at the base width, constant magnitudes at others (docs/mup.md)."""

import functools
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from pydantic import ValidationError

from jaxforge.config.model import ModelConfig
from jaxforge.model import mup
from jaxforge.model.transformer import Model
from tests.conftest import tiny_config
from tests.helpers import initial_params, lowered, random_batches, setup

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MOE = {
    "num_experts": 4, "moe_expert_dim": 32, "moe_shared_experts": 1, "moe_shared_expert_gate": True,
    "moe_router_bias": True, "moe_latent_dim": 32,
}  # fmt: skip
FOUR = 4.0  # width relative to the base
WIDER = {"mup_base_width": 16, "mup_base_head_dim": 4}  # tiny_config has a width of 64
HIDDEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
          "latent_down_proj", "latent_up_proj"}  # fmt: skip


def is_hidden(path):
    return path[-1] == "weight" and path[-2] in HIDDEN


@functools.cache
def program_of(**keys):
    """Return a model with its step on a mesh."""
    model = {k: v for k, v in keys.items() if k not in ("name", "axes")}
    name = keys.get("name", "adamw")
    averages = {"scheduler": {"name": "none"}} if name == "schedule_free_adamw" else {}
    axes = dict(keys.get("axes", ()))
    microbatches = 4 if "pp" in axes else 1
    rows = 8 // microbatches // axes.get("dp_shard", 1)
    return setup(
        tiny_config(
            model=model, optimizer={"name": name, "lr": 1e-2}, distributed=axes, **averages,
            train={"batch_size": rows, "grad_accum_steps": microbatches},
        )
    )  # fmt: skip


def steps(**keys):
    """Return the metrics of three steps."""
    program = program_of(**keys)
    batches = random_batches(tiny_config(train={"batch_size": 8}), 3)
    if "pp" in dict(keys.get("axes", ())):
        batches = [{k: v.reshape(4, 2, -1) for k, v in b.items()} for b in batches]
    _, metrics = program.run(program.state(), batches)
    return metrics


BASE = {"mup_base_width": 64, "mup_base_head_dim": 16}


def test_step_at_base_width_equals_standard_step():
    """The program and its initial values are equal."""
    plain, same = program_of(), program_of(**BASE)
    assert lowered(same).as_text() == lowered(plain).as_text()
    key = jax.random.key(0)
    assert str(jax.make_jaxpr(same.model.init)(key)) == str(jax.make_jaxpr(plain.model.init)(key))


@pytest.mark.parametrize("name", ["lion", "muon", "schedule_free_adamw"])
def test_updates_at_base_width_equal_standard_updates(name):
    plain, same = (
        str(jax.make_jaxpr(item.optimizer.update)(params, state, params))
        for item in (program_of(name=name), program_of(name=name, **BASE))
        for params in [item.model.abstract]
        for state in [jax.eval_shape(item.optimizer.init, params)]
    )
    assert same == plain


def test_only_hidden_matrices_have_smaller_initial_values():
    shape = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 256, "qkv_bias": True, **MOE}
    plain, wide = (
        flatten_dict(jax.jit(Model(ModelConfig(**shape, **keys)).init)(jax.random.key(0)))
        for keys in ({}, {"mup_base_width": 16})
    )
    assert any(is_hidden(path) and "experts" in path for path in plain)
    for path, values in plain.items():
        factor = FOUR**-0.5 if is_hidden(path) else 1.0
        np.testing.assert_array_equal(wide[path], factor * values, err_msg=str(path))


def test_outputs_and_scores_are_multiplied():
    """A standard model with multipliers folded into its weights computes the same."""
    shape = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 256, **MOE}
    model, standard = Model(ModelConfig(**shape, **WIDER)), Model(ModelConfig(**shape))
    params = jax.device_get(initial_params(model))

    def folded(path, leaf):
        names = [key.key for key in path]
        if {"output_head", "gate", "shared_expert_gate"} & set(names):
            return leaf / FOUR if names[-1] == "weight" else leaf
        return leaf * FOUR**-0.5 if "q_proj" in names else leaf  # √4/16 next to 1/√16

    tokens = np.random.default_rng(0).integers(0, 256, (2, 16))
    logits = [
        jax.jit(lambda p, m=m: m.logits(p, m.hidden(p, tokens)))(p)
        for m, p in ((model, params), (standard, jax.tree_util.tree_map_with_path(folded, params)))
    ]
    np.testing.assert_allclose(*logits, rtol=2e-5, atol=1e-6)


def test_score_scale_follows_head_width():
    shape = {"dim": 64, "n_heads": 4, "mup_base_width": 16}
    assert mup.score_scale(ModelConfig(**shape)) is None  # more heads of the same width
    assert mup.score_scale(ModelConfig(**shape, mup_base_head_dim=16)) is None
    assert mup.score_scale(ModelConfig(**shape, mup_base_head_dim=4)) == 2 / 16
    fixed = ModelConfig(**shape, mup_base_head_dim=4, attention_scale=0.5)
    assert mup.score_scale(fixed) == 0.5 * 4 / 16


@pytest.mark.slow
def test_mup_losses_do_not_depend_on_mesh():
    axes = {"pp": 2, "dp_shard": 2, "tp": 2}
    alone, split = steps(**WIDER), steps(**WIDER, axes=tuple(axes.items()))
    np.testing.assert_allclose(split["loss"], alone["loss"], rtol=1e-5)


@functools.cache
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))  # scripts import one another
    try:
        return runpy.run_path(str(BENCHMARKS / "mup.py"), run_name="benchmark")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.slow
def test_coordinates_do_not_grow_with_width():
    """After some steps, values have the same size at any width; without muP they grow."""
    grown = {
        how: {
            name: benchmark()["growth"](values)
            for name, values in benchmark()["coordinates"](
                (64, 256), mup=how, steps=4, rows=2, n_layers=1
            ).items()
        }
        for how in (False, True)
    }
    for name, growth in grown[True].items():
        assert 1 / 1.6 < growth < 1.6, name
    assert min(grown[False][name] for name in ("attention", "mlp", "residual")) > 4


def test_base_head_dim_without_base_width_raises():
    with pytest.raises(ValidationError, match="has no effect without mup_base_width"):
        ModelConfig(mup_base_head_dim=64)
    with pytest.raises(ValidationError, match="mup_base_width"):
        ModelConfig(mup_base_width=0)
