"""States of callbacks in checkpoints: bit-exact, restored at a resume and a rollback."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.exports import decode, encode
from jaxforge.training.callbacks.runner import Callbacks
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("one_device")

ARRAYS = [
    np.array([0.1, -0.0, np.nan, np.inf], np.float32),
    np.arange(6, dtype=np.int64).reshape(2, 3) - 2**62,
    np.asarray(jnp.array([1.5, 2.25], jnp.bfloat16)),
    np.array(True),
    np.zeros((0, 3), np.uint8),
    np.float64(1 / 3),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_array_survives_json_bit_exactly(array):
    stored = json.loads(json.dumps(encode({"x": [array]}, "state")))
    restored = decode(stored)["x"][0]
    assert type(restored) is type(array)
    assert (restored.dtype, restored.shape) == (array.dtype, array.shape)
    assert restored.tobytes() == array.tobytes()


def test_plain_values_survive_json():
    state = {
        "float": 0.1 + 0.2, "negative": -0.0, "int": 2**80, "text": "ü", "none": None,
        "flag": True, "tuple": (1, [2, (3,)]), "bytes": b"\x00\xff", "inf": math.inf,
    }  # fmt: skip
    restored = decode(json.loads(json.dumps(encode(state, "state"))))
    assert restored == state
    assert math.copysign(1, restored["negative"]) == -1


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {1}}, r"the state\['a'\] is of type set, which a checkpoint cannot store. Use"),
        ({1: 2}, r"the state has the key 1. Use other text as the key"),
        ({"__array__": 2}, r"the state has the key '__array__'"),
        ({"a": [np.array([None])]}, r"the state\['a'\]\[0\] is an array of object. Use an array"),
        ({"a": np.array("text")}, r"is an array of <U4. Use an array of numbers"),
    ],
)
def test_unstorable_state_is_refused(state, message):
    with pytest.raises(UserError, match=message):
        encode(state, "the state")


class Averages(Callback):
    """Averages the losses, and notes the events around its state."""

    def __init__(self):
        self.mean, self.seen, self.events = np.float32(0), 0, []

    def on_train_begin(self, config):
        self.events.append("begin")

    def on_step_end(self, context):
        self.seen += 1
        self.mean = np.float32(0.9) * self.mean + np.float32(0.1) * np.float32(context.loss)

    def state_dict(self):
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state):
        self.mean, self.seen = state["mean"], state["seen"]
        self.events.append(f"state {self.seen}")

    def on_checkpoint_load(self, step, path):
        assert path.is_dir()
        self.events.append(f"load {step} {path.name}")

    def on_checkpoint_durable(self, step, path):
        assert (path / "state").is_dir()
        self.events.append(f"durable {step}")


def config(directory, **train):
    return tiny_config(
        train={"max_steps": 6, **train},
        checkpoint={"dir": str(directory), "interval": 4},
    )


def test_resumed_run_has_state_of_uninterrupted_run(tmp_path):
    whole, first, second = Averages(), Averages(), Averages()
    assert launch.fit(config(tmp_path / "whole"), [whole]) is Exit.COMPLETED
    assert launch.fit(config(tmp_path / "run", exit_interval=3), [first]) is Exit.INTERVAL
    assert launch.fit(config(tmp_path / "run"), [second]) is Exit.COMPLETED
    assert whole.events == ["begin", "durable 4", "durable 6"]
    assert first.events == ["begin", "durable 3"]
    assert second.events == ["begin", "state 3", "load 3 step_3", "durable 4", "durable 6"]
    assert (second.seen, second.mean.tobytes()) == (6, whole.mean.tobytes())
    assert whole.mean != 0


class Memory(Callback):
    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_callbacks_of_one_class_have_separate_states():
    states = Callbacks([Memory({"n": 1}), Memory({"n": 2}), Memory({})]).states()
    name = f"{__name__}.Memory"
    assert states == {name: {"n": 1}, f"{name}#2": {"n": 2}}
    resumed = [Memory(), Memory(), Memory()]
    Callbacks(resumed).load_states({**states, "other.Gone": {"n": 9}})
    assert [memory.state for memory in resumed] == [{"n": 1}, {"n": 2}, None]
