"""Loss over held-out sets: token-weighted, the same batches every time, on any mesh.

Per set and, where sets have names, over all of them together:

    loss           nats per valid token
    perplexity     exp(min(loss, 20)), as in KempnerForge
    bits_per_byte  nats of all valid tokens / ln 2 / bytes of text that these tokens stand for:
                   compares models whatever their tokenizers. End-of-text and special tokens have
                   no bytes; predicting them costs nats all the same.
"""

import collections
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxforge.aux_outputs import AuxOutputs
from jaxforge.config.job import JobConfig
from jaxforge.config.train import CROSS_ENTROPIES, TrainConfig
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.dataset import Dataset
from jaxforge.data.loader import eval_batches
from jaxforge.data.packing import IGNORE
from jaxforge.data.tokens import TokenFiles
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model, Params, join
from jaxforge.step.context import spread_sequences
from jaxforge.step.cross_entropy import cross_entropy, tiles_of
from jaxforge.step.gradients import Batch, update_loss_weights
from jaxforge.step.losses import build_loss

log = logging.getLogger(__name__)

_MAX_EXPONENT = 20.0


class BatchSums(NamedTuple):
    """Sums over the valid tokens of a batch, on the device; of terms, their mean."""

    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    n_bytes: Int[Array, ""]
    terms: Mapping[str, Float[Array, ""]] = {}


class SetSums(NamedTuple):
    """Sums over the valid tokens of evaluation sets.

    Attributes:
        nats: Σ -log p(label).
        tokens: how many.
        n_bytes: bytes of text that they stand for; None where that is not known.
        batches: how many batches they are of.
        terms: of a loss of one's own, and those that layers tell, by name: Σ tokens · mean.
    """

    nats: float = 0.0
    tokens: int = 0
    n_bytes: int | None = 0
    batches: int = 0
    terms: Mapping[str, float] = {}

    def metrics(self) -> dict[str, float]:
        """`loss`, `perplexity`, where bytes are known `bits_per_byte`, and terms by their names.

        NaN without tokens.
        """
        loss = self.nats / self.tokens if self.tokens else math.nan
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, _MAX_EXPONENT))}
        if self.n_bytes is not None:
            bits = self.nats / math.log(2)
            metrics["bits_per_byte"] = bits / self.n_bytes if self.n_bytes else math.nan
        for name, total in self.terms.items():
            metrics[name] = total / self.tokens if self.tokens else math.nan
        return metrics


_NOTHING = SetSums()

EvalStep = Callable[[Params, Batch, Int[Array, "v"]], BatchSums]


def make_eval_step(model: Model, config: TrainConfig, mesh: Mesh) -> EvalStep:
    """The jitted `(params, batch [1, batch, seq], bytes of each token) -> sums`."""
    own_loss = None if config.loss_fn in CROSS_ENTROPIES else build_loss(config, model)

    def eval_step(params: Params, batch: Batch, byte_lengths: Int[Array, "v"]) -> BatchSums:
        batch = spread_sequences(model, batch)
        loss_weights = update_loss_weights(batch, config)
        loss_weights = loss_weights._replace(token=loss_weights.token[0])
        microbatch = jax.tree.map(lambda leaf: leaf[0], batch)
        labels, head = microbatch["labels"], model.head(params)
        hidden, out = model.forward(params, microbatch, loss_weights)
        tiles = tiles_of(config, labels, head, model)
        loss = cross_entropy(hidden, head, labels, tiles)
        is_valid = labels != IGNORE
        lengths = jnp.where(is_valid, byte_lengths[jnp.where(is_valid, labels, 0)], 0)
        own = own_loss(params, hidden, microbatch, loss_weights) if own_loss else AuxOutputs()
        return BatchSums(
            loss.total, loss.weight, jnp.sum(lengths), own.with_layer_losses(out.aux).loss_terms
        )

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(eval_step, out_shardings=everywhere)


