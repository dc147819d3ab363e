"""Documents of a batch: their positions, losses and outlier scores."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxforge.data.packing import IGNORE
from jaxforge.model.transformer import Model, Params
from jaxforge.step.context import spread_sequences
from jaxforge.step.update_loss import Batch

_LOGITS = 1 << 24  # elements that are computed at once
_WINDOW = 32  # tokens of the range with the largest loss
_HALF = 0.6745  # half of a normal distribution is within this number of standard deviations


class Document(NamedTuple):
    """Tokens of a document in a row of a batch.

    Attributes:
        row: row of the batch, counted over the microbatches.
        start: position of the first token in the row.
        end: position after the last token.
        tokens: number of tokens with loss.
        loss: mean -log p over the tokens with loss, in nats.
        worst: range of tokens in the row with the largest mean loss.
        worst_loss: mean loss of that range.
    """

    row: int
    start: int
    end: int
    tokens: int
    loss: float
    worst: tuple[int, int]
    worst_loss: float


def token_loss_function(
    model: Model, mesh: Mesh
) -> Callable[[Params, Batch], Float[np.ndarray, "m b s"]]:
    """Return a function that computes -log p(label) of every token, 0 for ignored labels.

    Args:
        model: the model.
        mesh: mesh of the parameters (`TrainState.variables`) and of the batches.
    """

    def of_chunk(chunk: tuple[Array, Array], params: Params) -> Float[Array, "b s"]:
        hidden, labels = chunk
        logits = model.logits(params, hidden)
        at = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(labels == IGNORE, 0.0, jax.nn.logsumexp(logits, axis=-1) - at)

    def of_microbatch(params: Params, microbatch: Batch) -> Float[Array, "b s"]:
        hidden, labels = model.forward(params, microbatch)[0], microbatch["labels"]
        # Sequences are split into n equal parts, so that logits have at most `_LOGITS` elements.
        rows, length = labels.shape
        least = -(-rows * length * model.config.vocab_size // _LOGITS)
        n = next(n for n in range(min(least, length), length + 1) if length % n == 0)
        split = [
            x.reshape(x.shape[0], n, -1, *x.shape[2:]).swapaxes(0, 1) for x in (hidden, labels)
        ]
        losses = jax.lax.map(functools.partial(of_chunk, params=params), tuple(split))
        return losses.swapaxes(0, 1).reshape(labels.shape)

    def run(params: Params, batch: Batch) -> tuple[Array, Array]:
        length = batch["labels"].shape[-1]
        position = jnp.broadcast_to(jnp.arange(length), batch["labels"].shape)
        batch = spread_sequences(model, {**batch, "position": position})  # may reorder tokens
        positions = batch.pop("position")
        return jax.lax.map(functools.partial(of_microbatch, params), batch), positions

    compiled = jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def in_order(params: Params, batch: Batch) -> Float[np.ndarray, "m b s"]:
        losses, positions = jax.device_get(compiled(params, batch))
        ordered = np.zeros_like(losses)
        np.put_along_axis(ordered, positions, losses, axis=-1)
        return ordered

    return in_order


def find_documents(
    batch: Mapping[str, np.ndarray], losses: Float[np.ndarray, "m b s"], eos: int | None
) -> list[Document]:
    """Return the documents of a host batch that have tokens with loss, in order.

    Packed rows are split by their segments, other rows after each `eos`. A row without either is a
    single document.
    """
    rows = {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items() if x.ndim == losses.ndim}
    nats = losses.reshape(-1, losses.shape[-1])
    documents = []
    for row, tokens in enumerate(rows["input_ids"]):
        segments = rows["segment_ids"][row] if "segment_ids" in rows else None
        counts = rows["labels"][row] != IGNORE
        for start, end in _ranges(tokens, segments, eos):
            if counts[start:end].any():
                documents.append(_document(row, start, end, nats[row], counts))
    return documents


def token_spread(documents: Sequence[Document], losses: Float[np.ndarray, "m b s"]) -> float:
    """Return the standard deviation of token losses about the mean of their document."""
    nats = losses.reshape(-1, losses.shape[-1])
    squares = [
        np.square(nats[document.row, document.start : document.end]).sum() for document in documents
    ]
    means, tokens = (
        np.array([getattr(document, x) for document in documents]) for x in ("loss", "tokens")
    )
    about = squares - tokens * means**2
    finite = np.isfinite(about)
    return float(np.sqrt(about[finite].sum() / max(1, tokens[finite].sum())))


def outlier_scores(
    losses: Sequence[float],
    tokens: Sequence[int],
    *,
    spread: float | None = None,
    before: Sequence[tuple[float, int]] = (),
) -> Float[np.ndarray, "n"]:
    """Return how much each document of a batch stands out by its loss.

    The result is the standard score (x - median) / √(τ² + σ²/tokens) of the mean loss, at least 0.
    σ²/tokens is the variance of a mean over the document's tokens. τ is the remaining spread
    between documents, estimated such that half of all scores lie within the central half of a
    normal distribution. The result is inf if the loss is not finite.

    Args:
        losses: mean loss of each document.
        tokens: number of tokens of each document.
        spread: σ, the standard deviation of a token's loss in its document; by default the median
            loss.
        before: losses and tokens of documents of other batches, which improve the estimates of
            median and τ.
    """
    loss, n = np.array(losses), np.maximum(tokens, 1)
    known = np.array([*zip(loss, n, strict=True), *before], float).reshape(-1, 2)
    with np.errstate(all="ignore"):
        median = np.nanmedian(known[:, 0])
        sigma = 1.0 if spread is None else spread / median
        tau = _spread_of_documents(known[:, 0] / median, known[:, 1], sigma)
        scores = (loss / median - 1) / np.sqrt(tau**2 + sigma**2 / n)
    return np.where(np.isfinite(loss), np.fmax(scores, 0), np.inf)


def _spread_of_documents(
    relative: Float[np.ndarray, "n"], tokens: Float[np.ndarray, "n"], sigma: float
) -> float:
    """Return τ of values whose median is 1."""
    excess = np.square((relative - 1) / _HALF) - sigma**2 / tokens
    return float(np.sqrt(max(0.0, np.nanmedian(excess))))


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
    in_document, counted = nats[start:end], counts[start:end]
    width = min(_WINDOW, end - start)
    sums, numbers = (
        np.convolve(x, np.ones(width), "valid") for x in (in_document * counted, counted)
    )
    means = np.where(numbers > 0, sums / np.maximum(numbers, 1), -np.inf)
    at = int(np.argmax(np.where(np.isnan(means), np.inf, means)))
    n = int(counted.sum())
    worst = start + at, start + at + width
    return Document(row, start, end, n, float(in_document[counted].mean()), worst, float(means[at]))
