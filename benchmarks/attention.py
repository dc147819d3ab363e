"""Speed of all attention kernels of the device: short and long, packed or not, windowed or not.

    python benchmarks/attention.py [--quick] [--cases WORDS]

Forward and backward passes are timed in float32 on CPUs and in bfloat16 elsewhere. Kernels
alternate, and the fastest round counts. The kernel that `auto` selects is compared with all other
kernels of jaxforge and with PyTorch: `scaled_dot_product_attention` and, on a GPU,
`flex_attention`, which also skips blocks. Kernels that materialize the scores are left out if the
scores would be too large.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import results
from kernels import fastest

from jaxforge.config.model import ModelConfig
from jaxforge.kernels.attention_backends import BACKENDS, KernelRequirements, choose_backend
from jaxforge.model.runtime import gpu_capability
from jaxforge.parallel import host_memory

_DOCUMENTS = 8  # of a packed row, on average
_MOST_SCORES = 1 << 30  # elements


class Shape(NamedTuple):
    """Shape of one sequence: tokens, heads, key heads and head width."""

    tokens: int
    heads: int
    kv: int
    width: int


class Case(NamedTuple):
    """Case of attention."""

    shape: Shape
    packed: bool
    window: int | None

    @property
    def name(self) -> str:
        """Name in the table."""
        tokens, heads, kv, width = self.shape
        parts = [f"{tokens} tokens, {heads} heads of {width} over {kv}"]
        parts += ["packed"] if self.packed else []
        parts += [f"window {self.window}"] if self.window else []
        return ", ".join(parts)

    @property
    def documents(self) -> np.ndarray | None:
        """Return the document of each token [1, tokens]."""
        if not self.packed:
            return None
        rng = np.random.default_rng(0)
        ids = rng.integers(0, _DOCUMENTS, (1, self.shape.tokens), dtype=np.int32)
        return np.sort(ids, axis=1)

    def inputs(self) -> list[np.ndarray]:
        """Return queries, keys and values, [1, tokens, heads, width]."""
        rng = np.random.default_rng(1)
        tokens, heads, kv, width = self.shape
        return [rng.standard_normal((1, tokens, n, width), np.float32) for n in (heads, kv, kv)]


SHAPES = {
    "quick": (Shape(128, 4, 2, 32),),
    "cpu": (Shape(512, 8, 2, 64), Shape(2048, 8, 2, 64)),
    "gpu": (*(Shape(n, 32, 8, 128) for n in (2048, 8192, 32_768)), Shape(8192, 8, 4, 256)),
}


def cases(shapes: tuple[Shape, ...]) -> Iterator[Case]:
    """Return all cases; a window is an eighth of the tokens."""
    for shape in shapes:
        for packed in (False, True):
            for window in (None, shape.tokens // 8):
                yield Case(shape, packed, window)


def dtype() -> str:
    """Return the compute dtype of runs on this device."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def kernels_for(case: Case) -> list[str]:
    """Return the `BACKENDS` that support a case here, the choice of `auto` first."""
    device, shape = jax.devices()[0], case.shape
    at = KernelRequirements(
        device.platform, jnp.dtype(dtype()), shape.width, shape.tokens, packed=case.packed,
        capability=gpu_capability(device),
    )  # fmt: skip
    scores = {"reference": shape.heads * shape.tokens**2, "blockwise": shape.tokens**2 * 4}
    able = [
        name
        for name, kernel in BACKENDS.items()
        if kernel.unsupported_reason(at) is None and scores.get(name, 0) <= _MOST_SCORES
    ]
    return list(dict.fromkeys((choose_backend(ModelConfig(), at).name, *able)))


def ours(name: str, case: Case) -> Callable[[], Any]:
    """Compile a kernel with its gradients."""
    attend = functools.partial(BACKENDS[name].attend, window=case.window)
    inputs = [jnp.asarray(x, dtype()) for x in case.inputs()]
    documents = None if case.documents is None else jnp.asarray(case.documents)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
        return jnp.sum(attend(q, k, v, ids).astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2)))
    return lambda: jax.block_until_ready(compiled(*inputs, documents))


def in_torch(case: Case) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's kernels with their gradients on this device; {} if it has none."""
    on_gpu = jax.default_backend() == "gpu"
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if on_gpu and not torch.cuda.is_available():
        return {}
    device = "cuda" if on_gpu else "cpu"
    qkv = [torch.from_numpy(x).transpose(1, 2).to(device, getattr(torch, dtype())).contiguous()
           .requires_grad_() for x in case.inputs()]  # fmt: skip
    documents = None if case.documents is None else torch.from_numpy(case.documents).to(device)

    def sees(_b: Any, _h: Any, query: Any, key: Any) -> Any:  # noqa: ANN401
        seen = query >= key
        if case.window is not None:
            seen = seen & (query - key < case.window)
        return seen if documents is None else seen & (documents[0, query] == documents[0, key])

    def gradients(attend: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            torch.autograd.grad(attend(*qkv).float().square().sum(), qkv)
            if on_gpu:
                torch.cuda.synchronize()

        return run

    runs = {}
    n = case.shape.tokens
    if not case.packed and case.window is None:
        runs["torch sdpa"] = gradients(
            functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        )
    elif n**2 * case.shape.heads <= _MOST_SCORES:
        at = torch.arange(n, device=device)
        mask = sees(None, None, at[:, None], at[None])[None, None]
        runs["torch sdpa, masked"] = gradients(
            functools.partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)
        )
    if on_gpu:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        blocks = create_block_mask(sees, None, None, n, n, device=device)
        flex = torch.compile(flex_attention)
        runs["torch flex"] = gradients(functools.partial(flex, block_mask=blocks, enable_gqa=True))
    return runs


def rows_of(case: Case, rounds: int) -> Iterator[results.Row]:
    """Yield rows that compare the choice of `auto` with all other kernels."""
    chosen, *others = kernels_for(case)
    runs = {name: ours(name, case) for name in (chosen, *others)} | in_torch(case)
    times = [round(ms, 2) for ms in fastest([*runs.values()], rounds)]
    for peer, theirs in zip([*runs][1:], times[1:], strict=True):
        yield results.Row(f"{chosen}: {case.name}", times[0], peer, theirs, "ms",
                          smaller_is_better=True)  # fmt: skip


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    results.leave_room()
    host_memory.keep_freed_memory()  # as a run does
    size = "quick" if args.quick else "cpu" if jax.default_backend() == "cpu" else "gpu"
    result = [row for case in cases(SHAPES[size]) if args.cases in case.name
             for row in rows_of(case, 3 if args.quick else 10)]  # fmt: skip
    results.report("attention", result, ("jax", "jaxlib"), notes=[f"{dtype()}, one sequence"],
                   write=not args.quick)  # fmt: skip


if __name__ == "__main__":
    main()
