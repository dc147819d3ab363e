"""Speed of grouped products, compared with dense products and with PyTorch.

    python benchmarks/grouped.py [--quick] [--cases WORDS]

A product and the gated feed-forward of an expert are timed, each forward and backward. The dense
peer has the same FLOPs: all rows times the weights of one expert. PyTorch loops over experts; on
GPUs its `grouped_mm` is a peer too. All alternate, and the fastest round counts, both of wall time
and of CPU time, which other processes disturb less. Group sizes are a multinomial sample.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import results
import torch
from torch.nn import functional as F

from jaxforge.kernels.grouped import ProductRequirements, choose_grouped, grouped_matmul
from jaxforge.model.runtime import gpu_capability
from jaxforge.parallel import host_memory


class Case(NamedTuple):
    """Number of rows, width of the model and of an expert, number of experts, and dtype."""

    rows: int
    width: int
    hidden: int
    experts: int
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Name in the table."""
        return (f"{self.rows} x {self.width} rows, {self.experts} experts of {self.hidden}, "
                f"{self.dtype}")  # fmt: skip


CPU_CASES = (
    Case(4096, 512, 1408, 8),
    Case(4096, 512, 1408, 32),
    Case(1024, 256, 704, 8),
    Case(4096, 512, 1408, 8, "bfloat16"),
)
GPU_CASES = (
    Case(16384, 2048, 5632, 8, "bfloat16"),
    Case(32768, 2048, 768, 64, "bfloat16"),
)
Tensor = jax.Array | torch.Tensor
Product = Callable[[Tensor, Tensor], Tensor]


def one_product(matmul: Product, silu: Callable, x: Tensor, weights: list) -> Tensor:
    """Multiply rows with the first matrix of their expert."""
    return matmul(x, weights[0])


def expert(matmul: Product, silu: Callable, x: Tensor, weights: list) -> Tensor:
    """Compute the feed-forward of an expert: down(silu(gate(x)) · up(x))."""
    gate, up, down = weights
    return matmul(silu(matmul(x, gate)) * matmul(x, up), down)


@functools.lru_cache(1)
def inputs(case: Case) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Return rows, weights of all experts, and the number of rows of each expert."""
    rng = np.random.default_rng(0)
    up, down = (case.hidden, case.width), (case.width, case.hidden)
    weights = [0.05 * rng.standard_normal((case.experts, *s), np.float32) for s in (up, up, down)]
    sizes = rng.multinomial(case.rows, np.full(case.experts, 1 / case.experts))
    return rng.standard_normal((case.rows, case.width), np.float32), weights, sizes


def in_jax(case: Case, layer: Callable, *, is_dense: bool) -> Callable[[], Any]:
    """Compile forward and backward; a dense product only uses the first expert."""
    rows, arrays, of_each = inputs(case)
    x, sizes = jnp.asarray(rows, case.dtype), jnp.asarray(of_each, jnp.int32)
    weights = [jnp.asarray(w[0] if is_dense else w, case.dtype) for w in arrays]
    backend = backend_of(case)

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("mi,oi->mo", x, w) if is_dense else grouped_matmul(x, w, sizes, backend)

    def loss(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        return jnp.sum(layer(matmul, jax.nn.silu, x, weights).astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weights).compile()
    return lambda: jax.block_until_ready(compiled(x, weights))


def backend_of(case: Case) -> str:
    """Return the choice of `model.moe_backend = "auto"` on this device."""
    device, widths = jax.devices()[0], (case.width, case.hidden)
    at = ProductRequirements(device.platform, jnp.dtype(case.dtype), widths, gpu_capability(device))
    return choose_grouped("auto", at)


def in_torch(case: Case, layer: Callable, *, at_once: bool) -> Callable[[], Any]:
    """Return forward and backward in a loop over experts, or with `grouped_mm` (GPUs only)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, arrays, sizes = inputs(case)
    options = {"dtype": getattr(torch, case.dtype), "device": device, "requires_grad": True}
    x = torch.tensor(rows, **options)
    weights = [torch.tensor(w, **options) for w in arrays]
    ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=device)

    def one_by_one() -> torch.Tensor:
        outputs = [
            layer(lambda x, w: x @ w.T, F.silu, part, [w[i] for w in weights])
            for i, part in enumerate(x.split(sizes.tolist()))
        ]
        return torch.cat(outputs)

    def grouped() -> torch.Tensor:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)

        return layer(product, F.silu, x, weights)

    def run() -> None:
        y = grouped() if at_once else one_by_one()
        y.float().square().sum().backward()
        for tensor in (x, *weights):
            tensor.grad = None
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def fastest(runs: list[Callable[[], Any]], rounds: int) -> list[tuple[float, float]]:
    """Return the wall and CPU milliseconds of each; the first round is warm-up."""
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
    """Yield rows of jaxforge against both peers."""
    for name, layer in (("product", one_product), ("expert", expert)):
        runs = {
            "ours": in_jax(case, layer, is_dense=False),
            "dense": in_jax(case, layer, is_dense=True),
            "torch, in a loop": in_torch(case, layer, at_once=False),
        }
        units = ["ms", "ms of all cores"]
        if jax.default_backend() == "gpu":
            units.pop()
            if hasattr(torch, "_grouped_mm"):
                runs["torch, grouped_mm"] = in_torch(case, layer, at_once=True)
        ours, *peers = fastest([*runs.values()], rounds)
        for peer, theirs in zip(list(runs)[1:], peers, strict=True):
            for unit, mine, other in zip(units, ours, theirs, strict=False):
                yield results.Row(f"{name}, {case.name}", round(mine, 1), peer, round(other, 1),
                                  unit, smaller_is_better=True)  # fmt: skip


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    quick = args.quick
    results.leave_room()
    host_memory.keep_freed_memory()  # as a run does
    every = GPU_CASES if jax.default_backend() == "gpu" else CPU_CASES
    cases = [case for case in every if args.cases in case.name][: 1 if quick else None]
    rows = [row for case in cases for row in rows_of(case, rounds=5 if quick else 15)]
    products = ", ".join(sorted({backend_of(case) for case in cases}))
    notes = [f"forward and backward; ours is {products}; {torch.get_num_threads()} threads"]
    results.report("grouped", rows, ("jax", "jaxlib", "torch"), notes=notes, write=not quick)


if __name__ == "__main__":
    main()
