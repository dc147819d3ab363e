"""A registered model with non-trainable state."""

import jax

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.reading.load import load_config
from tests.helpers import random_batches, setup


def restored(native, run, step=2):
    """Return the state that a run resumes from."""
    checkpoints = Checkpoints(run, native.config.checkpoint, read_only=True)
    with jax.set_mesh(native.mesh):
        like = native.abstract_state()
        state, _ = checkpoints.restore(like, step)
    checkpoints.close()
    return state


def gone_on(run, config):
    """The state two steps after the one that is saved, and the metrics of both."""
    native = setup(load_config(config))
    state, metrics = native.run(restored(native, run), random_batches(native.config, 2, seed=1))
    return jax.device_get((state.params, state.opt_state, state.model_state, metrics))
