"""What several test files build: a model with its step, and batches for it."""

import dataclasses
import re

import jax
import numpy as np
from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model, build_model
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import batch_sharding
from jaxforge.training.progress import Progress
from jaxforge.training.state import TrainState, init_state, state_shardings
from jaxforge.training.step import Controls, make_train_step


@dataclasses.dataclass
class Setup:
    """A model, its optimizer and its step on a mesh."""

    config: JobConfig
    mesh: Mesh
    model: Model
    optimizer: object
    step: object

    def state(self, params=None) -> TrainState:
        with jax.set_mesh(self.mesh):
            state = init_state(self.model, self.optimizer, self.mesh, self.config.train.seed)
            if params is None:
                return state
            shardings = state_shardings(self.model, self.optimizer, self.mesh)
            return dataclasses.replace(state, params=jax.device_put(params, shardings.params))

    def put(self, batch: dict) -> dict:
        batch = {name: np.asarray(leaf, np.int32) for name, leaf in batch.items()}
        return jax.device_put(batch, batch_sharding(self.mesh))

    def run(self, state: TrainState, batches, **controls) -> tuple[TrainState, dict]:
        """Steps through `batches`; metrics stacked over steps."""
        logged = []
        with jax.set_mesh(self.mesh):
            for batch in batches:
                state, metrics = self.step(state, self.put(batch), Controls(**controls))
                logged.append(jax.device_get(metrics))
        return state, {k: np.array([m[k] for m in logged]) for k in logged[0]}


def setup(config: JobConfig, **options) -> Setup:
    """On as many of the virtual devices as `[distributed]` multiplies to."""
    d = config.distributed
    devices = jax.devices()[: d.pp * d.dp_replicate * d.dp_shard * d.tp]
    mesh = make_mesh(config, devices)
    model = build_model(config)
    optimizer = build_optimizer(config, model.axes)
    return Setup(
        config, mesh, model, optimizer, make_train_step(model, optimizer, config, mesh, **options)
    )


def progress_of(state: TrainState) -> Progress:
    """The host's counters of a state."""
    counts = {name: int(count) for name, count in state.counts._asdict().items()}
    return Progress(step=int(state.step), **counts)


def with_random_biases(params, seed: int = 0):
    """Parameters whose biases are not the zeros that they begin as; arrays of the host."""
    rng = np.random.default_rng(seed)

    def changed(path, leaf):
        is_bias = path[-1].key == "bias"
        return rng.standard_normal(leaf.shape, np.float32) if is_bias else leaf

    return jax.tree_util.tree_map_with_path(changed, jax.device_get(params))


def random_batches(config: JobConfig, n: int, seed: int = 0, dp: int | None = None) -> list[dict]:
    """n batches of random tokens, a fifth of the labels ignored."""
    mesh_dp = config.distributed.dp_replicate * config.distributed.dp_shard if dp is None else dp
    rows = config.train.microbatch_size(mesh_dp)
    shape = (n, config.train.grad_accum_steps, rows, config.train.seq_len)
    rng = np.random.default_rng(seed)
    inputs = rng.integers(0, config.model.vocab_size, shape)
    labels = np.where(rng.random(shape) < 0.2, -100, np.roll(inputs, -1, axis=-1))
    return [{"input_ids": i, "labels": x} for i, x in zip(inputs, labels, strict=True)]


def hlo(ours: Setup) -> str:
    """The compiled step."""
    state = ours.state()
    (batch,) = random_batches(ours.config, 1)
    with jax.set_mesh(ours.mesh):
        return ours.step.lower(state, ours.put(batch), Controls()).compile().as_text()


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
    pattern = rf"= (\S+|\(.*?\)) ({kinds})(?:-start)?\(.*?(?:replica_groups|pairs)=(\S+),"
    return [match for name in reached for match in re.findall(pattern, computations[name])]
