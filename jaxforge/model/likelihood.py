"""Likelihood of continuations, batched, on any mesh.

A batch is [rows, length] as in `decoding`, padded to a length out of a few. Logits are made where
something is scored, and nowhere else. Continuations that differ in their last token alone, such as
the letters of a multiple choice, share a row.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxforge.model.decoding import padded_batch, padded_length
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel.sharding import constrain, size_per_device

_LAST = 8  # last tokens that are looked up in a row
_SHORT = 16  # tokens before the last that most continuations have at most
_LOGITS = 1 << 25  # of a device at a time: 128 MiB


class Continuation(NamedTuple):
    """Tokens to score, and those before them; at least one each."""

    context: Sequence[int]
    tokens: Sequence[int]


class Likelihood(NamedTuple):
    """Likelihood that a model assigns to a continuation.

    Attributes:
        log_probability: of all its tokens, in nats.
        is_greedy: whether each of them is the likeliest one.
    """

    log_probability: float
    is_greedy: bool


class _Row(NamedTuple):
    """Input sequence, number of scored tokens at its end, and the indices of their continuations.

    Attributes:
        inputs: all but the last token.
        scored: tokens at the end of `inputs` that are scored.
        last: tokens that may follow.
        numbers: for each of these, the continuations that end with it.
    """

    inputs: tuple[int, ...]
    scored: int
    last: list[int]
    numbers: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scores continuations.

    Attributes:
        model: the model.
        params: its parameters.
        max_length: tokens that the model reads at most; of longer contexts, the last are read.
        mesh: where the parameters lie, set by `jax.set_mesh` too; None: no mesh.
        rows: sequences at a time, at most.
    """

    model: Model
    params: Params
    max_length: int
    mesh: Mesh | None = None
    rows: int = 32

    def score(self, continuations: Sequence[Continuation]) -> list[Likelihood]:
        """The likelihood of each, in their order."""
        scores: dict[int, Likelihood] = {}
        rows = _rows(continuations, self.max_length)
        size = padded_batch(len(rows), self.rows, self.mesh)
        for batch in _batches(rows, size):
            log_p, is_greedy = self._score(batch, size)
            for i, row in enumerate(batch):
                for j, numbers in enumerate(row.numbers):
                    said = Likelihood(float(log_p[i, j]), bool(is_greedy[i, j]))
                    scores |= dict.fromkeys(numbers, said)
        return [scores[number] for number in range(len(continuations))]

    def _score(self, batch: Sequence[_Row], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability of each row's continuations [rows, _LAST], and whether greedy."""
        longest = max(len(row.inputs) for row in batch)
        length = padded_length(longest, self.max_length, self.mesh)
        most = max(row.scored for row in batch)
        width = 0 if most == 0 else _SHORT if most <= _SHORT <= length else length
        inputs, last = np.zeros((rows, length), np.int32), np.zeros((rows, _LAST), np.int32)
        lengths, scored = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        for i, row in enumerate(batch):
            inputs[i, : len(row.inputs)], last[i, : len(row.last)] = row.inputs, row.last
            lengths[i], scored[i] = len(row.inputs), row.scored
        said = _score(self.model, width, self.params, inputs, lengths, scored, last)
        return jax.device_get(said)


def _rows(continuations: Sequence[Continuation], max_length: int) -> list[_Row]:
    """Return the sequences to read; continuations with the same context share one."""
    ends: dict[tuple[tuple[int, ...], int], dict[int, list[int]]]
    ends = defaultdict(lambda: defaultdict(list))
    for number, (context, tokens) in enumerate(continuations):
        assert context, "the first token would be scored with nothing before it"
        assert 0 < len(tokens) <= max_length, "it must fit into what the model reads"
        *read, last = [*context, *tokens][-max_length - 1 :]
        ends[tuple(read), len(tokens) - 1][last].append(number)
    rows = []
    for (inputs, scored), by_last in ends.items():
        for first in range(0, len(by_last), _LAST):
            part = list(by_last.items())[first : first + _LAST]
            rows.append(_Row(inputs, scored, [t for t, _ in part], [n for _, n in part]))
    return rows


def _batches(rows: list[_Row], size: int) -> Iterator[list[_Row]]:
    """Rows of similar length together, the longest first: what does not fit fails at once."""
    order = sorted(rows, key=lambda row: (row.scored > _SHORT, len(row.inputs)), reverse=True)
    yield from (order[i : i + size] for i in range(0, len(order), size))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(
    model: Model,
    width: int,
    params: Params,
    inputs: Int[Array, "b s"],
    lengths: Int[Array, "b"],
    scored: Int[Array, "b"],
    last: Int[Array, "b k"],
) -> tuple[Float[Array, "b k"], Bool[Array, "b k"]]:
    """Log-probabilities (float32) and greediness, of the `scored` last inputs and one token more.

    Args:
        model: the model.
        width: `scored` at most.
        params: its parameters.
        inputs: sequences, filled up on the right.
        lengths: of each.
        scored: how many of its last tokens are scored.
        last: tokens that may come after it.
    """
    is_padding = jnp.arange(inputs.shape[1]) >= lengths[:, None]
    batch = {"input_ids": constrain(inputs, "batch", None), "is_padding": is_padding}
    hidden_BSD = model.forward(params, batch, lengths=lengths[:, None])[0]
    # Right-aligned: the place before the last one of each row is in the last column.
    positions = lengths[:, None] - 1 - width + jnp.arange(width + 1)
    hidden_BWD = jnp.take_along_axis(hidden_BSD, jnp.maximum(positions, 0)[..., None], axis=1)
    logits_BV = _whole(model.logits(params, hidden_BWD[:, -1:])[:, 0])
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), last, axis=1)
    is_greedy = jnp.argmax(logits_BV, axis=-1)[:, None] == last
    if width:
        labels = jnp.take_along_axis(inputs, jnp.maximum(positions[:, 1:], 0), axis=1)
        counts = jnp.arange(width) >= width - scored[:, None]
        before, all_greedy = _before(model, params, hidden_BWD[:, :-1], labels, counts)
        log_p, is_greedy = log_p + before[:, None], is_greedy & all_greedy[:, None]
    return constrain(log_p, None, None), constrain(is_greedy, None, None)


