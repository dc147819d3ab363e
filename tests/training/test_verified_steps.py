"""Steps that are executed twice: faulty hardware ends the run, working hardware changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxforge as jf
from jaxforge.errors import UserError
from jaxforge.step.train_step import CompiledSteps
from tests.conftest import tiny_config
from tests.helpers import lowered, setup
from tests.processes.conftest import Run

pytestmark = pytest.mark.usefixtures("one_device")

SETTINGS = ["--train.max_steps=5", "--checkpoint.interval=1"]
TIMES = ("time", "sec", "step_time", "tflops", "mfu", "gpu/", "goodput/")


def numbers(run):
    """Return all logged numbers of a run except for times."""
    return [
        {k: v for k, v in line.items() if not any(part in k for part in TIMES)}
        for line in run.lines()
    ]


@pytest.fixture
def executed(monkeypatch):
    """Record each execution of a step as (number, whether its update applies)."""
    lookup, recorded = CompiledSteps.__getitem__, []

    def recording(steps, microbatches):
        def step(state, batch, controls):
            recorded.append((int(state.step) + 1, bool(controls.apply)))
            return lookup(steps, microbatches)(state, batch, controls)

        return step

    monkeypatch.setattr(CompiledSteps, "__getitem__", recording)
    return recorded


@pytest.mark.slow
def test_verified_run_equals_run_without_verification(tmp_path, executed):
    usual, verified = Run(tmp_path, "usual"), Run(tmp_path, "verified")
    usual.finish_here(*SETTINGS)
    assert executed == [(n, True) for n in range(1, 6)]
    executed.clear()
    verified.finish_here(*SETTINGS, "--train.verify_interval=2")
    assert executed == [
        (n, apply) for n in range(1, 6) for apply in ([False, True] if n in (2, 4) else [True])
    ]
    assert numbers(verified) == numbers(usual)


def test_verification_does_not_change_the_program():
    texts = [
        lowered(setup(tiny_config(model={"n_layers": 1}, train={"verify_interval": n}))).as_text()
        for n in (0, 3)
    ]
    assert texts[0] == texts[1]


def flip(leaf):
    """Flip the highest bit of the mantissa of one element."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    flipped = bits.at[(0,) * leaf.ndim].set(bits[(0,) * leaf.ndim] ^ (1 << 22))
    return jax.lax.bitcast_convert_type(flipped, jnp.float32)


@pytest.mark.parametrize(
    "fault", [flip, pytest.param(lambda leaf: leaf * jnp.nan, marks=pytest.mark.slow)]
)
def test_wrong_bit_ends_run_unsaved_and_names_device(tmp_path, monkeypatch, capsys, fault):
    """The second execution of step 4 computes with a damaged weight."""
    lookup = CompiledSteps.__getitem__

    def damaged(steps, microbatches):
        def step(state, batch, controls):
            if int(state.step) == 3 and controls.apply:
                params = jax.tree.map(lambda leaf: leaf, state.params)
                norm = params["norm"]
                norm["weight"] = jax.device_put(fault(norm["weight"]), norm["weight"].sharding)
                state = dataclasses.replace(state, params=params)
            return lookup(steps, microbatches)(state, batch, controls)

        return step

    monkeypatch.setattr(CompiledSteps, "__getitem__", damaged)
    run = Run(tmp_path, "run")
    settings = [*SETTINGS, "--train.verify_interval=2", "--train.on_nonfinite=stop"]
    run.finish_here(*settings, code=16)
    log = capsys.readouterr().err
    assert (
        "step 4, executed twice from the same state, gave two results: the hardware is faulty. "
        f"The result changed on {jax.devices()[0]} of process 0"
    ) in log
    assert "stopped at step 4 without saving" in log
    assert run.steps() == [1, 2, 3]
    monkeypatch.undo()
    run.finish_here(*settings)
    undisturbed = Run(tmp_path, "undisturbed")
    undisturbed.finish_here(*SETTINGS)
    assert run.losses() == undisturbed.losses()


def test_step_that_ignores_controls_is_refused(tmp_path):
    def always_applied(program):
        usual = program.step
        return jax.jit(
            lambda state, batch, controls: usual(state, batch, controls._replace(apply=True)),
            donate_argnums=0,
        )

    run = Run(tmp_path, "run")
    settings = [*SETTINGS, f"--checkpoint.dir={run.directory}", "--train.verify_interval=2"]
    with pytest.raises(UserError, match=r"even if controls\.apply is False"):
        jf.fit(jf.load_config(run.config, settings), make_step=always_applied)
