"""`jaxforge convert --average`: the mean of the weights of checkpoints of a run."""

import json
import signal
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from jaxforge import inference
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from tests.conftest import tiny_config
from tests.helpers import cli, setup, underway
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, environment
from torch_compat.checkpoint import orbax_store
from torch_compat.convert.average import mean, select
from torch_compat.formats.lazy import from_array

STEPS = (2, 4, 7)
EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_router": "sigmoid_topk"}


def write_run(path, model=None, **sections):
    """Write checkpoints of random states: parameters of step n are n times those of step 1."""
    job = tiny_config(model={"n_layers": 2, **(model or {})}, **sections)
    native = setup(job)
    state = jax.device_get(underway(native, 1))
    section = job.checkpoint.model_copy(update={"keep_last_n": 0, "async_mode": "disabled"})
    store = Checkpoints(path, section, native.model.axes, job.model_dump(mode="json"))
    for step in STEPS:
        scaled = jax.tree.map(lambda x, s=step: x * s if np.ndim(x) else x, state)
        placed = jax.tree.map(jax.device_put, scaled, native.shardings)
        store.save(Progress(step=step), placed)
    store.close()
    (path / "config.toml").write_text(job.to_toml())
    return path


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", train={"ema_decay": 0.9})


def opened(path):
    return orbax_store.open_orbax(path)[0]


def arrays(tensors):
    return {name: tensor.all() for name, tensor in tensors.items()}


def of_step(run, step):
    return opened(run / "checkpoints" / f"step_{step}")


@pytest.mark.parametrize(
    ("choice", "steps"),
    [("--average=2", (4, 7)), ("--average=7,2", (2, 7)), ("--average=3", STEPS)],
)
def test_mean_equals_that_of_torch(run, tmp_path, choice, steps):
    assert cli(["convert", str(run), str(tmp_path / "mean"), "--to=jaxforge", choice]) == 0
    result = opened(tmp_path / "mean")
    states = [arrays(of_step(run, step).params) for step in steps]
    names = list(states[0])
    module = torch.nn.ParameterList([torch.tensor(states[0][name]) for name in names])
    model = AveragedModel(module)
    for state in states:
        with torch.no_grad():
            torch._foreach_copy_(list(module), [torch.tensor(state[name]) for name in names])
        model.update_parameters(module)
    assert result.params.keys() == states[0].keys()
    for name, expected in zip(names, model.module, strict=True):
        np.testing.assert_allclose(
            result.params[name].all(), expected.detach().numpy(), rtol=1e-6, err_msg=name
        )
    assert result.moments is None
    assert result.progress.step == 0
    about = json.loads((tmp_path / "mean" / "average.json").read_text())
    assert about == {"run": str(run), "steps": list(steps), "weights": "raw"}


def test_moving_averages_are_averaged_on_request(run, tmp_path):
    command = [
        "convert",
        str(run),
        str(tmp_path / "mean"),
        "--to=jaxforge",
        "--average=2",
        "--weights=ema",
    ]
    assert cli(command) == 0
    first, second = (arrays(of_step(run, step).ema) for step in STEPS[1:])
    for name, value in arrays(opened(tmp_path / "mean").params).items():
        np.testing.assert_allclose(value, (first[name] + second[name]) / 2, rtol=1e-6)


def test_untrained_state_and_experts_are_those_of_newest(tmp_path):
    run = write_run(tmp_path / "run", EXPERTS)
    assert cli(["convert", str(run), str(tmp_path / "mean"), "--to=jaxforge", "--average=2"]) == 0
    result, newest, other = opened(tmp_path / "mean"), of_step(run, 7), of_step(run, 4)
    assert arrays(result.model_state).keys() == newest.model_state.keys() != set()
    for name, value in arrays(result.model_state).items():
        np.testing.assert_array_equal(value, newest.model_state[name].all())
    name = "layers.1.mlp.experts.3.up_proj.weight"
    expected = (newest.params[name].all() + other.params[name].all()) / 2
    np.testing.assert_allclose(result.params[name].all(), expected, rtol=1e-6)


