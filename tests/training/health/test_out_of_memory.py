"""Messages of runs that do not fit into memory."""

import re

import jax
import pytest

from jaxforge import inference
from jaxforge.errors import UserError
from jaxforge.parallel import device_memory
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.health import out_of_memory
from tests.conftest import tiny_config

GPU = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 91670708224 bytes.\nBuffers: ..."
CPU = "INTERNAL: Error dispatching computation: Out of memory allocating 91670708224 bytes."
TPU = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.0G of 15.75G hbm."


class Fails(Callback):
    def __init__(self, error):
        self._error = error

    def on_step_end(self, context):
        raise self._error


def config_in(directory):
    return tiny_config(
        model={"n_layers": 1}, distributed={"dp_shard": -1}, checkpoint={"dir": str(directory)},
        train={"batch_size": 4, "grad_accum_steps": 3, "max_steps": 2},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "gist"),
    [
        (jax.errors.JaxRuntimeError(GPU), "allocate 91670708224 bytes.\n"),
        (jax.errors.JaxRuntimeError(CPU), "allocating 91670708224 bytes.\n"),
        (jax.errors.JaxRuntimeError(TPU), "Used 20.0G of 15.75G hbm.\n"),
        (MemoryError("Unable to allocate 4 GiB"), "Unable to allocate 4 GiB\n"),
    ],
)
def test_oversized_run_lists_remedies(tmp_path, error, gist):
    config = config_in(tmp_path)
    with (
        pytest.raises(UserError) as caught,
        out_of_memory.explained(Program(config)),
    ):
        raise error
    text = str(caught.value)
    assert text.startswith("out of memory: ")
    assert gist in text
    assert "activations of 4 sequences of 32 tokens" in text
    assert 'train.grad_sync = "microbatch"' in text
    assert "train.batch_size = 2 and train.grad_accum_steps = 6: half the activations" in text
    assert 'train.activation_checkpointing = "full"' in text
    assert 'train.mixed_precision = "bf16"' in text


def test_run_explains_out_of_memory_and_passes_other_failures(tmp_path):
    with pytest.raises(UserError, match=r"out of memory: .*\n.*activations of 4 sequences"):
        launch.fit(config_in(tmp_path / "a"), [Fails(jax.errors.JaxRuntimeError(GPU))])
    other = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        launch.fit(config_in(tmp_path / "b"), [Fails(other)])


def test_oversized_state_suggests_more_devices(monkeypatch):
    config = tiny_config(distributed={"dp_shard": 2})
    mesh = make_mesh(config, jax.devices()[:2])
    monkeypatch.setattr(device_memory, "capacity", lambda: 500_000)
    text = out_of_memory.explanation(GPU, Program(config, mesh))
    match = re.search(
        r"holds (.+) GB of parameters, .* and (.+) GB of optimizer state: (.+) GB of 0.0005 GB",
        text,
    )
    params, moments, whole = map(float, match.groups())
    # 156 K float32 parameters over two devices; small parameters are replicated
    assert 0.000312 <= params < 0.00032
    assert moments == pytest.approx(2 * params, rel=0.01)
    assert whole == pytest.approx(2 * params + moments, rel=0.01)
    assert "4 times as many devices" in text
    assert "batch_size" not in text


def test_state_copies_are_the_first_remedy():
    config = tiny_config(distributed={"dp_shard": 6})
    text = out_of_memory.explanation(GPU, Program(config, make_mesh(config, jax.devices()[:6])))
    assert "helps:\n  - a distributed.dp_shard that divides model.dim = 64" in text
    assert "3 times as much" in text
    whole = tiny_config(distributed={"dp_shard": 4})
    text = out_of_memory.explanation(GPU, Program(whole, make_mesh(whole, jax.devices()[:4])))
    assert "times as much" not in text


@pytest.mark.slow
def test_inference_explains_out_of_memory(tmp_path):
    launch.fit(config_in(tmp_path))
    trained = inference.open_run(tmp_path)
    message = r"out of memory: .*\n.*parameters take .* GB.* a smaller --batch-size"
    with pytest.raises(UserError, match=message), trained.in_use():
        raise jax.errors.JaxRuntimeError(GPU)
