"""Activations of single sequences on several meshes."""

import jax
import numpy as np
import pytest

from jaxforge.config.eval import ATTENTION_WEIGHTS, POINTS
from jaxforge.errors import UserError
from jaxforge.step.forward_values import Activations
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup

ROWS = 4
MODEL = {"n_kv_heads": 4, "num_experts": 2, "moe_router": "sigmoid_topk", "n_layers": 4}
INTERLEAVED = {"pp_schedule": "interleaved_1f1b", "pp_chunks": 2}


def capture(points, layers, rows, distributed):
    accum = distributed.get("pp", 1)
    share = ROWS // (distributed.get("dp_shard", 1) * distributed.get("ep", 1))
    program = setup(
        tiny_config(
            model=MODEL,
            train={"batch_size": share, "grad_accum_steps": accum},
            distributed=distributed,
        )
    )
    [batch] = random_batches(tiny_config(train={"batch_size": ROWS}), 1)
    compute = Activations(program.model, points, layers, program.mesh)
    with jax.set_mesh(program.mesh):
        params = program.state().variables
        result = jax.device_get(list(compute(params, program.put(batch), rows)))
    return batch, result


@pytest.fixture(scope="module")
def single_device():
    return capture(POINTS, None, range(ROWS), {})


def test_activations_belong_to_the_requested_sequences(single_device):
    batch, result = single_device
    for row, values in enumerate(result):
        np.testing.assert_array_equal(values["tokens"], batch["input_ids"][0, row])
        assert set(values) == {"tokens", *POINTS}
        shapes = {"residual": (4, 32, 64), ATTENTION_WEIGHTS: (4, 4, 32, 32), "logits": (32, 256)}
        assert {name: values[name].shape for name in shapes} == shapes
        assert {values[name].dtype for name in POINTS} == {np.dtype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distributed", "points"),
    [
        ({"dp_shard": 2, "tp": 2, "ep": 2}, POINTS),
        (INTERLEAVED | {"pp": 2, "dp_shard": 2, "tp": 2}, POINTS),
        ({"cp": 2, "tp": 2, "dp_shard": 2, "cp_strategy": "ring"}, ("mlp", "residual", "logits")),
    ],
    ids=["ep", "pp", "ring"],
)
def test_activations_do_not_depend_on_the_mesh(single_device, distributed, points):
    _, expected = single_device
    _, result = capture(points, (2, 0), (3, 1), distributed)
    assert len(result) == 2
    for values, row in zip(result, (3, 1), strict=True):
        assert set(values) == {"tokens", *points}
        for name, value in values.items():
            want = expected[row][name]
            want = want if name in ("tokens", "logits") else want[[2, 0]]
            np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5, err_msg=name)


def test_attention_weights_raise_with_context_parallelism():
    with pytest.raises(UserError, match=r"with distributed.cp = 2 no device has all keys"):
        capture([ATTENTION_WEIGHTS], None, [0], {"cp": 2})
