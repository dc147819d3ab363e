"""Shared builders of tests: a model with its step, and batches for it."""

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.commands import COMMANDS
from jaxforge.config.job import JobConfig
from jaxforge.config.model import RopeScaling
from jaxforge.kernels import attention_backends
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel.groups import number_of_groups
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import batch_shardings
from jaxforge.program import Program
from jaxforge.state.progress import Progress, seal_progress
from jaxforge.state.train_state import Counts, GuardState, TrainState
from jaxforge.step.context import spread_sequences
from jaxforge.step.train_step import Controls
from jaxforge.storage.seals import crc32


def cli(arguments):
    """Run `jaxforge COMMAND ...` in this process; return its exit code, and raise its errors."""
    name, *options = arguments
    return importlib.import_module(COMMANDS[name].module).main(options)


EVERY_OPTION = {
    "norm_placement": "sandwich", "norm_unit_offset": True, "qk_norm": True,
    "qk_norm_scope": "projection", "qkv_bias": True, "o_bias": True, "mlp_bias": True,
    "gated_mlp": True, "activation": "gelu_tanh", "attention_scale": 0.3,
    "attn_logit_softcap": 5.0, "final_logit_softcap": 3.0, "embedding_multiplier": 4.0,
    "attention_sinks": True, "attention_output_gate": True, "swiglu_limit": 0.5,
    "residual_multiplier": 0.5, "logits_scaling": 2.0, "partial_rotary_factor": 0.5,
    "rope_scaling": RopeScaling(rope_type="yarn", original_max_seq_len=16),
}  # fmt: skip
"""Keys of `[model]` that families of transformers need; what they exclude is in `LEARNED`."""
LEARNED = {
    "position_embedding": "learned", "norm_type": "layernorm", "norm_placement": "post",
    "parallel_residual": True, "activation": "gelu", "mlp_bias": True,
}  # fmt: skip


class Setup(Program):
    """A program with batches and states of tests."""

    def state(self, params=None) -> TrainState:
        """Arrays of its own before the first step, on the mesh; `params`: other values for them."""
        state = self._initial
        if params is not None:
            state = dataclasses.replace(state, params=jax.device_get(params))
        return jax.tree.map(placed, state, self.shardings)

    @functools.cached_property
    def _initial(self) -> TrainState:
        """Return the initial parameters on the host (see tests/model/test_init.py).

        It is made from parameters that every mesh shares, and shared by those that keep layers
        alike: to compile how it is made takes half as long as to compile the step.
        """
        config, stacks = self.config, self.config.model.stacks
        key = (
            config.model.model_dump_json(), config.optimizer.model_dump_json(), config.lora,
            config.train.param_dtype, config.train.opt_state_dtype, config.train.param_rounding,
            config.train.averages_weights, config.train.ema_dtype,
            config.train.seed, config.distributed.pp, config.distributed.pp_schedule,
            self.model.scales_loss, self.model.recipe, number_of_groups(config),
            config.outer_optimizer,
        )  # fmt: skip
        if key not in _BEGUN:
            of = self.model.stack.of
            make = jax.jit(
                lambda p: self.state_before_steps(
                    {
                        name: jax.tree.map(of(name).stack, part) if name in stacks else part
                        for name, part in p.items()
                    }
                )
            )
            _BEGUN[key] = jax.device_get(make(drawn(config)))
        return _BEGUN[key]

    def put(self, batch: dict) -> dict:
        batch = {name: np.asarray(leaf, np.int32) for name, leaf in batch.items()}
        return jax.device_put(batch, batch_shardings(self.mesh, batch))

    def run(self, state: TrainState, batches, **controls) -> tuple[TrainState, dict]:
        """Steps through `batches`; metrics stacked over steps."""
        logged = []
        with jax.set_mesh(self.mesh):
            for batch in batches:
                state, metrics = self.step(state, self.put(batch), Controls(**controls))
                logged.append(jax.device_get(metrics))
        return state, {k: over_steps([m[k] for m in logged]) for k in logged[0]}


def losses_and_gradients(ours: Setup, batches) -> tuple[np.ndarray, Params]:
    """Return stacked losses and gradients of batches from the initial state, without an update."""

    @jax.jit
    def run(state: TrainState, batch: dict):
        batch = spread_sequences(ours.model, batch)
        grads, loss = ours.gradients(state.params, state.model_state, batch)
        return loss.value, grads

    with jax.set_mesh(ours.mesh):
        state = ours.state()
        result = [jax.device_get(run(state, ours.put(batch))) for batch in batches]
    return jax.tree.map(lambda *of_batches: np.stack(of_batches), *result)


