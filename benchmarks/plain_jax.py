"""Update of the same model in plain JAX, as a peer.

A scan over stacked layers, weights split over all devices on the embedding dimension, the same
attention kernel, and the rest left to the partitioner.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.kernels.attention_backends import BACKENDS
from jaxforge.model.remat import block
from jaxforge.parallel.mesh import make_mesh

State = tuple[dict, optax.OptState]
"""Parameters and the state of their optimizer."""


def lower_step(
    config: JobConfig, devices: Sequence[jax.Device], attention: str = "splash"
) -> tuple[jax.stages.Lowered, State]:
    """Lower an update, with the sequences of a batch split over the devices.

    Args:
        config: model, batch and rematerialization; `distributed.dp_shard` is the number of devices.
        devices: the devices.
        attention: name of the attention kernel.

    Returns:
        The update (parameters, state of the optimizer, tokens) -> (parameters, state, loss), and
        its abstract parameters and state.
    """
    mesh = make_mesh(config, devices)
    params = abstract_params(config.model, mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, 0.9, 0.95))
    loss = loss_function(config, attention)

    def step(params: dict, state: optax.OptState, tokens: jax.Array) -> tuple:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    shape = (config.train.batch_size * len(devices), config.train.seq_len)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P("dp_shard")))
    with jax.set_mesh(mesh):
        state = jax.eval_shape(optimizer.init, params)
        moments = jax.tree.map(lambda p: p, params)
        adam = state[1][0]._replace(mu=moments, nu=moments)
        state = (state[0], (adam, *state[1][1:]))
        return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens), (params, state)


def abstract_params(c: ModelConfig, mesh: Mesh) -> dict:
    """Return abstract float32 parameters; matrices are [in, out]."""

    def weight(*shape: int, split: int | None) -> jax.ShapeDtypeStruct:
        spec = P(*("dp_shard" if axis == split else None for axis in range(len(shape))))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    n, kv = c.n_layers, c.kv_heads * c.head_size
    return {
        "embedding": weight(c.vocab_size, c.dim, split=1),
        "head": weight(c.dim, c.vocab_size, split=0),
        "norm": weight(c.dim, split=None),
        "layers": {
            "norm1": weight(n, c.dim, split=None),
            "norm2": weight(n, c.dim, split=None),
            "q": weight(n, c.dim, c.dim, split=1),
            "k": weight(n, c.dim, kv, split=1),
            "v": weight(n, c.dim, kv, split=1),
            "o": weight(n, c.dim, c.dim, split=2),
            "gate": weight(n, c.dim, c.ffn_dim, split=1),
            "up": weight(n, c.dim, c.ffn_dim, split=1),
            "down": weight(n, c.ffn_dim, c.dim, split=2),
        },
    }


def loss_function(config: JobConfig, attention: str) -> Callable[[dict, jax.Array], jax.Array]:
    """Return the mean cross-entropy of tokens in the compute dtype, by parameters and tokens."""
    c, save = config.model, config.train.activation_checkpointing
    dtype = jnp.bfloat16 if config.train.mixed_precision == "bf16" else jnp.float32
    frequencies = c.rope_theta ** (-jnp.arange(0, c.head_size, 2) / c.head_size)
    angles = jnp.arange(config.train.seq_len)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + c.norm_eps)
        return (y * weight).astype(x.dtype)

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)

    def layer(x: jax.Array, w: dict) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
        y = norm(x, w["norm1"])
        q, k, v = ((y @ w[name]).reshape(*y.shape[:2], -1, c.head_size) for name in "qkv")
        attended = BACKENDS[attention].attend(rotate(q), rotate(k), v, None)
        x = x + attended.reshape(x.shape) @ w["o"]
        y = norm(x, w["norm2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    def loss(params: dict, tokens: jax.Array) -> jax.Array:
        x = params["embedding"].astype(dtype)[tokens]
        x, _ = jax.lax.scan(block(save, layer), x, params["layers"])
        head = params["head"].astype(x.dtype)
        logits = jnp.matmul(norm(x, params["norm"]), head, preferred_element_type=jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens))

    return loss
