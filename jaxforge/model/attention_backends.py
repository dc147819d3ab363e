"""The kernels behind `model.sdpa_backend`, and which of them can serve whom.

    reference   plain products over the full score matrix, anywhere; judges the others
    blockwise   blocks of queries in plain XLA, anywhere (`blockwise.py`); auto's choice on CPU
    cudnn       cuDNN's flash attention on NVIDIA GPUs, bf16 or fp16
    splash      JAX's flash attention on TPU (`splash.py`)

Each honours causality and packed documents. One that is asked for by name and cannot serve is an
error; `auto` takes the first of its platform's that can, and the run's banner names it.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model import splash
from jaxforge.model.blockwise import blockwise_attention

Queries = Float[Array, "b s heads h"]
Keys = Float[Array, "b t kv h"]
Backend = Callable[[Queries, Keys, Keys, Int[Array, "b s"] | None], Queries]
"""(q, k, v, doc_ids) -> softmax(q kᵀ / √h) v, causal; `doc_ids` keeps packed documents apart."""


def reference_attention(q: Queries, k: Keys, v: Keys, doc_ids: Int[Array, "b s"] | None) -> Queries:
    """Scores and softmax in float32, all S x S of them."""
    return _dot_product(q, k, v, doc_ids, "xla")


def cudnn_attention(q: Queries, k: Keys, v: Keys, doc_ids: Int[Array, "b s"] | None) -> Queries:
    """CuDNN's kernel; packed documents cost it a mask of S x S per sequence."""
    return _dot_product(q, k, v, doc_ids, "cudnn")


def masked_attention(q: Queries, k: Keys, v: Keys, mask: Bool[Array, "b 1 s t"]) -> Queries:
    """The reference for any mask: what decoding with a cache uses."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")


def _dot_product(
    q: Queries,
    k: Keys,
    v: Keys,
    doc_ids: Int[Array, "b s"] | None,
    implementation: Literal["xla", "cudnn"],
) -> Queries:
    same = None if doc_ids is None else (doc_ids[:, :, None] == doc_ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=same, is_causal=True, implementation=implementation
    )


class Situation(NamedTuple):
    """What a kernel is to serve.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        dtype: of queries, keys and values.
        head_size: width of a head.
        seq_len: tokens of a sequence.
    """

    platform: str
    dtype: jnp.dtype
    head_size: int
    seq_len: int


def _nothing_against(at: Situation) -> str | None:
    return None


def _against_cudnn(at: Situation) -> str | None:
    if at.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this run is on {at.platform}"
    if at.dtype not in (jnp.bfloat16, jnp.float16):
        return 'it computes in bf16 or fp16: set train.mixed_precision = "bf16"'
    if at.head_size % 8 or at.head_size > 128:
        return f"its heads are multiples of 8 up to 128 wide, and these are {at.head_size}"
    return None


def _against_splash(at: Situation) -> str | None:
    if at.platform != "tpu":
        return f"it needs a TPU, and this run is on {at.platform}"
    if at.seq_len % splash.SEQUENCE_MULTIPLE:
        return f"train.seq_len = {at.seq_len} is no multiple of {splash.SEQUENCE_MULTIPLE}"
    return None


class Kernel(NamedTuple):
    """A backend.

    Attributes:
        attend: the function.
        against: what speaks against it in a situation; None: nothing.
        says_how_it_varies: whether its types tell over which mesh axes results vary, which
            `shard_map` can then check.
    """

    attend: Backend
    against: Callable[[Situation], str | None]
    says_how_it_varies: bool = True


BACKENDS = {
    "reference": Kernel(reference_attention, _nothing_against),
    "blockwise": Kernel(blockwise_attention, _nothing_against),
    "cudnn": Kernel(cudnn_attention, _against_cudnn),
    "splash": Kernel(splash.splash_attention, _against_splash, says_how_it_varies=False),
}

_FLASH = {"cpu": "blockwise", "gpu": "cudnn", "tpu": "splash"}
_SYNONYMS = {"math": "reference", "efficient": "blockwise"}  # PyTorch's names


def choose(config: ModelConfig, at: Situation) -> str:
    """The name in `BACKENDS` that `model.sdpa_backend` stands for here.

    Raises:
        UserError: the backend asked for cannot serve.
    """
    asked = config.sdpa_backend
    if asked == "auto":
        fast = _FLASH.get(at.platform, "blockwise")
        return "blockwise" if BACKENDS[fast].against(at) else fast
    name = _FLASH.get(at.platform, "blockwise") if asked == "flash" else asked
    name = _SYNONYMS.get(name, name)
    if problem := BACKENDS[name].against(at):
        raise UserError(
            f'model.sdpa_backend = "{asked}" cannot serve here: {problem}; '
            'or set model.sdpa_backend = "auto"'
        )
    return name
