"""Numerical errors on this device relative to float32 on the CPU.

    python benchmarks/device_numerics.py [--quick] [--cases WORDS]

Attention and grouped products are compared forward and backward, with the kernels that a run would
choose; so are the losses of a few updates. Errors are ‖x - reference‖ / ‖reference‖, over all
elements.

Not in `make bench`: part of `gpu.py` and `tpu.py`.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import results

from jaxforge.config.job import JobConfig
from jaxforge.kernels.attention_backends import BACKENDS, KernelRequirements, choose_backend
from jaxforge.kernels.grouped import ProductRequirements, choose_grouped, grouped_matmul
from jaxforge.model.runtime import gpu_capability
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import batch_shardings
from jaxforge.program import Program
from jaxforge.step.train_step import Controls

Arrays = list[np.ndarray]
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}  # of bfloat16 are a few of its roundings, 2^-8


MIXERS = {
    "latent_attention": {"q_rank": 96, "kv_rank": 64, "nope_head_dim": 128, "rope_head_dim": 64,
                         "value_head_dim": 128},
    "gated_delta_net": {"key_heads": 2, "value_heads": 4, "key_head_dim": 64,
                        "value_head_dim": 64},
    "mamba2": {"heads": 8, "head_dim": 64, "state_size": 64},
}  # fmt: skip
"""Settings of all mixers but attention, with the head widths of DeepSeek-V3 in latent attention."""


class Size(NamedTuple):
    """Sizes of attention and of grouped products."""

    tokens: int
    rows: int
    widths: tuple[int, int]


SIZES = {True: Size(256, 512, (64, 128)), False: Size(2048, 8192, (1024, 768))}


def dtype() -> str:
    """Return the compute dtype of runs on this device."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def error(result: jax.Array, reference: jax.Array) -> float:
    """Return the relative error in the norm; NaN if either array has a NaN."""
    x, y = (np.asarray(array, np.float64) for array in (result, reference))
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def with_gradients(
    function: Callable[..., jax.Array], inputs: Arrays, d_y: np.ndarray, device: jax.Device, to: str
) -> list[jax.Array]:
    """Return result and gradients; inputs are rounded to bfloat16 for every dtype."""
    rounded = [jnp.asarray(x, jnp.bfloat16).astype(to) for x in (*inputs, d_y)]
    *xs, dy = jax.device_put(rounded, device)

    @jax.jit
    def run(xs: list[jax.Array], dy: jax.Array) -> list[jax.Array]:
        y, pull = jax.vjp(function, *xs)
        return [y, *pull(dy)]

    with jax.default_matmul_precision("highest" if to == "float32" else "default"):
        return run(xs, dy)


def errors(
    name: str,
    ours: Callable[..., jax.Array],
    reference: Callable[..., jax.Array],
    inputs: Arrays,
    d_y: np.ndarray,
) -> results.Claim:
    """Return the largest error of the result and of all gradients."""
    there = with_gradients(reference, inputs, d_y, jax.devices("cpu")[0], "float32")
    here = with_gradients(ours, inputs, d_y, jax.devices()[0], dtype())
    worst = [error(*pair) for pair in zip(here, there, strict=True)]
    result = ", ".join(f"{each:.1e}" for each in worst)
    limit = TOLERANCES[dtype()]
    return results.Claim(name, result, f"{limit:g} at most", all(each < limit for each in worst))