def loss_and_gradient(ours: Setup, batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of a batch, and all gradients in one vector, with the layers in order."""
    losses, grads = losses_and_gradients(ours, [batch])
    for name in set(grads) & set(ours.config.model.stacks):
        unstack = ours.model.stack.of(name).unstack
        grads[name] = jax.tree.map(lambda x, unstack=unstack: unstack(x[0]), grads[name])
    return losses, ravel_pytree(grads)[0]


def over_steps(values):
    """Return one metric of several steps, stacked; dicts of metrics are stacked too."""
    if isinstance(values[0], dict):
        return {name: over_steps([value[name] for value in values]) for name in values[0]}
    return np.array(values)


def placed(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Copies of the host's array that the step may be given.

    Of whole copies, `jax.device_put` would let all devices and the host share the memory.
    """
    devices = sharding.addressable_devices_indices_map(leaf.shape)
    shards = [
        jax.device_put(
            np.array(leaf[index]), SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        )
        for device, index in devices.items()
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def drawn(config: JobConfig) -> Params:
    """Initial parameters on the host, a layer a row; drawn once for all that are alike."""
    train = config.train
    key = (config.model.model_dump_json(), config.lora, train.param_dtype, train.seed)
    if key not in _DRAWN:
        adapters = config.lora if config.lora.rank else None
        model = Model(config.model, param_dtype=jnp.dtype(train.param_dtype), adapters=adapters)
        _DRAWN[key] = jax.device_get(initial_params(model, train.seed))
    return _DRAWN[key]


def initial_params(model: Model, seed: int = 0) -> Params:
    """Return the result of `model.init` up to rounding.

    To compile `init` takes as long as to compile a small step. Here, one program draws for all
    shapes: element i of a draw depends on the key and on i only.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn.initializers, "normal", _normal_initializer)
        patch.setattr(jax.nn.initializers, "zeros", lambda _, *shape: np.zeros(*shape))
        patch.setattr(jax.nn.initializers, "ones", lambda _, *shape: np.ones(*shape))
        return model.init(jax.random.key(seed))


def _normal_initializer(std: float):
    def init(key, shape, dtype):
        size = math.prod(shape)
        values = _normals(key, 8 ** max(4, math.ceil(math.log(size, 8))))  # few sizes to compile
        return (std * np.asarray(values)[:size]).reshape(shape).astype(dtype)

    return init


@functools.partial(jax.jit, static_argnums=1)
def _normals(key, size):
    return jax.random.normal(key, size)


_DRAWN: dict[tuple, Params] = {}
_BEGUN: dict[tuple, TrainState] = {}


def setup(config: JobConfig, **options) -> Setup:
    """On as many of the virtual devices as `[distributed]` multiplies to.

    It is the same one for the same config: then its step is compiled once.
    """
    key = (config.model_dump_json(), *sorted(options.items()))
    result = _SETUPS.pop(key, None) or new_setup(config, **options)
    _SETUPS[key] = result  # the latest
    while len(_SETUPS) > _MAX_PROGRAMS:
        del _SETUPS[next(iter(_SETUPS))]
    return result


_SETUPS: dict[tuple, Setup] = {}
_MAX_PROGRAMS = 8  # programs take memory


def forget() -> None:
    """Nothing that is compiled is kept, nor any state."""
    _SETUPS.clear()
    _BEGUN.clear()
    hlo.cache_clear()


def new_setup(config: JobConfig, **options) -> Setup:
    """Shared with no other test: nothing is compiled yet, and what is patched counts."""
    d = config.distributed
    devices = jax.devices()[: d.pp * d.dp_replicate * d.dp_shard * d.cp * d.ep * d.tp]
    result = Setup(config, make_mesh(config, devices), **options)
    _ = result.step  # traced by what is patched now, and refused now
    return result


def underway(ours: Setup, steps: int) -> TrainState:
    """Return a random state of a run after some steps, without compiling."""
    like, rng = ours.abstract_state(), np.random.default_rng(0)
    lr, beta = ours.config.optimizer.lr, ours.config.optimizer.betas[0]

    def normal(leaf):
        return placed(0.1 * rng.standard_normal(leaf.shape).astype(leaf.dtype), leaf.sharding)

    def moment(leaf):
        value = np.abs(normal(leaf))
        if not leaf.ndim:  # updates, or learning rates added up, of schedule-free optimizers
            value = steps if leaf.dtype == jnp.int32 else steps * lr * (1 - beta)
        return placed(np.asarray(value, leaf.dtype), leaf.sharding)

    return dataclasses.replace(
        like, step=jnp.int32(steps), params=jax.tree.map(normal, like.params),
        opt_state=jax.tree.map(moment, like.opt_state),
        guard=GuardState.fresh(scales_loss=ours.model.scales_loss),
        counts=Counts.of(Progress(step=steps)),
        model_state=jax.tree.map(normal, like.model_state),
        ema=jax.tree.map(normal, like.ema),
    )  # fmt: skip


@contextlib.contextmanager
def devices_here(n: int):
    """Limit the devices to `n` of the eight."""
    devices = jax.devices()[:n]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: devices)
        for name in ("device_count", "local_device_count"):
            patch.setattr(jax, name, lambda *_: n)
        yield


def progress_of(state: TrainState) -> Progress:
    """The host's counters of a state."""
    return Progress(step=int(state.step), **counts_of(state))


def counts_of(state: TrainState) -> dict[str, int]:
    """The counts of a state; those of groups that train apart are added up."""
    total = jax.tree.map(np.sum, jax.device_get(state.counts))
    return {name: int(count) for name, count in total._asdict().items()}


def through_checkpoint(ours: Setup, state: TrainState, directory: Path) -> TrainState:
    """Return a state after it was saved to a directory and restored from there."""
    save_checkpoint(ours, state, directory)
    return restore_checkpoint(ours, directory, int(state.step))


def assert_resumes_bit_exactly(
    ours: Setup, state: TrainState, batches: list[dict], directory: Path
) -> TrainState:
    """Check that a run goes on from a checkpoint as without; return its last state, on the host."""
    restored = through_checkpoint(ours, state, directory)
    expected, resumed = (jax.device_get(ours.run(s, batches)[0]) for s in (state, restored))
    assert counts_of(resumed) == counts_of(expected)
    ends = (dataclasses.replace(state, counts=None) for state in (resumed, expected))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    return expected


def open_checkpoints(directory: Path, ours: Setup) -> Checkpoints:
    """Return the checkpoints of a run, to which states are saved with its config."""
    config, model = ours.config, ours.model
    resolved = config.model_dump(mode="json")
    return Checkpoints(directory, config.checkpoint, model.axes, resolved, stack=model.stack)


def save_checkpoint(ours: Setup, state: TrainState, directory: Path) -> None:
    """Save a state to the checkpoints of a run."""
    with contextlib.closing(open_checkpoints(directory, ours)) as saved:
        saved.save(progress_of(state), state)


def restore_checkpoint(ours: Setup, directory: Path, step: int) -> TrainState:
    """Return the state of a step."""
    section = ours.config.checkpoint
    with contextlib.closing(Checkpoints(directory, section, read_only=True)) as saved:
        return saved.restore(ours.abstract_state(), step)[0]


def stored_progress(run: Path, step: int) -> dict:
    """Return the progress in a checkpoint of a run."""
    path = run / "checkpoints" / f"step_{step}" / "progress" / "metadata"
    return json.loads(path.read_text())


def flip_bit(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def with_random_biases(params, seed: int = 0):
    """Parameters whose biases and sinks are not near zero, as they begin; arrays of the host."""
    rng = np.random.default_rng(seed)

    def changed(path, leaf):
        is_bias = path[-1].key in ("bias", "sinks")
        return rng.standard_normal(leaf.shape, np.float32) if is_bias else leaf

    return jax.tree_util.tree_map_with_path(changed, jax.device_get(params))


def random_batches(config: JobConfig, n: int, seed: int = 0, dp: int | None = None) -> list[dict]:
    """n batches of random tokens, a fifth of the labels ignored."""
    d = config.distributed
    rows = config.train.microbatch_size(d.dp_replicate * d.dp_shard * d.ep if dp is None else dp)
    shape = (n, config.train.grad_accum_steps, rows, config.train.seq_len)
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, config.model.vocab_size, shape)
    labels = np.where(rng.random(shape) < 0.2, -100, np.roll(inputs, -1, axis=-1))
    return [{"input_ids": i, "labels": x} for i, x in zip(inputs, labels, strict=True)]


def lowered(ours: Setup, batch: dict | None = None) -> jax.stages.Lowered:
    """The step, to be compiled for what it will run on; no array is made but those of a batch."""
    state = ours.abstract_state()
    batch = random_batches(ours.config, 1)[0] if batch is None else batch
    with jax.set_mesh(ours.mesh):
        return ours.step.lower(state, ours.put(batch), Controls())


@functools.lru_cache(_MAX_PROGRAMS)
def hlo(ours: Setup) -> str:
    """The compiled step."""
    return lowered(ours).compile().as_text()


def unsplittable(attend):
    """An attention kernel that fails if XLA's partitioner is asked to split it, as cuDNN's does."""

    def asked(*_):
        raise AssertionError("the partitioner was asked to split the kernel")

    def alone(function):
        kernel = custom_partitioning(function)
        kernel.def_partition(
            partition=asked, infer_sharding_from_operands=asked, sharding_rule=asked
        )
        return kernel

    def pulled(q, k, v, segment_ids, d_y):
        return jax.vjp(lambda *qkv: attend(*qkv, segment_ids), q, k, v)[1](d_y)

    @jax.custom_vjp
    def kernel(q, k, v, segment_ids):
        return alone(attend)(q, k, v, segment_ids)

    kernel.defvjp(
        lambda *args: (kernel(*args), args),
        lambda args, d_y: (*alone(pulled)(*args, d_y), None),
    )
    return kernel


def use_unsplittable_kernel(monkeypatch):
    """In place of the default kernel."""
    kernel = attention_backends.opaque_kernel(
        unsplittable(attention_backends.BACKENDS["blockwise"].attend),
        attention_backends.BACKENDS["blockwise"].unsupported_reason,
    )
    monkeypatch.setitem(attention_backends.BACKENDS, "blockwise", kernel)


def collectives_in_loops(text: str) -> list[tuple[str, str, str]]:
    """(shape, kind, groups or pairs) of collectives reachable from a loop's body or condition."""
    computation = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", re.M | re.S)
    computations = dict(computation.findall(text))
    reached, queue = set(), []
    for body in computations.values():
        queue += re.findall(r"(?:body|condition)=%?([\w.\-]+)", body)
    while queue:
        name = queue.pop()
        if name not in reached:
            reached.add(name)
            body = computations[name]
            queue += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", body)
    kinds = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"
    pattern = rf"= (\S+|\(.*?\)) ({kinds})(?:-start)?\(.*?(?:replica_groups|pairs)=(.*?), \w+="
    result = [match for name in reached for match in re.findall(pattern, computations[name])]
    return [(shape, kind, _groups(where)) for shape, kind, where in result]


def _groups(text: str) -> str:
    """Devices that talk to each other, as {{0,1},{2,3}}: each JAX writes them in its own way."""
    if match := re.fullmatch(r"mesh\[(.*)\] \{(.*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        named = re.findall(r"'(\w+)'", match[2])
        devices = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        inner = [list(sizes).index(name) for name in named]
        groups = np.moveaxis(devices, inner, range(-len(inner), 0))
        groups = groups.reshape(-1, math.prod(sizes[name] for name in named))
    elif match := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, source, order = (
            [int(n) for n in part.split(",")] if part else None for part in match.groups()
        )
        groups = np.arange(math.prod(shape)).reshape(source).transpose(order).reshape(shape)
    else:
        return text
    return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in groups.tolist()) + "}"


def change_stored_config(run, section, **keys):
    """Change a section of the config in the checkpoint of step 2, and seal it; return its file."""
    step = run / "checkpoints" / "step_2"
    stored, seal = step / "config" / "metadata", step / "progress" / "metadata"
    config = json.loads(stored.read_text())
    config[section] |= keys
    stored.write_text(json.dumps(config))
    progress = Progress.from_json(json.loads(seal.read_text()))
    seal.write_text(json.dumps(seal_progress(progress, crc32(config))))
    return stored


def convert_to_run(source, run, config, *options):
    """Convert a checkpoint to a run by the command; return the run's directory."""
    arguments = ["convert", "--to=jaxforge", str(source), str(run), f"--config={config}"]
    assert cli([*arguments, *options]) == 0
    return run


def each(values):
    """Return a decorator that calls a test for each value, as one item of the report.

    For values that need no line of their own: the error of a value names it. A tuple is several
    arguments.
    """

    def decorate(test):
        def run_each():
            for value in values:
                try:
                    test(*(value if isinstance(value, tuple) else (value,)))
                except BaseException as error:
                    error.add_note(f"for {value}")
                    raise

        run_each.__name__, run_each.__doc__ = test.__name__, test.__doc__
        return run_each

    return decorate
