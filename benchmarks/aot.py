"""Estimated cycles and memory of train steps compiled for TPU slices, without a TPU.

    pip install "jax[tpu]"
    python benchmarks/aot.py [--quick]

The peer is a plain JAX program of the same model, precision and rematerialisation: a scan over
stacked layers, weights split over all devices on the embedding dimension, the same attention
kernel, and the rest left to the partitioner. The estimate of cycles is described in
`jaxforge/tools/plan/hlo.py`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import jax.numpy as jnp
import optax
import results
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from program_cost import cost_of
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.kernels.attention_backends import BACKENDS
from jaxforge.model.remat import block
from jaxforge.parallel import targets, xla_flags
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.tools.plan.hlo import HloProgram

LLAMA_2_7B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000,
              "ffn_hidden_dim": 11008}  # fmt: skip
LLAMA_3_8B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
              "ffn_hidden_dim": 14336, "rope_theta": 500000.0}  # fmt: skip
PRODUCTS = "dots_with_no_batch_dims_saveable"
DEVICES = 16


@dataclass
class Case:
    """Model on a slice of 16 chips: one sequence per chip, weights sharded over all chips."""

    name: str
    topology: str
    model: dict
    seq_len: int
    save: str

    def config(self) -> JobConfig:
        """Return the config as a user would write it."""
        train = {
            "batch_size": 1,
            "seq_len": self.seq_len,
            "activation_checkpointing": self.save,
            "grad_sync": "microbatch",
        }
        model = {**self.model, "max_seq_len": self.seq_len}
        return JobConfig.model_validate(
            {"model": model, "train": train, "distributed": {"dp_shard": DEVICES}}
        )


CASES = (
    Case("Llama 2 7B, v5e 4x4, full remat", "v5e:4x4", LLAMA_2_7B, 2048, "full"),
    Case("Llama 2 7B, v5e 4x4, products saved", "v5e:4x4", LLAMA_2_7B, 2048, PRODUCTS),
    Case("Llama 3 8B, v6e 4x4, full remat", "v6e:4x4", LLAMA_3_8B, 4096, "full"),
    Case("Llama 3 8B, v5p 2x2x4, full remat", "v5p:2x2x4", LLAMA_3_8B, 4096, "full"),
)


def our_step(case: Case, devices: list[jax.Device]) -> jax.stages.Lowered:
    """Lower the train step of jaxforge."""
    config = case.config()
    return Program(config, make_mesh(config, devices)).lower()


def plain_step(case: Case, devices: list[jax.Device]) -> jax.stages.Lowered:
    """Lower a plain implementation of the update, with weights split on the embedding dimension."""
    mesh = make_mesh(case.config(), devices)
    params = plain_params(case.config().model, mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, 0.9, 0.95))
    loss = plain_loss(case)

    def step(params: dict, state: optax.OptState, tokens: jax.Array) -> tuple:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    shape = (DEVICES, case.seq_len)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P("dp_shard")))
    with jax.set_mesh(mesh):
        state = jax.eval_shape(optimizer.init, params)
        moments = jax.tree.map(lambda p: p, params)
        adam = state[1][0]._replace(mu=moments, nu=moments)
        state = (state[0], (adam, *state[1][1:]))
        return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens)


def plain_params(c: ModelConfig, mesh: Mesh) -> dict:
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


def plain_loss(case: Case) -> Callable[[dict, jax.Array], jax.Array]:
    """Compute the mean cross-entropy of the plain model in bfloat16."""
    c = case.config().model
    frequencies = c.rope_theta ** (-jnp.arange(0, c.head_size, 2) / c.head_size)
    angles = jnp.arange(case.seq_len)[:, None] * frequencies
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
        attended = BACKENDS["splash"].attend(rotate(q), rotate(k), v, None)
        x = x + attended.reshape(x.shape) @ w["o"]
        y = norm(x, w["norm2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    def loss(params: dict, tokens: jax.Array) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[tokens]
        x, _ = jax.lax.scan(block(case.save, layer), x, params["layers"])
        head = params["head"].astype(x.dtype)
        logits = jnp.matmul(norm(x, params["norm"]), head, preferred_element_type=jnp.float32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens))

    return loss


def measure(lowered: jax.stages.Lowered, options: dict[str, str | bool]) -> dict[str, float]:
    """Compile with these options and return the compiler's figures."""
    compiled = lowered.compile(options)
    cost = cost_of(HloProgram(compiled.as_text(), DEVICES))
    return {
        "M cycles": sum(cost.cycles.values()) / 1e6,
        "M cycles of products": cost.cycles["matmul"] / 1e6,
        "GB of memory": compiled.memory_analysis().peak_memory_in_bytes / 1e9,
        "synchronous collectives": sum(cost.synchronous.values()),
        "GB sent in them": cost.synchronous_bytes / 1e9,
    }


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    if not targets.has_tpu_compiler():
        raise SystemExit('the compiler for TPU is missing: pip install "jax[tpu]"')
    rows = []
    for case in CASES[: 1 if quick else None]:
        devices = list(targets.tpus(case.topology))
        ours = measure(our_step(case, devices), xla_flags.compiler_options(devices[0], {}))
        theirs = measure(plain_step(case, devices), {})
        Console().print(case.name, ours, theirs, highlight=False)
        rows += [
            results.Row(case.name, round(ours[unit], 2), "plain JAX", round(theirs[unit], 2), unit,
                        smaller_is_better=True)
            for unit in ours
        ]  # fmt: skip
    packages = ("jax", "jaxlib", "libtpu", "optax")
    notes = [f"{DEVICES} chips, one sequence each, bfloat16; cycles leave out collectives and "
             "attention kernels"]  # fmt: skip
    results.report("aot", rows, packages, device="tpu", notes=notes, write=not quick)


if __name__ == "__main__":
    main()
