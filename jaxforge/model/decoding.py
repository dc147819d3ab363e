"""Decoding many prompts at once with a cache, on any mesh.

A batch is [rows, length]: prompts of different lengths, each at its own position, padded to a
length out of a few (16, 32, 64 ...) so that few programs are compiled. Rows are split over the data
axes and heads over tp, in the cache too. What a row draws depends on the seed and on the prompt's
number alone, so that it does not feel which others are in its batch.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Key

from jaxforge.config.model import LAYERS
from jaxforge.model.attention import KVCache
from jaxforge.model.sampling import Sampling, sample
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.parallel.sharding import constrain

_SHORTEST = 16  # tokens that the shortest prompts are padded to
_TURNS = 16  # between two looks at whether a batch is finished
_NO_EOS = -1


class Completion(NamedTuple):
    """Continuation of a prompt.

    Attributes:
        tokens: ids, without the end-of-text.
        finish_reason: "stop" at end-of-text, "length" at the limit of tokens.
    """

    tokens: list[int]
    finish_reason: str


class Decoding(NamedTuple):
    """A batch in the course of decoding.

    Attributes:
        cache: keys and values so far.
        keys: what each row draws with.
        lengths: tokens of each prompt.
        tokens: tokens generated; columns from `turn` on are still 0.
        turn: how many columns of `tokens` are filled.
        ended: rows that have met their end-of-text; what they get from then on is void.
    """

    cache: KVCache
    keys: Key[Array, "b"]
    lengths: Int[Array, "b"]
    tokens: Int[Array, "b n"]
    turn: Int[Array, ""]
    ended: Bool[Array, "b"]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Continues prompts.

    Attributes:
        model: the model.
        params: its parameters.
        max_tokens: tokens to add to each prompt, at least one.
        sampling: how tokens are drawn.
        eos_ids: ids that end a row; without any, rows end only by `max_tokens`.
        seed: seed of the draws.
        mesh: where the parameters lie, set by `jax.set_mesh` too; None: no mesh.
        rows: prompts at a time, at least; batches are filled up to it, so that all are of one size.
    """

    model: Model
    params: Params
    max_tokens: int
    sampling: Sampling
    eos_ids: Sequence[int] = ()
    seed: int = 0
    mesh: Mesh | None = None
    rows: int = 1

    def stream(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[int | None]]:
        """Continues prompts 0, 1, 2 ..., a token a turn.

        Yields:
            The next token of each prompt; None for those that have ended.
        """
        batch = self._start(prompts, range(len(prompts)))
        for turn in range(self.max_tokens):
            if turn:
                batch = self._advance(batch, turn + 1)
            tokens, ended = jax.device_get((batch.tokens[:, turn], batch.ended))
            ends = zip(tokens, ended, range(len(prompts)), strict=False)
            yield [None if end else int(token) for token, end, _ in ends]
            if ended.all():
                return

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        is_enough: Callable[[list[int]], bool] | None = None,
    ) -> list[Completion]:
        """Continues one batch to its end, without a word to the host on the way.

        Args:
            prompts: token ids, at least one each.
            numbers: the number of each prompt among all; decides its draws.
            is_enough: whether a completion needs no more tokens. The batch then ends soon after
                all of its rows have enough; the host looks every few turns.
        """
        batch, turn = self._start(prompts, numbers), 1
        while True:
            turn = min(turn + _TURNS, self.max_tokens) if is_enough else self.max_tokens
            batch = self._advance(batch, turn)
            tokens, ended = jax.device_get((batch.tokens, batch.ended))
            completions = [self._completion(row[:turn].tolist()) for row in tokens[: len(prompts)]]
            if turn == self.max_tokens or ended.all():
                return completions
            if is_enough and all(
                completion.finish_reason == "stop" or is_enough(completion.tokens)
                for completion in completions
            ):
                return completions

    def _completion(self, tokens: list[int]) -> Completion:
        end = next((i for i, token in enumerate(tokens) if token in self.eos_ids), None)
        return Completion(tokens, "length") if end is None else Completion(tokens[:end], "stop")

    def _start(self, prompts: Sequence[Sequence[int]], numbers: Sequence[int]) -> Decoding:
        """The batch with the first token of each row; rows without a prompt have ended."""
        rows = padded_rows(max(self.rows, len(prompts)), self.mesh)
        longest = max(map(len, prompts))
        length = padded_length(longest, self.model.config.max_seq_len, self.mesh)
        padded = np.zeros((rows, length), np.int32)
        lengths, all_numbers = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        all_numbers[: len(prompts)] = numbers
        is_empty = np.arange(rows) >= len(prompts)
        return _start(
            self.model, self.sampling, self.max_tokens, self.params,
            padded, lengths, self._seed_words, all_numbers, is_empty, self._eos,
        )  # fmt: skip

    def _advance(self, batch: Decoding, until: int) -> Decoding:
        return _advance(self.model, self.sampling, self.params, batch, np.int32(until), self._eos)

    @property
    def _eos(self) -> Int[np.ndarray, "e"]:
        return np.asarray(list(self.eos_ids) or [_NO_EOS], np.int32)

    @cached_property
    def _seed_words(self) -> np.ndarray:
        """The key of `seed` as the host's words: the same for all processes."""
        return np.asarray(jax.random.key_data(jax.random.key(self.seed)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _start(
    model: Model,
    sampling: Sampling,
    max_tokens: int,
    params: Params,
    prompts: Int[Array, "b s"],
    lengths: Int[Array, "b"],
    seed_words: Array,
    numbers: Int[Array, "b"],
    ended: Bool[Array, "b"],
    eos: Int[Array, "e"],
) -> Decoding:
    """Reads the prompts and draws the first tokens."""
    rows, length = prompts.shape
    numbered = jax.vmap(partial(jax.random.fold_in, jax.random.wrap_key_data(seed_words)))
    # What a short prompt's padding leaves in the cache is overwritten before it can be seen.
    positions = jnp.broadcast_to(jnp.arange(length), prompts.shape)
    cache = _split(model.empty_cache(rows, length + max_tokens))
    is_padding = (positions >= lengths[:, None]) | ended[:, None]
    logits, cache = model.extend(
        params, prompts, positions, cache, only=lengths - 1, is_padding=is_padding
    )
    tokens = jnp.zeros((rows, max_tokens), jnp.int32)
    batch = Decoding(cache, numbered(numbers), lengths, tokens, jnp.int32(0), ended)
    return _readable(_draw(batch, logits, cache, sampling, eos))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _advance(
    model: Model,
    sampling: Sampling,
    params: Params,
    batch: Decoding,
    until: Int[Array, ""],
    eos: Int[Array, "e"],
) -> Decoding:
    """Goes on to turn `until`, or till every row has ended."""

    def turn(batch: Decoding) -> Decoding:
        latest = jax.lax.dynamic_slice_in_dim(batch.tokens, batch.turn - 1, 1, axis=1)
        at = batch.lengths[:, None] + batch.turn - 1
        is_padding = batch.ended[:, None]
        logits, cache = model.extend(params, latest, at, batch.cache, is_padding=is_padding)
        return _draw(batch, logits, cache, sampling, eos)

    return _readable(jax.lax.while_loop(lambda b: (b.turn < until) & ~b.ended.all(), turn, batch))


def _draw(
    batch: Decoding, logits: Array, cache: KVCache, sampling: Sampling, eos: Array
) -> Decoding:
    """The batch a turn later."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, batch.turn)
    drawn = sample(constrain(logits[:, 0], "batch", None), sampling, keys).astype(jnp.int32)
    tokens = jax.lax.dynamic_update_slice_in_dim(batch.tokens, drawn[:, None], batch.turn, axis=1)
    ended = batch.ended | (drawn[:, None] == eos).any(axis=1)
    return batch._replace(cache=_split(cache), tokens=tokens, turn=batch.turn + 1, ended=ended)


def _readable(batch: Decoding) -> Decoding:
    """Replicate what the host reads, so that every process can read it."""
    tokens, ended = constrain(batch.tokens, None, None), constrain(batch.ended, None)
    return batch._replace(tokens=tokens, ended=ended)


def _split(cache: KVCache) -> KVCache:
    """Rows over the data axes, heads over tp; positions and a head's numbers whole."""
    axes = (LAYERS, "batch", None, "kv_heads", None)
    split: Any = jax.tree.map(lambda x: constrain(x, *axes), cache)
    return split


def padded_rows(rows: int, mesh: Mesh | None) -> int:
    """Return the number of rows rounded up to a multiple of the data-parallel groups."""
    return _round_up(rows, data_parallel_size(mesh) if mesh else 1)


def padded_batch(n: int, most: int, mesh: Mesh | None) -> int:
    """Rows of each batch of n things: `most`, or, for fewer, the next power of two."""
    return padded_rows(min(most, 1 << max(0, n - 1).bit_length()), mesh)


def padded_length(length: int, most: int, mesh: Mesh | None) -> int:
    """The next power of two, but no longer than `most` where that is enough."""
    parts = mesh.shape["cp"] * mesh.shape["tp"] if mesh else 1
    bucket = max(_SHORTEST, 1 << (length - 1).bit_length())
    return _round_up(max(length, min(bucket, most)), parts)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