def _before(
    model: Model,
    params: Params,
    hidden_BWD: Float[Array, "b w d"],
    labels: Int[Array, "b w"],
    counts: Bool[Array, "b w"],
) -> tuple[Float[Array, "b"], Bool[Array, "b"]]:
    """Sums over the labels that count, a few of each row's at a time."""

    def of_piece(part: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, labels = part
        logits = _whole(model.logits(params, hidden))
        log_p = jax.nn.log_softmax(logits)
        at_label = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
        return at_label, jnp.argmax(logits, axis=-1) == labels

    rows, width = labels.shape
    n = _n_parts(size_per_device(rows, "batch"), width, model.config.vocab_size)

    def cut(x: Array) -> Array:
        return x.reshape(rows, n, width // n, *x.shape[2:]).swapaxes(0, 1)

    parts = jax.lax.map(of_piece, (cut(hidden_BWD), cut(labels)))
    log_p, is_greedy = (x.swapaxes(0, 1).reshape(rows, width) for x in parts)
    return jnp.sum(jnp.where(counts, log_p, 0.0), 1), jnp.all(is_greedy | ~counts, axis=1)


def _n_parts(rows: int, width: int, vocab: int) -> int:
    """Into how many parts of equal width a device's labels are cut."""
    least = -(-rows * width * vocab // _LOGITS)
    return next(n for n in range(min(least, width), width + 1) if width % n == 0)


def _whole(logits: Float[Array, "b *rest v"]) -> Float[Array, "b *rest v"]:
    """Rows over the data axes, their vocabulary on one device."""
    return constrain(logits, "batch", *(None,) * (logits.ndim - 1))
