"""Speed of attention against the reference, and memory of each implementation of the loss.

    python benchmarks/kernels.py [--quick] [--cases WORDS]

Attention is timed forward and backward, in float32 on CPUs and in bfloat16 on GPUs, where PyTorch
is a peer. Kernels alternate, and the fastest round counts. The loss is compiled with its gradient:
memory is what the program needs in addition to its arguments (`memory_analysis`). Only GPUs also
run it.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import results

from jaxforge.aux_outputs import LossWeights
from jaxforge.kernels.blockwise import blockwise_attention
from jaxforge.kernels.dot_product_attention import cudnn_attention, reference_attention
from jaxforge.parallel import host_memory
from jaxforge.step.cross_entropy import weighted_loss
from jaxforge.step.logit_tiles import Tiling

Shape = tuple[int, int, int, int, int]
"""Sequences, tokens, heads, heads of keys, their size."""


class Sizes(NamedTuple):
    """Sizes for a device: shapes of attention, and tokens, width and dtype of the loss."""

    attention: tuple[Shape, ...]
    vocabularies: tuple[int, ...]
    tokens: int
    width: int
    dtype: str


CPU = Sizes(((8, 256, 8, 4, 32), (4, 512, 8, 8, 64)), (16_384, 32_768, 131_072), 2048, 256,
            "float32")  # fmt: skip
GPU = Sizes(((4, 4096, 16, 8, 128), (1, 8192, 32, 8, 128)), (32_768, 131_072), 8192, 4096,
            "bfloat16")  # fmt: skip
SCALES = LossWeights(np.float32(1.0), 0.0)


def sizes() -> Sizes:
    """Return the sizes for this device."""
    return GPU if jax.default_backend() == "gpu" else CPU


def gradient(attend: Callable[..., jax.Array], batch: Shape) -> Callable[[], Any]:
    """Compile attention and its gradient for random queries, keys and values."""
    rows, tokens, heads, kv, size = batch
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(rows, tokens, n, size) for n in (heads, kv, kv)]
    dtype = jnp.dtype(sizes().dtype)
    inputs = [jax.random.normal(*pair, dtype) for pair in zip(keys, shapes, strict=True)]

    def loss(*qkv: jax.Array) -> jax.Array:
        return jnp.sum(attend(*qkv, None).astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2)))
    return lambda: jax.block_until_ready(compiled(*inputs))


def in_torch(batch: Shape) -> Callable[[], Any]:
    """Return PyTorch's attention with its gradient, on a GPU in bfloat16."""
    import torch  # no peer on CPUs

    rows, tokens, heads, kv, size = batch
    q, k, v = (
        torch.randn(rows, n, tokens, size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for n in (heads, kv, kv)
    )

    def run() -> None:
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        torch.autograd.grad(y.float().square().sum(), (q, k, v))
        torch.cuda.synchronize()

    return run


def fastest(runs: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the milliseconds of each, alternating; the first round compiles."""
    best = [float("inf")] * len(runs)
    for turn in range(rounds + 1):
        for i, run in enumerate(runs):
            started = time.perf_counter()
            run()
            if turn:
                best[i] = min(best[i], 1e3 * (time.perf_counter() - started))
    return best


def attention_rows(rounds: int) -> Iterator[results.Row]:
    """Yield rows of each shape against its peers."""
    on_gpu = jax.default_backend() == "gpu"
    for shape in sizes().attention:
        runs = {"blockwise": gradient(blockwise_attention, shape),
                "reference": gradient(reference_attention, shape)}  # fmt: skip
        if on_gpu:
            runs = {"cudnn": gradient(cudnn_attention, shape), **runs, "torch": in_torch(shape)}
        ours, *peers = (round(ms, 2 if on_gpu else 1) for ms in fastest([*runs.values()], rounds))
        rows, tokens, heads, kv, size = shape
        case = f"attention, {heads} heads of {size} over {kv}, {rows} x {tokens} tokens"
        for peer, theirs in zip(list(runs)[1:], peers, strict=True):
            yield results.Row(case, ours, peer, theirs, "ms", smaller_is_better=True)


def plain(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the loss in plain JAX, for autodiff."""
    logits = jnp.einsum("bsd,vd->bsv", hidden, head, preferred_element_type=jnp.float32)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.take_along_axis(log_p, labels[..., None], -1))


def compiled_loss(loss: Callable[..., jax.Array], vocab: int) -> jax.stages.Compiled:
    """Compile the loss and its gradient."""
    at = sizes()
    shapes = [((1, at.tokens, at.width), at.dtype), ((vocab, at.width), at.dtype),
              ((1, at.tokens), "int32")]  # fmt: skip
    return (
        jax.jit(jax.value_and_grad(loss, (0, 1)))
        .lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        .compile()
    )


def mebibytes(compiled: jax.stages.Compiled) -> float:
    """Return the temporary memory in MiB."""
    return round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1)


def run_of(compiled: jax.stages.Compiled, vocab: int) -> Callable[[], Any]:
    """Return a loss function of random hidden states, with a random head and labels."""
    at, keys = sizes(), jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, at.tokens, at.width), at.dtype)
    head = jax.random.normal(keys[1], (vocab, at.width), at.dtype) / at.width**0.5
    labels = jax.random.randint(keys[2], (1, at.tokens), 0, vocab)
    return lambda: jax.block_until_ready(compiled(hidden, head, labels))


def loss_rows(rounds: int) -> Iterator[results.Row]:
    """Yield rows of the loss: whole, by tokens and by vocabulary, against plain autodiff."""
    tokens = sizes().tokens
    for vocab in sizes().vocabularies:
        theirs = compiled_loss(plain, vocab)
        for name, tiles in (
            ("all at once", Tiling(tokens, vocab)),
            ("512 tokens at a time", Tiling(512, vocab)),
            ("8192 entries at a time", Tiling(tokens, 8192)),
        ):
            ours = compiled_loss(lambda *xs, t=tiles: weighted_loss(t, *xs, SCALES).value, vocab)
            case = f"loss of a vocabulary of {vocab:,}, {name}"
            yield results.Row(case, mebibytes(ours), "autodiff", mebibytes(theirs), "MiB",
                              smaller_is_better=True)  # fmt: skip
            if jax.default_backend() == "gpu":
                times = fastest([run_of(row, vocab) for row in (ours, theirs)], rounds)
                yield results.Row(case, round(times[0], 2), "autodiff", round(times[1], 2), "ms",
                                  smaller_is_better=True)  # fmt: skip


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    results.leave_room()
    host_memory.keep_freed_memory()  # as a run does
    rounds, at = 3 if args.quick else 30, sizes()
    makers = {"attention": attention_rows, "loss": loss_rows}
    rows = [row for name, make in makers.items() if args.cases in name for row in make(rounds)]
    notes = [f"{at.dtype}; loss of {at.tokens} tokens of width {at.width}"]
    results.report("kernels", rows, ("jax", "jaxlib"), notes=notes, write=not args.quick)


if __name__ == "__main__":
    main()
