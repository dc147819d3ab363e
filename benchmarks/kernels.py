"""Attention on CPUs against the reference, and the memory of each way to compute the loss.

    python benchmarks/kernels.py [--quick]

Attention is timed forward and backward in float32, the two taking turns, and the fastest of all
rounds counts. The loss is compiled with its gradient and not run: memory is what the compiled
program needs besides its arguments (`memory_analysis`).
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import results

from jaxforge.model.attention_backends import reference_attention
from jaxforge.model.blockwise import blockwise_attention
from jaxforge.parallel import host_memory
from jaxforge.side import LossWeights
from jaxforge.step.cross_entropy import Tiling, weighted_loss

ATTENTION = (
    (8, 256, 8, 4, 32),
    (4, 512, 8, 8, 64),
)  # sequences, tokens, heads, of keys, their size
VOCABULARIES = (16_384, 32_768, 131_072)
TOKENS, WIDTH = 2048, 256
SCALES = LossWeights(np.float32(1.0), 0.0)


def gradient(attend: Callable[..., jax.Array], batch: tuple[int, ...]) -> Callable[[], Any]:
    """Attention and its gradient, compiled, on random queries, keys and values."""
    rows, tokens, heads, kv, size = batch
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(rows, tokens, n, size) for n in (heads, kv, kv)]
    inputs = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
    compiled = jax.jit(jax.grad(lambda *qkv: jnp.sum(attend(*qkv, None) ** 2), (0, 1, 2)))
    return lambda: jax.block_until_ready(compiled(*inputs))


def fastest(runs: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Milliseconds of each, taking turns; the first round compiles."""
    best = [float("inf")] * len(runs)
    for turn in range(rounds + 1):
        for i, run in enumerate(runs):
            started = time.perf_counter()
            run()
            if turn:
                best[i] = min(best[i], 1e3 * (time.perf_counter() - started))
    return best


def attention_rows(rounds: int) -> Iterator[results.Row]:
    """Ours beside the reference, for each shape."""
    for shape in ATTENTION:
        both = [gradient(attend, shape) for attend in (blockwise_attention, reference_attention)]
        ours, theirs = (round(ms, 1) for ms in fastest(both, rounds))
        rows, tokens, heads, kv, size = shape
        case = f"attention, {heads} heads of {size} over {kv}, {rows} x {tokens} tokens"
        yield results.Row(case, ours, "reference", theirs, "ms", smaller_is_better=True)


def plain(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss as one writes it down, for autodiff."""
    log_p = jax.nn.log_softmax(hidden @ head.T)
    return -jnp.sum(jnp.take_along_axis(log_p, labels[..., None], -1))


def mebibytes(loss: Callable[..., jax.Array], vocab: int) -> float:
    """Temporary memory of the loss and its gradient."""
    shapes = [((1, TOKENS, WIDTH), "float32"), ((vocab, WIDTH), "float32"), ((1, TOKENS), "int32")]
    lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(
        *(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    )
    return round(lowered.compile().memory_analysis().temp_size_in_bytes / 2**20, 1)


def loss_rows() -> Iterator[results.Row]:
    """At once, by tokens and by the vocabulary, beside the plain loss under autodiff."""
    for vocab in VOCABULARIES:
        theirs = mebibytes(plain, vocab)
        for name, tiles in (
            ("all at once", Tiling(TOKENS, vocab)),
            ("512 tokens at a time", Tiling(512, vocab)),
            ("8192 entries at a time", Tiling(TOKENS, 8192)),
        ):
            ours = mebibytes(lambda *xs, t=tiles: weighted_loss(t, *xs, SCALES).value, vocab)
            case = f"loss of a vocabulary of {vocab:,}, {name}"
            yield results.Row(case, ours, "autodiff", theirs, "MiB", smaller_is_better=True)


def main() -> None:
    """Prints the table and writes the results."""
    quick = results.arguments(__doc__).parse_args().quick
    host_memory.keep_freed_memory()  # as a run does
    rows = [*attention_rows(rounds=3 if quick else 30), *loss_rows()]
    notes = [f"float32; loss of {TOKENS} tokens of width {WIDTH}"]
    results.report("kernels", rows, ("jax", "jaxlib"), notes=notes, write=not quick)


if __name__ == "__main__":
    main()
