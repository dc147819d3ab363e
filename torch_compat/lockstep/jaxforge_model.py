"""Values of jaxforge's model for a batch: forward pass, gradients and updates."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from jaxforge.aux_outputs import LossWeights
from jaxforge.config.eval import STREAM
from jaxforge.config.job import JobConfig
from jaxforge.config.model import LAYERS
from jaxforge.model.layer import Capture
from jaxforge.model.transformer import Model, Params, join
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.step.losses import build_loss
from jaxforge.step.update_loss import update_loss_weights
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.formats.lazy import DTYPES, LazyTensor, from_array
from torch_compat.lockstep.batches import Arrays

_NO_CLIP = 1e30


@dataclasses.dataclass(frozen=True)
class JaxforgeValues:
    """Values that jaxforge's model computes from a batch.

    Parameters are named with one entry per layer and expert.

    Attributes:
        params: the parameters.
        points: values of the forward pass: "embed", "layers.0.attention", ..., "logits".
        loss: the training loss.
        grads: gradients of the loss, float32.
        updates: the first update for these gradients, and a second one for -1/2 of them, which
            reveals the decay rates of running means.
        point_drift: root mean square by which points change if all weights change by rounding.
        gradient_drift: the same for gradients.
    """

    params: Arrays
    points: Arrays
    loss: float
    grads: Arrays
    updates: tuple[Arrays, Arrays]
    point_drift: Mapping[str, float]
    gradient_drift: Mapping[str, float]


def compute(config: JobConfig, checkpoint: CheckpointState, batch: Arrays) -> JaxforgeValues:
    """Run the model of a config on one device.

    Args:
        config: config with a mesh of one device.
        checkpoint: the weights.
        batch: "input_ids" and "labels" [b, s].
    """
    program = Program(config, make_mesh(config, jax.devices()[:1]))
    with program.context():
        model = program.model
        stacking = Stacking(config.model)
        params = _tree(stacking, checkpoint.params, activation_dtype(config))
        state = _tree(stacking, checkpoint.model_state, "float32")
        state = state or model.initial_state()
        arrays = {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()}
        run = jax.jit(_gradients(model, config))
        grads, (loss, points) = run(params, state, arrays)
        # The same compiled function: only the weights differ, by as much as rounding changes a
        # product.
        perturbed = run(_perturb(params, config), state, arrays)
        updates = jax.jit(_two_updates(program))(grads, params)
        entries, gradients, *both = (_entries(stacking, tree) for tree in (params, grads, *updates))
        values, perturbed_values = (_by_layer(model, x, entries) for x in (points, perturbed[1][1]))
    return JaxforgeValues(
        entries, values, float(loss), gradients, (both[0], both[1]),
        _drift(values, perturbed_values), _drift(gradients, _entries(stacking, perturbed[0])),
    )  # fmt: skip


def _perturb(params: Params, config: JobConfig) -> Params:
    """Change parameters at random, by the relative rounding error of a matrix product."""
    exact = activation_dtype(config) == "float32"
    # √dim · 2^-24: a sum of `dim` products in another order (`lockstep.rounding`).
    size = 2**-24 * math.sqrt(config.model.dim) if exact else 2**-8
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: p * (1 + size * rng.standard_normal(p.shape, np.float32)), params)


def root_mean_square(x: np.ndarray) -> float:
    """Return √(Σ x² / n); 0 for an empty array."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def _drift(a: Arrays, b: Arrays) -> dict[str, float]:
    return {name: root_mean_square(b[name] - a[name]) for name in a}


def activation_dtype(config: JobConfig) -> str:
    """Return torch's name of the activation dtype."""
    return {"fp32": "float32", "bf16": "bfloat16"}[config.train.mixed_precision]