def test_mean_is_rounded_once():
    """The sum of 257 ones is not a bfloat16 number, and 1 + 2^-7 is the next one after 1."""
    low, high = (np.full(3, x, "bfloat16") for x in (1.0, 1 + 2**-7))
    tensors = [from_array(low)] * 256 + [from_array(high)] * 257
    result = mean(tensors).all()
    assert result.dtype == low.dtype
    np.testing.assert_array_equal(result, high)


def test_memory_is_that_of_blocks():
    """A block of each checkpoint is in memory at a time, and not the tensor."""
    block, rows = 1 << 16, 256
    tensor = from_array(np.ones((1, block), np.float32))

    def read(index):
        count = index[0].stop - index[0].start
        return np.broadcast_to(tensor.all(), (count, block))

    tall = type(tensor)((rows, block), tensor.dtype, read)
    result = mean([tall] * 8)
    tracemalloc.start()
    for row in range(rows):
        result.read((slice(row, row + 1), slice(0, block)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 8 * block  # bytes of four rows in float64; the tensor has 128 times as many


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--average=4"], r"--average 4: .*run has 3 checkpoints: steps 2, 4, 7. Choose at most 3"),
        (["--average=2,3"], r"--average: no checkpoint of step 3. .* steps 2, 4, 7"),
        (["--average=2,2"], r"--average names a step twice"),
        (["--average=2", "--weights=ema"], r"step_4 has no average of the parameters"),
    ],
)
def test_wrong_choice_is_refused(tmp_path, options, message):
    run = write_run(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        cli(["convert", str(run), str(tmp_path / "mean"), "--to=jaxforge", *options])
    assert not (tmp_path / "mean").exists()


def test_checkpoint_of_other_model_is_refused(run, tmp_path):
    other = write_run(tmp_path / "other", {"rope_theta": 500.0}, train={"ema_decay": 0.9})
    (run / "checkpoints/step_4").rename(tmp_path / "step_4")
    (other / "checkpoints/step_4").rename(run / "checkpoints/step_4")
    with pytest.raises(UserError, match=r"step_4 has model.rope_theta = 500.0, and the newest"):
        cli(["convert", str(run), str(tmp_path / "mean"), "--to=jaxforge", "--average=2"])


def test_output_in_a_run_is_refused(run, tmp_path):
    for output in (run, write_run(tmp_path / "other")):
        with pytest.raises(UserError, match=r"is a run\. Name a new directory"):
            cli(["convert", str(run), str(output), "--to=jaxforge", "--average=2"])


def test_run_starts_from_mean(run, tmp_path):
    output = str(tmp_path / "mean")
    assert cli(["convert", str(run), output, "--to=jaxforge", "--average=2"]) == 0
    with inference.open_run(tmp_path / "mean", devices=jax.devices()[:1]).in_use() as params:
        expected = jax.device_get(params)
    native = setup(tiny_config(
        model={"n_layers": 2}, checkpoint={"load_path": output}, distributed={"tp": 2},
    ))  # fmt: skip
    store = Checkpoints(tmp_path / "new", native.config.checkpoint, native.model.axes)
    with jax.set_mesh(native.mesh):
        state, progress = starting_state(native, store)
    store.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), expected)
    assert (progress.step, int(state.step)) == (0, 0)


@pytest.mark.slow
def test_killed_average_is_repeated(run, tmp_path):
    words = ["convert", "--to=jaxforge", "--average=3", str(run)]
    assert cli([*words, str(tmp_path / "whole")]) == 0
    command = [sys.executable, "-m", "jaxforge", *words, str(tmp_path / "killed")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment())
    while process.poll() is None and not (tmp_path / "killed").exists():
        pass
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    assert cli([*words, str(tmp_path / "killed")]) == 0
    whole, killed = (arrays(opened(tmp_path / n).params) for n in ("whole", "killed"))
    for name, value in whole.items():
        np.testing.assert_array_equal(value, killed[name])


def test_selection_is_fixed_when_it_is_made(run):
    chosen = select(str(run), 2)
    assert chosen.steps == [4, 7]
    assert str(chosen) == f"the mean of steps 4, 7 of {run}"
    assert len(chosen.stamps()) > len(chosen.members[0].stamps())
