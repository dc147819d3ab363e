"""Batched decoding with decoding states of the layers, such as a key/value cache, on any mesh.

A batch is [rows, length]. Prompts of different lengths are padded on the right to a power of two
(16, 32, 64 ...), so that few programs are compiled. Rows are split over the data axes and heads
over `tp`, in the cache as well. The draws of a row depend only on the seed and the prompt's number,
not on the other prompts of its batch.

Columns of the cache for a prompt of 3 tokens in a bucket of 8 (p prompt, x padding, g generated):

    after the prompt    p p p x x x x x . . .    the mask ends at the query's own position, so
    after turn 1        p p p g x x x x . . .    no real token sees x; generated token t is
    after turn 2        p p p g g x x x . . .    written to column lengths + t
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Key

from jaxforge.config.model import LAYERS
from jaxforge.errors import UserError
from jaxforge.model.layer import Cache
from jaxforge.model.sampling import Sampling, sample
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.parallel.sharding import constrain

_SHORTEST = 16  # length that shorter prompts are padded to
TURNS = 16  # turns between two checks of whether a batch has finished
_NO_EOS = -1  # equals no token id


class Completion(NamedTuple):
    """Continuation of a prompt.

    Attributes:
        tokens: ids, without the end-of-text.
        finish_reason: "stop" at end-of-text, "length" at the limit of tokens.
    """

    tokens: list[int]
    finish_reason: str


class Decoding(NamedTuple):
    """State of a batch that is being decoded.

    Attributes:
        cache: decoding states of the layers, such as keys and values.
        keys: random key of each row.
        lengths: number of tokens of each prompt.
        tokens: generated tokens; columns from `turn` on are still 0.
        turn: number of columns of `tokens` that are filled.
        ended: rows that have drawn an end-of-text id; their later tokens are meaningless.
    """

    cache: Cache
    keys: Key[Array, "b"]
    lengths: Int[Array, "b"]
    tokens: Int[Array, "b n"]
    turn: Int[Array, ""]
    ended: Bool[Array, "b"]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decoder of batches of prompts.

    Attributes:
        model: the model.
        params: parameters of the model.
        max_tokens: tokens to generate for each prompt, at least 1.
        sampling: settings of the draws.
        eos_ids: ids that end a row; if empty, rows end only at `max_tokens`.
        seed: seed of the draws.
        mesh: mesh of the parameters, which is also the current mesh; None: no mesh.
        rows: minimum number of rows; smaller batches are padded, so that one program serves all.
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
        """Continue prompts 0, 1, 2 ..., one token per turn.

        Yields:
            The next token of each prompt; None for prompts that have ended.
        """
        batch = self._start(prompts, range(len(prompts)))
        for turn in range(self.max_tokens):
            if turn:
                batch = self._advance(batch, turn + 1)
            tokens, ended = jax.device_get((batch.tokens[:, turn], batch.ended))
            of_prompts = zip(tokens, ended, range(len(prompts)), strict=False)  # without padding
            yield [None if end else int(token) for token, end, _ in of_prompts]
            if ended.all():
                return

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        is_enough: Callable[[list[int]], bool] | None = None,
    ) -> list[Completion]:
        """Complete one batch of prompts in a single loop on the device.

        Args:
            prompts: token ids, at least one each.
            numbers: number of each prompt among all prompts, which determines its draws.
            is_enough: returns whether a completion needs no more tokens. The batch then ends soon
                after all rows have enough; the host checks every few turns.
        """
        batch, turn = self._start(prompts, numbers), 1
        # Reading the state makes the host wait for the device. So it checks every `TURNS` turns,
        # and only if `is_enough` may end the batch early: the device's loop stops by itself when
        # all rows have drawn end-of-text.
        while True:
            turn = min(turn + TURNS, self.max_tokens) if is_enough else self.max_tokens
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
        """Return the batch with the first token of each row; rows without a prompt have ended."""
        rows = padded_rows(max(self.rows, len(prompts)), self.mesh)
        longest = max(map(len, prompts))
        length = padded_length(longest, self.model.config.max_seq_len, self.mesh)
        padded = np.zeros((rows, length), np.int32)
        lengths, all_numbers = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        check_ids(padded, self.model.config.vocab_size)
        all_numbers[: len(prompts)] = numbers
        # Rows without a prompt keep shapes static. They count as ended, so that they do not delay
        # the end of the batch.
        is_empty = np.arange(rows) >= len(prompts)
        return _start(
            self.model, self.sampling, self.max_tokens, self._weights,
            padded, lengths, self._seed_words, all_numbers, is_empty, self._eos,
        )  # fmt: skip

    def _advance(self, batch: Decoding, until: int) -> Decoding:
        return _advance(self.model, self.sampling, self._weights, batch, np.int32(until), self._eos)

    @cached_property
    def _weights(self) -> Params:
        """Return the parameters in the form in which each token reads them."""
        return _unstacked(self.model, self.params) if self.model.runtime.unstacks else self.params

    @property
    def _eos(self) -> Int[np.ndarray, "e"]:
        return np.asarray(list(self.eos_ids) or [_NO_EOS], np.int32)

    @cached_property
    def _seed_words(self) -> np.ndarray:
        """Return the key of `seed` as host data, which is equal on all processes."""
        return np.asarray(jax.random.key_data(jax.random.key(self.seed)))


def check_ids(ids: Int[np.ndarray, "b s"], vocab_size: int) -> None:
    """Check that the model has all tokens, because a gather of others returns arbitrary values.

    Raises:
        UserError: a token is outside the vocabulary.
    """
    if ids.max(initial=0) >= vocab_size:
        raise UserError(
            f"the tokenizer encodes a text with token {ids.max()}, and the model has only "
            f"{vocab_size} tokens"
        )


_unstacked = jax.jit(Model.unstacked, static_argnums=0)


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
    """Run the prompts through the model and draw the first tokens."""
    rows, length = prompts.shape
    key_of_number = jax.vmap(partial(jax.random.fold_in, jax.random.wrap_key_data(seed_words)))
    # Keys of padding are in the cache, but generated tokens overwrite them before a query's own
    # position, where its mask ends, reaches them.
    positions = jnp.broadcast_to(jnp.arange(length), prompts.shape)
    # Prompts attend to a cache of their own length, which then gets room for the new tokens.
    cache: Cache = model.empty_cache(rows, length)
    if isinstance(params.get(LAYERS), list):
        cache = model.unstacked_cache(cache)
    is_padding = (positions >= lengths[:, None]) | ended[:, None]
    logits, cache = model.extend(
        params, prompts, positions, model.split_cache(cache), only=lengths - 1,
        is_padding=is_padding,
    )  # fmt: skip
    cache = model.extend_cache(cache, max_tokens)
    tokens = jnp.zeros((rows, max_tokens), jnp.int32)
    batch = Decoding(cache, key_of_number(numbers), lengths, tokens, jnp.int32(0), ended)
    return _readable(_draw(model, batch, logits, cache, sampling, eos))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _advance(
    model: Model,
    sampling: Sampling,
    params: Params,
    batch: Decoding,
    until: Int[Array, ""],
    eos: Int[Array, "e"],
) -> Decoding:
    """Decode up to turn `until`, or until every row has ended."""

    def decode_turn(batch: Decoding) -> Decoding:
        # The newest token is in column `turn - 1`. Its keys go to the cache at its position. Rows
        # that have ended stay in the batch (static shapes), but are routed to no expert.
        latest = jax.lax.dynamic_slice_in_dim(batch.tokens, batch.turn - 1, 1, axis=1)
        at = batch.lengths[:, None] + batch.turn - 1
        is_padding = batch.ended[:, None]
        logits, cache = model.extend(params, latest, at, batch.cache, is_padding=is_padding)
        return _draw(model, batch, logits, cache, sampling, eos)

    def is_unfinished(batch: Decoding) -> Array:
        return (batch.turn < until) & ~batch.ended.all()

    return _readable(jax.lax.while_loop(is_unfinished, decode_turn, batch))


def lower_decoding(
    model: Model, params: Params, rows: int, length: int, max_tokens: int
) -> jax.stages.Lowered:
    """Lower the loop over tokens of a greedy `Decoder`, without arrays.

    Args:
        model: the model.
        params: shapes and shardings of the parameters on the current mesh.
        rows: number of sequences.
        length: tokens of each prompt.
        max_tokens: tokens to generate.
    """
    sampling, ids = Sampling(temperature=0.0), partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    start = _start.lower(
        model, sampling, max_tokens, params, ids((rows, length)), ids((rows,)),
        jax.ShapeDtypeStruct((2,), jnp.uint32), ids((rows,)),
        jax.ShapeDtypeStruct((rows,), jnp.bool), ids((1,)),
    )  # fmt: skip
    batch = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        start.out_info,
        start.compile().output_shardings,
    )
    return _advance.lower(model, sampling, params, batch, ids(()), ids((1,)))


def _draw(
    model: Model, batch: Decoding, logits: Array, cache: Cache, sampling: Sampling, eos: Array
) -> Decoding:
    """Return the batch with the next token of each row."""
    # A key per (seed, prompt number, turn): the draw does not depend on batch or mesh.
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(batch.keys, batch.turn)
    drawn = sample(constrain(logits[:, 0], "batch", None), sampling, keys).astype(jnp.int32)
    tokens = jax.lax.dynamic_update_slice_in_dim(batch.tokens, drawn[:, None], batch.turn, axis=1)
    ended = batch.ended | (drawn[:, None] == eos).any(axis=1)
    return batch._replace(
        cache=model.split_cache(cache), tokens=tokens, turn=batch.turn + 1, ended=ended
    )


def _readable(batch: Decoding) -> Decoding:
    """Replicate what the host reads, so that every process can read it."""
    tokens, ended = constrain(batch.tokens, None, None), constrain(batch.ended, None)
    return batch._replace(tokens=tokens, ended=ended)


def padded_rows(rows: int, mesh: Mesh | None) -> int:
    """Return the number of rows rounded up to a multiple of the data-parallel groups."""
    return _round_up(rows, data_parallel_size(mesh) if mesh else 1)


def padded_batch(n: int, most: int, mesh: Mesh | None) -> int:
    """Return the batch size for n sequences: the next power of two, limited to `most`."""
    return padded_rows(min(most, 1 << max(0, n - 1).bit_length()), mesh)


def padded_length(length: int, most: int, mesh: Mesh | None) -> int:
    """Return the next power of two, limited to `most` if `length` allows it.

    Sequences are split over `cp` and `tp`, so the result is a multiple of both together.
    """
    shares = mesh.shape["cp"] * mesh.shape["tp"] if mesh else 1
    bucket = max(_SHORTEST, 1 << (length - 1).bit_length())
    return _round_up(max(length, min(bucket, most)), shares)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