def attention(size: Size) -> Iterator[results.Claim]:
    """Yield claims on causal, packed and windowed attention."""
    config = JobConfig.model_validate({"model": {"n_heads": 8, "n_kv_heads": 2, "dim": 1024}}).model
    rows, tokens, width, device = 2, size.tokens, config.head_size, jax.devices()[0]
    at = KernelRequirements(device.platform, jnp.dtype(dtype()), width, tokens,
                            capability=gpu_capability(device))  # fmt: skip
    names = {
        choose_backend(config, at._replace(packed=packed)).name: None for packed in (False, True)
    }
    rng = np.random.default_rng(0)
    shapes = [(rows, tokens, heads, width) for heads in (8, 2, 2, 8)]
    *qkv, d_y = (rng.standard_normal(shape, np.float32) for shape in shapes)
    documents = np.sort(rng.integers(0, 5, (rows, tokens)), axis=1).astype(np.int32)
    cases = {"causal": (None, None), "packed": (documents, None), "window": (None, tokens // 4),
             "packed, window": (documents, tokens // 4)}  # fmt: skip
    for name, (case, others) in itertools.product(names, cases.items()):
        functions = [lambda *qkv, b=b, r=others: BACKENDS[b].attend(*qkv, *r)
                     for b in (name, "reference")]  # fmt: skip
        yield errors(f"attention by {name}, {case}: y, dq, dk, dv", *functions, qkv, d_y)


def experts(size: Size) -> Iterator[results.Claim]:
    """Yield claims on grouped products; one of the experts has no rows."""
    device, rng, groups = jax.devices()[0], np.random.default_rng(0), 8
    for inp, out in (size.widths, size.widths[::-1]):
        at = ProductRequirements(device.platform, jnp.dtype(dtype()), (inp, out),
                                 gpu_capability(device))  # fmt: skip
        name = choose_grouped("auto", at)
        shares = rng.dirichlet(np.ones(groups)) * (np.arange(groups) != 3)
        sizes = rng.multinomial(size.rows, shares / shares.sum()).astype(np.int32)
        shapes = (size.rows, inp), (groups, out, inp), (size.rows, out)
        x, w, d_y = (rng.standard_normal(shape, np.float32) for shape in shapes)
        functions = [lambda x, w, s=sizes, b=b: grouped_matmul(x, w, jnp.asarray(s), b)
                     for b in (name, "blocks")]  # fmt: skip
        case = f"product of {groups} experts by {name}, {inp} -> {out}: y, dx, dw"
        yield errors(case, *functions, [x, w], d_y)


def updates(config: JobConfig, device: jax.Device, steps: int) -> np.ndarray:
    """Return the losses of updates with the same batch."""
    program = Program(config, make_mesh(config, [device]))
    shape = (1, config.train.batch_size, config.train.seq_len)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
    data = {"input_ids": tokens, "labels": np.roll(tokens, -1, axis=-1)}
    with program.context(), jax.default_device(device):
        state = program.init(0)
        batch, result = jax.device_put(data, batch_shardings(program.mesh, data)), []
        for _ in range(steps):
            state, metrics = program.step(state, batch, Controls())
            result.append(float(metrics["loss"]))
    return np.array(result)


def losses(size: Size) -> Iterator[results.Claim]:
    """Yield claims on losses of a dense model and of one with experts.

    With experts, rounding may route rows to other experts.
    """
    mixture = {"num_experts": 8, "moe_top_k": 2, "moe_expert_dim": 256}
    return of_models({"dense": ({}, 1e-4), "experts": (mixture, 1e-3)}, size)


def mixers(size: Size) -> Iterator[results.Claim]:
    """Yield claims on losses of models with other mixers than attention."""
    return of_models(
        {name: ({"mixer_pattern": [name], name: keys}, 1e-3) for name, keys in MIXERS.items()}, size
    )


def of_models(cases: dict[str, tuple[dict, float]], size: Size) -> Iterator[results.Claim]:
    """Yield claims on losses in float32 and in the precision of a run.

    `cases` has the settings of each model and the tolerance in float32.
    """
    model = {"dim": 256, "n_layers": 2, "n_heads": 4, "vocab_size": 1024}
    precisions = ["fp32"] if jax.default_backend() == "cpu" else ["fp32", "bf16"]
    for name, (keys, tight) in cases.items():
        result = [config_of({**model, **keys}, size, precision) for precision in precisions]
        reference = updates(result[0], jax.devices("cpu")[0], 10)
        for config, limit in zip(result, (tight, 2e-2), strict=False):
            matches = updates(config, jax.devices()[0], 10)
            worst = np.max(np.abs(matches / reference - 1))
            yield results.Claim(
                f"losses of 10 updates, {name}, {config.train.mixed_precision}",
                f"{matches[0]:.4f} -> {matches[-1]:.4f}, {worst:.1e} from float32 on the CPU",
                f"{limit:g} at most, and falling", bool(worst < limit and matches[-1] < matches[0]),
            )  # fmt: skip


def config_of(model: dict, size: Size, precision: str) -> JobConfig:
    """Return the config of a run of a few seconds."""
    seq = min(size.tokens, 256)
    train = {"batch_size": 4, "seq_len": seq, "mixed_precision": precision}
    return JobConfig.model_validate(
        {"model": {**model, "max_seq_len": seq}, "train": train, "optimizer": {"lr": 1e-3},
         "scheduler": {"warmup_steps": 2}}
    )  # fmt: skip


def main() -> int:
    """Print the claims and write the results; return 1 if a claim does not hold."""
    args = results.arguments(__doc__, cases=True).parse_args()
    makers = {"attention": attention, "experts": experts, "losses": losses, "mixers": mixers}
    size = SIZES[args.quick]
    claims = (claim for name, make in makers.items() if args.cases in name for claim in make(size))
    return results.judge("numerics", claims, ("jax", "jaxlib"), write=not args.quick)


if __name__ == "__main__":
    raise SystemExit(main())
