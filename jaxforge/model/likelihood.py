"""Batched likelihood of continuations, on any mesh.

A batch is [rows, length], padded as in `decoding`. Logits are computed only for positions that are
scored. Continuations that differ only in their last token, such as the letters of a multiple-choice
question, share a row.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxforge.model.decoding import check_ids, padded_batch, padded_length
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel.sharding import constrain, size_per_device

_LAST = 8  # last tokens scored per row
_SHORT = 16  # scored tokens before the last that cover most continuations
LOGITS = 1 << 25  # logits of a device at a time: 128 MiB


class Continuation(NamedTuple):
    """Tokens to score and their context; at least one token each."""

    context: Sequence[int]
    tokens: Sequence[int]


class Likelihood(NamedTuple):
    """Likelihood that a model assigns to a continuation.

    Attributes:
        log_probability: sum over the tokens of the continuation, in nats.
        is_greedy: whether every token is the likeliest one.
    """

    log_probability: float
    is_greedy: bool


class _Row(NamedTuple):
    """Input sequence, number of scored tokens at its end, and the indices of their continuations.

    Attributes:
        inputs: all tokens but the last.
        scored: number of tokens at the end of `inputs` that are scored.
        last: last tokens of the continuations.
        numbers: indices of the continuations that end with each of `last`.
    """

    inputs: tuple[int, ...]
    scored: int
    last: list[int]
    numbers: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Scorer of continuations.

    Attributes:
        model: the model.
        params: parameters of the model.
        max_length: maximum number of input tokens; longer contexts are cut at their start.
        mesh: mesh of the parameters, which is also the current mesh; None: no mesh.
        rows: maximum number of sequences of a batch.
        before_batch: called before each batch; may raise an exception to stop.
        least_rows: minimum number of sequences of a batch, for several calls with one program.
    """

    model: Model
    params: Params
    max_length: int
    mesh: Mesh | None = None
    rows: int = 32
    before_batch: Callable[[], object] = lambda: None
    least_rows: int = 1

    def score(self, continuations: Sequence[Continuation]) -> list[Likelihood]:
        """Return the likelihood of each continuation, in order."""
        scores: dict[int, Likelihood] = {}
        rows = input_rows(continuations, self.max_length)
        size = padded_batch(max(len(rows), self.least_rows), self.rows, self.mesh)
        for batch in _batches(rows, size):
            self.before_batch()
            log_p, is_greedy = self._score(batch, size)
            for i, row in enumerate(batch):
                for j, numbers in enumerate(row.numbers):
                    likelihood = Likelihood(float(log_p[i, j]), bool(is_greedy[i, j]))
                    scores |= dict.fromkeys(numbers, likelihood)
        return [scores[number] for number in range(len(continuations))]

    def _score(self, batch: Sequence[_Row], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return log-probability and greediness of the rows' continuations, [rows, _LAST]."""
        longest = max(len(row.inputs) for row in batch)
        length = padded_length(longest, self.max_length, self.mesh)
        most = max(row.scored for row in batch)
        width = 0 if most == 0 else _SHORT if most <= _SHORT <= length else length
        inputs, last = np.zeros((rows, length), np.int32), np.zeros((rows, _LAST), np.int32)
        lengths, scored = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        for i, row in enumerate(batch):
            inputs[i, : len(row.inputs)], last[i, : len(row.last)] = row.inputs, row.last
            lengths[i], scored[i] = len(row.inputs), row.scored
        for ids in (inputs, last):
            check_ids(ids, self.model.config.vocab_size)
        arrays = inputs, lengths, scored, last
        return jax.device_get(_score(self.model, width, self.params, *arrays))


def input_rows(continuations: Sequence[Continuation], max_length: int) -> list[_Row]:
    """Return the input sequences; continuations that differ only in their last token share one."""
    ends: dict[tuple[tuple[int, ...], int], dict[int, list[int]]]
    ends = defaultdict(lambda: defaultdict(list))
    for number, (context, tokens) in enumerate(continuations):
        assert context, "the context is empty: the first token cannot be scored"
        assert 0 < len(tokens) <= max_length, "the continuation is empty or exceeds max_length"
        *inputs, last = [*context, *tokens][-max_length - 1 :]
        ends[tuple(inputs), len(tokens) - 1][last].append(number)
    rows = []
    for (row_inputs, scored), by_last in ends.items():
        for first in range(0, len(by_last), _LAST):
            part = list(by_last.items())[first : first + _LAST]
            rows.append(_Row(row_inputs, scored, [t for t, _ in part], [n for _, n in part]))
    return rows


def _batches(rows: list[_Row], size: int) -> Iterator[list[_Row]]:
    """Yield batches of rows of similar length, longest first, so that memory runs out at once."""
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
    """Return log-probabilities (float32) and greediness of the last `scored` inputs and `last`.

    Args:
        model: the model.
        width: maximum of `scored`.
        params: parameters of the model.
        inputs: sequences, padded on the right.
        lengths: number of tokens of each sequence.
        scored: number of scored tokens at the end of each sequence.
        last: tokens after each sequence, each scored on its own.
    """
    is_padding = jnp.arange(inputs.shape[1]) >= lengths[:, None]
    batch = {"input_ids": constrain(inputs, "batch", None), "is_padding": is_padding}
    hidden_BSD = model.forward(params, batch, lengths=lengths[:, None])[0]
    # Right-aligned: the last input of each row is in the last column, and predicts `last`.
    positions = lengths[:, None] - 1 - width + jnp.arange(width + 1)
    hidden_BWD = jnp.take_along_axis(hidden_BSD, jnp.maximum(positions, 0)[..., None], axis=1)
    logits_BV = _gather_vocab(model.logits(params, hidden_BWD[:, -1:])[:, 0])
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), last, axis=1)
    is_greedy = jnp.argmax(logits_BV, axis=-1)[:, None] == last
    if width:
        labels = jnp.take_along_axis(inputs, jnp.maximum(positions[:, 1:], 0), axis=1)
        counts = jnp.arange(width) >= width - scored[:, None]
        before, all_greedy = _score_labels(model, params, hidden_BWD[:, :-1], labels, counts)
        log_p, is_greedy = log_p + before[:, None], is_greedy & all_greedy[:, None]
    return constrain(log_p, None, None), constrain(is_greedy, None, None)


