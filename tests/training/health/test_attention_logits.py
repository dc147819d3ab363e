"""The largest attention logit of a step, compared with unfused attention in NumPy."""

import jax
import numpy as np
import pytest

from jaxforge.step.train_step import CompiledSteps
from jaxforge.training.health.attention_logits import AttentionLogits
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup
from tests.processes.conftest import Run

HEADS, KV, WIDTH = 4, 2, 16


def largest_logit(params, tokens):
    """Compute the largest logit of the first layer of a Llama."""
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    x = params["token_embedding"]["embedding"]["weight"][tokens]
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * layer["attention_norm"]["weight"]
    q, k = (
        rotated((x @ layer["attention"][f"{name}_proj"]["weight"].T).reshape(*tokens.shape, n, -1))
        for name, n in (("q", HEADS), ("k", KV))
    )
    scores = np.einsum("mbshw,mbthw->mbhst", q, np.repeat(k, HEADS // KV, axis=3)) / WIDTH**0.5
    visible = np.tril(np.ones((tokens.shape[-1],) * 2, bool))
    return scores[..., visible].max()


def rotated(x):
    """Rotate channels i and i + width / 2 of each head by position / 10000 ** (2 i / width)."""
    angles = np.arange(x.shape[2])[:, None] / 10000 ** (np.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def test_logit_of_step_equals_unfused_attention(tmp_path, monkeypatch):
    """Steps 2 and 4 are measured before their updates; lines of steps 3 and 5 report them."""
    lookup, expected = CompiledSteps.__getitem__, []

    def recording(steps, microbatches):
        def step(state, batch, controls):
            params, tokens = jax.device_get((state.params, batch["input_ids"]))
            expected.append(largest_logit(params, tokens))
            return lookup(steps, microbatches)(state, batch, controls)

        return step

    monkeypatch.setattr(CompiledSteps, "__getitem__", recording)
    run = Run(tmp_path, "run")
    run.finish_here(
        "--model.n_layers=1", "--train.max_steps=5", "--metrics.max_attention_logit_interval=2",
        "--train.grad_accum_steps=2", "--train.global_batch_size=16",
        "--optimizer.lr=0.05", "--scheduler.warmup_steps=1", "--metrics.log_interval=3",
    )  # fmt: skip
    key = "train/max_attention_logit"
    logged = {x["step"]: x.get(key) for x in run.lines() if "train/loss" in x}
    assert logged == {
        1: None, 3: pytest.approx(expected[1], rel=1e-4), 5: pytest.approx(expected[3], rel=1e-4),
    }  # fmt: skip
    assert len(set(np.round(expected, 3))) == 5


@pytest.mark.parametrize(
    "distributed",
    [{"dp_shard": 2, "tp": 2, "pp": 2}, {"dp_shard": 2, "cp": 2, "cp_strategy": "ring"}],
    ids=["pp", "cp"],
)
def test_logit_does_not_depend_on_the_mesh(distributed):
    results = []
    for axes, sizes in (({}, (8, 1)), (distributed, (2, 2))):
        rows, accum = sizes
        train = {"batch_size": rows, "grad_accum_steps": accum}
        ours = setup(tiny_config(model={"n_layers": 3}, train=train, distributed=axes))
        [batch] = random_batches(tiny_config(train={"batch_size": 8}), 1)
        with jax.set_mesh(ours.mesh):
            logits = AttentionLogits(1, ours.model, ours.mesh)
            results.append(logits.measure(ours.state().variables, ours.put(batch)))
    assert results[1] == pytest.approx(results[0], rel=1e-5)
