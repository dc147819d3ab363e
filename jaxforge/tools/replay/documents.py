"""The documents of a batch: where they are, what their loss is, what they say."""

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
from jaxforge.step.gradients import Batch

_LOGITS = 1 << 24  # at a time
_WINDOW = 32  # tokens of the range whose loss is largest
_USUAL = 3.0  # standard scores of norms that tables and lists have
_HALF = 0.6745  # half of a normal distribution is within this many standard deviations


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


def token_loss_function(
    model: Model, mesh: Mesh
) -> Callable[[Params, Batch], Float[np.ndarray, "m b s"]]:
    """Return a function that computes -log p(label) of every token, 0 where it is not learned.

    Args:
        model: the model.
        mesh: where parameters (with what is not trained: `TrainState.variables`) and batches lie.
    """

    def of_chunk(chunk: tuple[Array, Array], params: Params) -> Float[Array, "b s"]:
        hidden, labels = chunk
        logits = model.logits(params, hidden)
        at = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(labels == IGNORE, 0.0, jax.nn.logsumexp(logits, axis=-1) - at)

    def of_microbatch(params: Params, microbatch: Batch) -> Float[Array, "b s"]:
        hidden, labels = model.forward(params, microbatch)[0], microbatch["labels"]
        rows, length = labels.shape  # sequences are cut into equal parts for their logits
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
        batch = spread_sequences(
            model, {**batch, "place": position}
        )  # which may change their order
        positions = batch.pop("place")
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
    """The documents of a batch on the host that are learned from, in order.

    They are told apart by their segments where rows are packed, else by the token that ends one; a
    row without any is one document.
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
    """The standard deviation of a token's loss about the mean of its document, over all of them."""
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
    norms: Sequence[float],
    *,
    spread: float | None = None,
    before: Sequence[tuple[float, int]] = (),
) -> Float[np.ndarray, "n"]:
    """Return how much parts of a batch stand out by loss or gradient.

    The sum of two standard scores: of the mean loss, as far as it is above 0, and of the gradient's
    norm by √tokens (as a sum grows whose terms point anywhere; NaN where it is not known), as far
    as it is above 3: text that repeats itself, whose terms agree, has norms up to there.

    A score is (x - median) / √(τ² + σ²/tokens). σ²/tokens is how far the mean of so few tokens
    strays, τ by how much parts differ otherwise: half of all scores are within those of half of a
    normal distribution. What is not finite stands out most.

    Args:
        losses: mean of each part.
        tokens: of each.
        norms: of the gradient of each one's sum.
        spread: standard deviation of a token's loss in its part; by default the median loss. Norms
            stray as much, relative to their median, and differ otherwise at least as much.
        before: losses and tokens of parts of other batches, without norms: with them
            median and τ of losses are better known.
    """
    loss, norm, n = np.array(losses), np.array(norms), np.maximum(tokens, 1)
    known = np.array([*zip(loss, n, strict=True), *before], float).reshape(-1, 2)
    with np.errstate(all="ignore"):
        middle = np.nanmedian(known[:, 0])
        strays = 1.0 if spread is None else spread / middle
        differ = _differences(known[:, 0] / middle, known[:, 1], strays)
        scores = _scores(loss / middle, n, strays, differ)
        if not np.isnan(norm).all():
            relative = norm / np.sqrt(n)
            relative /= np.nanmedian(relative)
            differ = max(differ, _differences(relative, n, strays))
            scores += np.fmax(_scores(relative, n, strays, differ) - _USUAL, 0)
    return np.where(np.isfinite(loss) & ~np.isinf(norm), scores, np.inf)


def _differences(
    relative: Float[np.ndarray, "n"], tokens: Float[np.ndarray, "n"], strays: float
) -> float:
    """τ of values whose median is 1."""
    besides = np.square((relative - 1) / _HALF) - strays**2 / tokens
    return float(np.sqrt(max(0.0, np.nanmedian(besides))))


def _scores(
    relative: Float[np.ndarray, "n"], tokens: Float[np.ndarray, "n"], strays: float, differ: float
) -> Float[np.ndarray, "n"]:
    return np.fmax((relative - 1) / np.sqrt(differ**2 + strays**2 / tokens), 0)


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
