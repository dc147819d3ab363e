"""Experts on CPUs: products with each row's own expert, beside dense ones and PyTorch's loop.

    python benchmarks/grouped.py [--quick]

A product, and the gated feed-forward of an expert, each forward and backward. The dense peer has as
many FLOPs: all rows times the weights of one expert. PyTorch multiplies the rows of one expert
after the other. All take turns, and the fastest of all rounds counts: of the time, and of the time
that all cores together have spent, which other processes disturb less. Groups are as a multinomial
draw makes them.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import results
import torch
from torch.nn import functional as F

from jaxforge.model.grouped import grouped_matmul
from jaxforge.parallel import host_memory


class Case(NamedTuple):
    """Shapes: rows, the model's width, an expert's, experts; and the dtype of all."""

    rows: int
    width: int
    hidden: int
    experts: int
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """For the table."""
        return (f"{self.rows} x {self.width} rows, {self.experts} experts of {self.hidden}, "
                f"{self.dtype}")  # fmt: skip


CASES = (
    Case(4096, 512, 1408, 8),
    Case(4096, 512, 1408, 32),
    Case(1024, 256, 704, 8),
    Case(4096, 512, 1408, 8, "bfloat16"),
)
Tensor = jax.Array | torch.Tensor
Product = Callable[[Tensor, Tensor], Tensor]


def one_product(matmul: Product, silu: Callable, x: Tensor, weights: list) -> Tensor:
    """Rows times the first matrix of their expert."""
    return matmul(x, weights[0])


def expert(matmul: Product, silu: Callable, x: Tensor, weights: list) -> Tensor:
    """The feed-forward of an expert: down(silu(gate(x)) · up(x))."""
    gate, up, down = weights
    return matmul(silu(matmul(x, gate)) * matmul(x, up), down)


def inputs(case: Case) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Rows, weights of all experts and how many rows each has."""
    rng = np.random.default_rng(0)
    up, down = (case.hidden, case.width), (case.width, case.hidden)
    weights = [0.05 * rng.standard_normal((case.experts, *s), np.float32) for s in (up, up, down)]
    sizes = rng.multinomial(case.rows, np.full(case.experts, 1 / case.experts))
    return rng.standard_normal((case.rows, case.width), np.float32), weights, sizes


def in_jax(case: Case, layer: Callable, *, is_dense: bool) -> Callable[[], Any]:
    """Forward and backward; one that is dense has the first expert alone."""
    rows, arrays, of_each = inputs(case)
    x, sizes = jnp.asarray(rows, case.dtype), jnp.asarray(of_each, jnp.int32)
    weights = [jnp.asarray(w[0] if is_dense else w, case.dtype) for w in arrays]

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("mi,oi->mo", x, w) if is_dense else grouped_matmul(x, w, sizes, "blocks")

    def loss(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        return jnp.sum(layer(matmul, jax.nn.silu, x, weights).astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weights).compile()
    return lambda: jax.block_until_ready(compiled(x, weights))


def in_torch(case: Case, layer: Callable) -> Callable[[], Any]:
    """Forward and backward, an expert at a time."""
    rows, arrays, sizes = inputs(case)
    dtype = getattr(torch, case.dtype)
    x = torch.tensor(rows, dtype=dtype, requires_grad=True)
    weights = [torch.tensor(w, dtype=dtype, requires_grad=True) for w in arrays]

    def run() -> None:
        parts = x.split(sizes.tolist())
        outputs = [
            layer(lambda x, w: x @ w.T, F.silu, part, [w[i] for w in weights])
            for i, part in enumerate(parts)
        ]
        torch.cat(outputs).float().square().sum().backward()
        for tensor in (x, *weights):
            tensor.grad = None

    return run


def fastest(runs: list[Callable[[], Any]], rounds: int) -> list[tuple[float, float]]:
    """Milliseconds of each, and those of all cores together; the first round warms up."""
    best = [(float("inf"), float("inf"))] * len(runs)
    for turn in range(rounds + 1):
        for i, run in enumerate(runs):
            started, cores = time.perf_counter(), time.process_time()
            run()
            took = 1e3 * (time.perf_counter() - started), 1e3 * (time.process_time() - cores)
            if turn:
                best[i] = min(best[i][0], took[0]), min(best[i][1], took[1])
    return best


def rows_of(case: Case, rounds: int) -> Iterator[results.Row]:
    """Ours beside both peers."""
    for name, layer in (("product", one_product), ("expert", expert)):
        runs = [
            in_jax(case, layer, is_dense=False),
            in_jax(case, layer, is_dense=True),
            in_torch(case, layer),
        ]
        ours, *peers = fastest(runs, rounds)
        for peer, theirs in zip(("dense", "torch, in a loop"), peers, strict=True):
            for unit, mine, other in zip(("ms", "ms of all cores"), ours, theirs, strict=True):
                yield results.Row(f"{name}, {case.name}", round(mine, 1), peer, round(other, 1),
                                  unit, smaller_is_better=True)  # fmt: skip


def main() -> None:
    """Prints the table and writes the results."""
    quick = results.arguments(__doc__).parse_args().quick
    host_memory.keep_freed_memory()  # as a run does
    cases = CASES[:1] if quick else CASES
    rows = [row for case in cases for row in rows_of(case, rounds=5 if quick else 15)]
    notes = [f"forward and backward; {torch.get_num_threads()} threads"]
    results.report("grouped", rows, ("jax", "jaxlib", "torch"), notes=notes, write=not quick)


if __name__ == "__main__":
    main()