class Evaluator:
    """Evaluates parameters on named sets, with one compiled step.

    Args:
        config: sizes of a batch come from `[train]`.
        mesh: the mesh that parameters lie on.
        model: the model.
        datasets: sets by name; "" is the name of a single one.
        tokenizer: the one that made their tokens; None where there is none.
    """

    def __init__(
        self,
        config: JobConfig,
        mesh: Mesh,
        model: Model,
        datasets: Mapping[str, Dataset],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._config, self._mesh, self._datasets = config, mesh, datasets
        self._step = make_eval_step(model, config.train, mesh)
        self._abstract = join(model.abstract, model.state.abstract)
        lengths = None if tokenizer is None else tokenizer.byte_lengths()
        self._byte_lengths = _table(lengths, config.model.vocab_size, mesh)
        self._has_bytes = {
            name: lengths is not None and _is_made_by(tokenizer, dataset, name)
            for name, dataset in datasets.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The sets."""
        return tuple(self._datasets)

    def __call__(self, params: Params, steps: int | None = None) -> dict[str, SetSums]:
        """Sums of each set over its first `steps` batches, or the whole of it."""
        return {name: self.evaluate(params, name, steps)[0] for name in self._datasets}

    def check_reports(self, metric: str, key: str = "checkpoint.best_metric") -> None:
        """Raises UserError if `metric`, the config's `key`, is one that these sets cannot give."""
        known = self._reports({})
        if metric in known:
            return
        if metric.endswith("bits_per_byte"):
            raise UserError(
                f'{key} = "{metric}": the bytes of these tokens are not known without the '
                "byte-level tokenizer that made them: set data.tokenizer_path, or use one of "
                f"{', '.join(known)}"
            )
        if metric not in (known := self._reports(self._terms())):
            raise UserError(f'{key} = "{metric}": evaluation gives {", ".join(known)}')

    def _reports(self, terms: Mapping[str, object]) -> dict[str, float]:
        zeros = dict.fromkeys(terms, 0.0)
        return summary(
            {
                name: SetSums(n_bytes=0 if known else None, terms=zeros)
                for name, known in self._has_bytes.items()
            }
        )

    def _terms(self) -> Mapping[str, object]:
        """Return the abstract terms of the loss and of layers; nothing is computed."""
        batch = next(eval_batches(self._config, self._mesh, next(iter(self._datasets.values()))))
        sums = jax.eval_shape(self._step, self._abstract, batch, self._byte_lengths)
        return sums.terms

    def evaluate(
        self,
        params: Params,
        name: str,
        steps: int | None,
        begun: SetSums = _NOTHING,
        stop: Callable[[], object] = lambda: False,
    ) -> tuple[SetSums, bool]:
        """Sums of one set.

        Args:
            params: the parameters.
            name: the set.
            steps: how many of its batches; None for all.
            begun: the sums of the batches that were evaluated before.
            stop: asked after each batch whether to stop there.

        Returns:
            The sums, and whether they are those of all the batches.
        """
        batches = eval_batches(self._config, self._mesh, self._datasets[name])
        sums: list[BatchSums] = []
        stopped = False
        for batch in itertools.islice(batches, begun.batches, steps):
            if stopped := bool(stop()):
                break
            sums.append(self._step(params, batch, self._byte_lengths))
            jax.block_until_ready(sums[-2:][0])  # or all batches would pile up on the devices
        return _add_up(begun, sums, has_bytes=self._has_bytes[name]), not stopped


def summary(sets: Mapping[str, SetSums]) -> dict[str, float]:
    """Metrics as they are logged: `eval/loss` over all sets, `eval/<name>/loss` of each."""
    return dict(_summary(sets))


def merge_sums(sets: Iterable[SetSums]) -> SetSums:
    """The sums of several sets: every token counts alike."""
    nats, tokens, n_bytes, batches, terms = zip(*sets, strict=True)
    known = [count for count in n_bytes if count is not None]
    all_bytes = sum(known) if len(known) == len(n_bytes) else None
    return SetSums(sum(nats), sum(tokens), all_bytes, sum(batches), _sum_terms(terms))


def _sum_terms(terms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for of_one in terms:
        total.update(of_one)
    return dict(total)


def _summary(sets: Mapping[str, SetSums]) -> Iterator[tuple[str, float]]:
    for key, value in merge_sums(sets.values()).metrics().items():
        yield f"eval/{key}", value
    for name, sums in sets.items():
        for key, value in sums.metrics().items() if name else ():
            yield f"eval/{name}/{key}", value


def _add_up(begun: SetSums, batches: list[BatchSums], *, has_bytes: bool) -> SetSums:
    """Adds batch by batch in float64, so that it does not matter where an evaluation was stopped.

    Float32 would lose tokens.
    """
    nats, tokens, n_bytes, terms = begun.nats, begun.tokens, begun.n_bytes or 0, begun.terms
    for batch in jax.device_get(batches):
        nats += float(batch.nats)
        tokens += int(batch.tokens)
        n_bytes += int(batch.n_bytes)
        of_batch = {name: float(batch.tokens * term) for name, term in batch.terms.items()}
        terms = _sum_terms([terms, of_batch])
    count = begun.batches + len(batches)
    return SetSums(nats, tokens, n_bytes if has_bytes else None, count, terms)


def _table(lengths: Int[np.ndarray, "n"] | None, vocab_size: int, mesh: Mesh) -> Int[Array, "v"]:
    """Bytes of each token of the model, on every device; ids without a token have none."""
    table = np.zeros(vocab_size, np.int32)
    if lengths is not None:
        table[: len(lengths)] = lengths[:vocab_size]
    return jax.device_put(table, NamedSharding(mesh, PartitionSpec()))


def _is_made_by(tokenizer: Tokenizer | None, dataset: Dataset, name: str) -> bool:
    """Return whether the set's manifest, if any, names this tokenizer."""
    manifest = dataset.source.manifest if isinstance(dataset.source, TokenFiles) else None
    if tokenizer is None or manifest is None:
        return tokenizer is not None
    if manifest.tokenizer_sha256 == tokenizer.fingerprint:
        if manifest.bos_ids != tokenizer.prefix and not manifest.conversations:
            log.warning(
                "documents of evaluation set %s do not begin with BOS, which this run's tokenizer "
                "adds: losses differ from those of text prepared today; prepare it again",
                name or "[eval]",
            )
        return True
    log.warning(
        "evaluation set %s was tokenized with %s, not with this run's tokenizer: no bits per byte",
        name or "[eval]", manifest.tokenizer,
    )  # fmt: skip
    return False
