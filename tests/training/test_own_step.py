"""`jf.fit` with an update of the user's own."""

import jax
import pytest

import jaxforge as jf
from tests.processes.conftest import Run

pytestmark = pytest.mark.usefixtures("one_device")


def doubled(program):
    """The usual update, whose loss is logged doubled."""
    usual = program.step

    def update(state, batch, controls):
        state, metrics = usual(state, batch, controls)
        return state, {**metrics, "loss": 2 * metrics["loss"]}

    return jax.jit(update, donate_argnums=0)


@pytest.mark.slow
def test_make_step_replaces_usual_update(tmp_path):
    usual, doubling = Run(tmp_path, "usual"), Run(tmp_path, "doubling")
    settings = ["--train.max_steps=3"]
    for run, make_step in ((usual, None), (doubling, doubled)):
        config = jf.load_config(run.config, [*settings, f"--checkpoint.dir={run.directory}"])
        assert jf.fit(config, make_step=make_step).code == 0
    expected = {step: 2 * loss for step, loss in usual.losses().items()}
    assert doubling.losses() == pytest.approx(expected, rel=1e-6)
    assert doubling.steps() == usual.steps()
