"""Optional metrics of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.errors import UserError
from jaxforge.parallel.stages import Stack
from jaxforge.step.collect import COLLECTED, StepOutputs, check_collect, collect_metrics
from jaxforge.step.train_step import Controls
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.runner import Callbacks
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree)))


@pytest.fixture(scope="module")
def steps():
    """Return (parameters, metrics) after an applied, an excluded and a bad step."""
    program = setup(tiny_config(scheduler={"warmup_steps": 0}), collect=COLLECTED)
    state, results = program.state(), []
    results.append((jax.device_get(state.params), None))
    for batch in random_batches(program.config, 3):
        if len(results) == 3:
            state.params["norm"]["weight"] = state.params["norm"]["weight"].at[0].set(jnp.nan)
        with jax.set_mesh(program.mesh):
            controls = Controls(apply=len(results) != 2)
            state, metrics = program.step(state, program.put(batch), controls)
        results.append(jax.device_get((state.params, metrics)))
    return results


def test_collected_norms_match_numpy(steps):
    (before, _), (after, metrics), _, _ = steps
    grads = metrics["grads"]
    np.testing.assert_allclose(metrics["grad_norm"], norm(grads), rtol=1e-5)
    np.testing.assert_allclose(metrics["params_norm"], norm(after), rtol=1e-5)
    change = jax.tree.map(np.subtract, after, before)
    np.testing.assert_allclose(metrics["update_norm"], norm(change), rtol=1e-3)
    by_part = metrics["grad_norms_per_layer"]
    assert by_part.keys() == {"token_embedding", "layers", "norm", "output_head"}
    for name in by_part.keys() - {"layers"}:
        np.testing.assert_allclose(by_part[name], norm(grads[name]), rtol=1e-5)
    for i in range(2):
        of_layer = jax.tree.map(lambda g, i=i: g[i], grads["layers"])
        np.testing.assert_allclose(by_part["layers"][i], norm(of_layer), rtol=1e-5)


def test_zero_gradients_are_counted(steps):
    _, (_, metrics), *_ = steps
    zeros = sum(np.sum(g == 0) for g in jax.tree.leaves(metrics["grads"]))
    assert (
        metrics["num_zeros_in_grad"] == zeros > 0
    )  # embeddings of tokens that are not in the batch


def test_skipped_step_has_zero_update_norm(steps):
    _, first, left_out, bad = (metrics for _, metrics in steps)
    assert [metrics["applied"] for metrics in (first, left_out, bad)] == [True, False, False]
    assert (left_out["skipped"], left_out["consecutive"], left_out["update_norm"]) == (1, 0, 0)
    assert (bad["skipped"], bad["consecutive"], bad["update_norm"]) == (2, 1, 0)
    assert np.isnan(bad["grad_norm"])


def test_padding_rows_of_stages_are_ignored():
    """Three layers on two stages: the second stage has a padding row."""
    stack = Stack(layers=3, stages=2)
    grads = {
        "layers": {"w": jnp.array([[3.0, 4.0], [5.0, 0.0], [6.0, 8.0], [0.0, 0.0]])},
        "norm": {"weight": jnp.array([0.0, 2.0])},
    }
    got = collect_metrics(
        COLLECTED,
        StepOutputs(grads, grads, jnp.array(True), grads, stack, {"layers": range(stack.layers)}),
    )
    np.testing.assert_allclose(got["grad_norms_per_layer"]["layers"], [5, 5, 10])
    assert got["num_zeros_in_grad"] == 2


def test_norms_of_two_stacks_are_in_layer_order():
    grads = {
        "dense_layers": {"w": jnp.array([[3.0, 4.0], [5.0, 12.0]])},
        "moe_layers": {"w": jnp.array([[[6.0], [8.0]]])},
        "norm": {"weight": jnp.ones(1)},
    }
    stacks = {"dense_layers": (0, 2), "moe_layers": (1,)}
    got = collect_metrics(
        COLLECTED, StepOutputs(grads, grads, jnp.array(True), grads, Stack(3), stacks)
    )
    np.testing.assert_allclose(got["grad_norms_per_layer"]["layers"], [5, 10, 13])


def test_unrequested_values_are_absent():
    assert collect_metrics((), None) == {}
    assert check_collect(["update_norm", "grads", "update_norm"]) == ("grads", "update_norm")


def test_unknown_collect_name_suggests_correction():
    with pytest.raises(UserError, match=r'collect: "grad": expected one of .*did you mean "grads"'):
        check_collect(["params_norm", "grad"])


def test_callbacks_share_collected_metrics_and_see_evaluations():
    events = []

    class NormHook(Callback):
        collect = ("grads", "params_norm")

        def on_eval_begin(self, step):
            events.append(("begin", step))

    class EvaluationHook(Callback):
        collect = ("params_norm",)

        def on_eval_end(self, metrics, step):
            events.append(("end", step))

    runner = Callbacks([NormHook(), EvaluationHook()])
    assert check_collect(runner.collect) == ("grads", "params_norm")
    runner.call(Callback.on_eval_begin, 3)
    runner.call(Callback.on_eval_end, {}, 3, None)
    assert events == [("begin", 3), ("end", 3)]