def _score_labels(
    model: Model,
    params: Params,
    hidden_BWD: Float[Array, "b w d"],
    labels: Int[Array, "b w"],
    counts: Bool[Array, "b w"],
) -> tuple[Float[Array, "b"], Bool[Array, "b"]]:
    """Return the sums over the labels that count, in parts that limit the size of the logits."""

    def score_part(part: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, labels = part
        logits = _gather_vocab(model.logits(params, hidden))
        log_p = jax.nn.log_softmax(logits)
        at_label = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
        return at_label, jnp.argmax(logits, axis=-1) == labels

    rows, width = labels.shape
    # The least number of parts of equal width whose logits fit, per device.
    n_logits = size_per_device(rows, "batch") * width * model.config.vocab_size
    least = min(-(-n_logits // LOGITS), width)
    n = next(n for n in range(least, width + 1) if width % n == 0)

    def cut(x: Array) -> Array:
        return x.reshape(rows, n, width // n, *x.shape[2:]).swapaxes(0, 1)

    parts = jax.lax.map(score_part, (cut(hidden_BWD), cut(labels)))
    log_p, is_greedy = (x.swapaxes(0, 1).reshape(rows, width) for x in parts)
    return jnp.sum(jnp.where(counts, log_p, 0.0), 1), jnp.all(is_greedy | ~counts, axis=1)


def _gather_vocab(logits: Float[Array, "b *rest v"]) -> Float[Array, "b *rest v"]:
    """Gather the vocabulary; rows stay split over the data axes."""
    return constrain(logits, "batch", *(None,) * (logits.ndim - 1))