def _gradients(model: Model, config: JobConfig) -> Callable[..., tuple]:
    loss = build_loss(config.train, model)

    def value(params: Params, state: Params, batch: Mapping[str, Array]) -> tuple:
        # [microbatches, b, s], here with one microbatch.
        weights = update_loss_weights({"labels": batch["labels"][None]}, config.train)
        microbatch = LossWeights(weights.token[0], weights.position, weights.sequence)
        variables = join(params, state)
        hidden, out = model.forward(variables, batch, microbatch, capture=Capture(STREAM))
        aux = loss(variables, hidden, batch, microbatch).with_layer_losses(out.aux)
        points = {
            "embed": model.embed(variables, batch),
            "final_norm": hidden,
            "logits": model.logits(variables, hidden),
            LAYERS: out.activations,
        }
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), points)
        return aux.loss, (aux.loss, wide)

    return jax.grad(value, has_aux=True)


def _two_updates(program: Program) -> Callable[..., tuple]:
    """Return two updates at a constant rate, without clipping, as in torch's optimizer."""
    config = program.config
    plain = config.with_values({"train.grad_clip_norm": _NO_CLIP, "scheduler.name": "none"})
    optimizer = Program(plain, program.mesh, model=program.model).optimizer

    def updates(grads: Params, params: Params) -> tuple[PyTree, PyTree]:
        first, state = optimizer.update(grads, optimizer.init(params), params, lr_scale=1.0)
        after = optax.apply_updates(params, first)
        opposite = jax.tree.map(lambda g: -0.5 * g, grads)
        second, _ = optimizer.update(opposite, state, after, lr_scale=1.0)
        return first, second

    return updates


def _by_layer(model: Model, points: Mapping[str, PyTree], params: Arrays) -> Arrays:
    """Return points by name and layer, with the sums and norms between them."""
    layers = jax.device_get(dict(points[LAYERS]))
    seen = {name: np.asarray(model.stack.unstack(x)) for name, x in layers.items()}
    # [batch, tokens, d_model]; layer i adds its attention and its feed-forward to it.
    stream = np.asarray(points["embed"])
    values = {"embed": stream}
    for i in range(model.config.n_layers):
        at, entering = f"{LAYERS}.{i}", stream
        attention, mlp, stream = (seen[name][i] for name in STREAM)
        between = entering + attention
        before_mlp = entering if model.config.parallel_residual else between
        values |= {
            **_normed(model, f"{at}.shared_norm", entering, params),
            **_normed(model, f"{at}.attention_norm", entering, params),
            f"{at}.attention": attention,
            f"{at}.after_attention": between,
            **_normed(model, f"{at}.mlp_norm", before_mlp, params),
            f"{at}.mlp": mlp,
            f"{at}.residual": stream,
        }
    return values | {name: np.asarray(points[name]) for name in ("final_norm", "logits")}


def _normed(model: Model, name: str, x: np.ndarray, params: Arrays) -> Arrays:
    """Return the normalized residual stream; empty if the model has no such norm.

    The final norm is applied with other weights, since all norms of the stream have one definition.
    """
    weights = {
        key: params[f"{name}.{key}"] for key in ("weight", "bias") if f"{name}.{key}" in params
    }
    if not weights:
        return {}
    normed = jax.jit(model.final_norm)({"norm": weights}, jnp.asarray(x, model.dtype))
    # `final_norm` divides by the scaling of logits, which other norms do not have.
    return {name: np.asarray(normed, np.float32) * model.config.logits_scaling}


def _tree(stacking: Stacking, entries: Mapping[str, LazyTensor], dtype: str) -> Params:
    """Return entries as a tree of float32 arrays whose values are rounded to a dtype."""
    arrays = {
        name: jnp.asarray(tensor.cast(DTYPES[dtype]).all().astype(np.float32))
        for name, tensor in stacking.join(entries).items()
    }
    return unflatten_dict(arrays, sep=".")


def _entries(stacking: Stacking, tree: Params) -> Arrays:
    values: Arrays = {}
    for name, leaf in flatten_dict(jax.device_get(tree), sep=".").items():
        parts = stacking.split(name, from_array(np.asarray(leaf)))
        values |= {entry: tensor.all() for entry, tensor in parts.items()}
    return values
