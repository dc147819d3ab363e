"""The documents of a batch: where they are, what their loss is, what they say."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxforge.data.packing import IGNORE
from jaxforge.model.transformer import Model, Params
from jaxforge.step.context import spread_sequences
from jaxforge.step.gradients import Batch

_LOGITS = 1 << 24  # at a time
_WINDOW = 32  # tokens of the range whose loss is largest


class Document(NamedTuple):
    """A run of tokens that belong together, in one row of a batch.

    Attributes:
        row: counted over the microbatches.
        start: its first token in the row.
        end: after its last one.
        tokens: how many of them are learned from.
        loss: mean -log p over those, in nats.
        worst: the range of its tokens, in the row, whose mean loss is largest.
        worst_loss: that mean.
    """

    row: int
    start: int
    end: int
    tokens: int
    loss: float
    worst: tuple[int, int]
    worst_loss: float


def token_losses(
    model: Model, params: Params, batch: Batch, mesh: Mesh
) -> Float[np.ndarray, "m b s"]:
    """-log p(label) of every token, 0 where it is not learned from.

    Args:
        model: the model.
        params: with what is not trained (`TrainState.variables`).
        batch: on the mesh.
        mesh: where both lie.
    """

    def of_chunk(chunk: tuple[Array, Array], params: Params) -> Float[Array, "b s"]:
        hidden, labels = chunk
        logits = model.logits(params, hidden)
        at = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(labels == IGNORE, 0.0, jax.nn.logsumexp(logits, axis=-1) - at)

    def of_microbatch(params: Params, microbatch: Batch) -> Float[Array, "b s"]:
        hidden, labels = model.forward(params, microbatch)[0], microbatch["labels"]
        n = _chunks(labels.shape, model.config.vocab_size)
        split = [
            x.reshape(x.shape[0], n, -1, *x.shape[2:]).swapaxes(0, 1) for x in (hidden, labels)
        ]
        losses = jax.lax.map(functools.partial(of_chunk, params=params), tuple(split))
        return losses.swapaxes(0, 1).reshape(labels.shape)

    def run(params: Params, batch: Batch) -> tuple[Array, Array]:
        length = batch["labels"].shape[-1]
        place = jnp.broadcast_to(jnp.arange(length), batch["labels"].shape)
        batch = spread_sequences(model, {**batch, "place": place})  # which may change their order
        places = batch.pop("place")
        return jax.lax.map(functools.partial(of_microbatch, params), batch), places

    whole = NamedSharding(mesh, PartitionSpec())
    losses, places = jax.device_get(jax.jit(run, out_shardings=whole)(params, batch))
    in_order = np.zeros_like(losses)
    np.put_along_axis(in_order, places, losses, axis=-1)
    return in_order


def _chunks(shape: tuple[int, ...], vocab: int) -> int:
    """Into how many parts of equal length sequences are cut for their logits."""
    rows, length = shape
    least = -(-rows * length * vocab // _LOGITS)
    return next(n for n in range(min(least, length), length + 1) if length % n == 0)


def find_documents(
    batch: Mapping[str, np.ndarray], losses: Float[np.ndarray, "m b s"], eos: int | None
) -> list[Document]:
    """The documents of a batch on the host that are learned from, in order.

    They are told apart by their segments where rows are packed, else by the token that ends one; a
    row without any is one document.
    """
    rows = {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items() if x.ndim == losses.ndim}
    nats = losses.reshape(-1, losses.shape[-1])
    found = []
    for row, tokens in enumerate(rows["input_ids"]):
        segments = rows["segment_ids"][row] if "segment_ids" in rows else None
        counts = rows["labels"][row] != IGNORE
        for start, end in _ranges(tokens, segments, eos):
            if counts[start:end].any():
                found.append(_document(row, start, end, nats[row], counts))
    return found


def oddness(
    losses: Sequence[float], tokens: Sequence[int], norms: Sequence[float]
) -> Float[np.ndarray, "n"]:
    """How much parts of a batch stand out from the others, by loss or by gradient.

    √(a² + b²) of two robust standard scores, (x - median) / (1.4826 · median |x - median|), as far
    as they are above 0: of the mean loss, and of the gradient's norm by token, NaN where it is not
    known. Both times √tokens, as a mean of few tokens strays further. What is not finite stands out
    most.

    Args:
        losses: mean of each part.
        tokens: of each.
        norms: of the gradient of each one's sum.
    """
    loss, norm = np.array(losses), np.array(norms)
    with np.errstate(invalid="ignore"):
        each = loss, norm / np.maximum(tokens, 1)
        scores = np.hypot(*(np.fmax(_standard(x, np.sqrt(tokens)), 0) for x in each))
    return np.where(np.isfinite(loss) & ~np.isinf(norm), scores, np.inf)


def _standard(x: Float[np.ndarray, "n"], weight: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    if np.isnan(x).all():
        return x
    away = (x - np.nanmedian(x)) * weight
    away -= np.nanmedian(away)
    spread = 1.4826 * np.nanmedian(np.abs(away)) or np.nanmax(np.abs(away)) or 1.0
    return away / spread


def _ranges(
    tokens: Int[np.ndarray, "s"], segments: Int[np.ndarray, "s"] | None, eos: int | None
) -> Iterator[tuple[int, int]]:
    if segments is not None:
        begins = np.flatnonzero(np.diff(segments)) + 1
    else:
        begins = np.flatnonzero(tokens[:-1] == eos) + 1 if eos is not None else np.array([], int)
    edges = [0, *begins.tolist(), len(tokens)]
    return itertools.pairwise(edges)


def _document(
    row: int, start: int, end: int, nats: Float[np.ndarray, "s"], counts: Bool[np.ndarray, "s"]
) -> Document:
    own, counted = nats[start:end], counts[start:end]
    width = min(_WINDOW, end - start)
    sums, numbers = (np.convolve(x, np.ones(width), "valid") for x in (own * counted, counted))
    means = np.where(numbers > 0, sums / np.maximum(numbers, 1), -np.inf)
    at = int(np.argmax(np.where(np.isnan(means), np.inf, means)))
    n = int(counted.sum())
    worst = start + at, start + at + width
    return Document(row, start, end, n, float(own[counted].mean()), worst, float(means[at]))
