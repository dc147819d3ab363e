"""Loss over held-out sets: token-weighted, with the same batches every time, on any mesh.

With `train.ema_decay`, the average of the parameters is evaluated too: its metrics have the prefix
`ema_`. Metrics of each set and, if sets have names, over all sets together:

    loss           nats per valid token
    perplexity     exp(min(loss, 20)), as in KempnerForge
    bits_per_byte  nats of all valid tokens / ln 2 / bytes of the text of these tokens: comparable
                   between tokenizers. End-of-text and special tokens have no bytes, but their
                   nats count.
"""

import collections
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxforge.aux_outputs import AuxOutputs, Mean
from jaxforge.config.eval import AVERAGE_PREFIX, BEST_METRIC, higher_is_better
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
from jaxforge.step.cross_entropy import cross_entropy
from jaxforge.step.logit_tiles import tiles_of
from jaxforge.step.losses import MicrobatchLoss, build_loss
from jaxforge.step.objectives import build_objective
from jaxforge.step.update_loss import Batch, update_loss_weights
from jaxforge.training.eval_functions import add_sums, build_eval_functions, sums_of, value_of
from jaxforge.training.frozen import FrozenFields

log = logging.getLogger(__name__)

_MAX_EXPONENT = 20.0


class BatchSums(NamedTuple):
    """Sums over the valid tokens of a batch, on the device; `terms` are means.

    `functions` are results of evaluation functions by name.
    """

    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    n_bytes: Int[Array, ""]
    terms: Mapping[str, Float[Array, ""]] = {}
    functions: Mapping[str, Array | Mean] = {}


class SetSums(NamedTuple):
    """Sums over the valid tokens of evaluation sets.

    Attributes:
        nats: Σ -log p(label).
        tokens: number of valid tokens.
        n_bytes: bytes of the text of these tokens; None if unknown.
        batches: number of batches.
        terms: loss terms of a registered loss and of layers, by name: Σ tokens · mean.
        functions: results of evaluation functions by name: a sum, or the two sums of a mean.
    """

    nats: float = 0.0
    tokens: int = 0
    n_bytes: int | None = 0
    batches: int = 0
    terms: Mapping[str, float] = {}
    functions: Mapping[str, Sequence[float]] = {}

    def metrics(self) -> dict[str, float]:
        """Return `loss`, `perplexity`, `bits_per_byte` if bytes are known, terms and functions.

        Values are NaN without tokens.
        """
        loss = self.nats / self.tokens if self.tokens else math.nan
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, _MAX_EXPONENT))}
        if self.n_bytes is not None:
            bits = self.nats / math.log(2)
            metrics["bits_per_byte"] = bits / self.n_bytes if self.n_bytes else math.nan
        for name, total in self.terms.items():
            metrics[name] = total / self.tokens if self.tokens else math.nan
        return metrics | {name: value_of(sums) for name, sums in self.functions.items()}


_NOTHING = SetSums()

EvalStep = Callable[[Params, Batch, Int[Array, "v"]], BatchSums]


def make_eval_step(
    model: Model,
    config: TrainConfig,
    mesh: Mesh,
    functions: Sequence[str] = (),
    objective: MicrobatchLoss | None = None,
) -> EvalStep:
    """Return the jitted `(params, batch [1, batch, seq], bytes of each token) -> sums`.

    Args:
        model: the model.
        config: the `[train]` section.
        mesh: the mesh of the parameters.
        functions: names of evaluation functions.
        objective: loss of `train.objective` whose metrics are results like those of evaluation
            functions; batches have its fields.

    Raises:
        UserError: an evaluation function is not registered.
    """
    compute_functions = build_eval_functions(functions, config, model)
    abstract = flatten_dict(join(model.abstract, model.state.abstract))
    custom_loss = None if config.loss_fn in CROSS_ENTROPIES else build_loss(config, model)

    def eval_step(params: Params, batch: Batch, byte_lengths: Int[Array, "v"]) -> BatchSums:
        params = unflatten_dict(  # an average may have another dtype
            {path: p.astype(abstract[path].dtype) for path, p in flatten_dict(params).items()}
        )
        batch = spread_sequences(model, batch)
        loss_weights = update_loss_weights(batch, config)
        # Batches have an axis of microbatches, of length 1 in an evaluation.
        loss_weights = loss_weights._replace(token=loss_weights.token[0])
        microbatch = jax.tree.map(lambda leaf: leaf[0], batch)
        labels = microbatch["labels"]
        hidden, out = model.forward(params, microbatch, loss_weights)
        head = model.head(params)
        loss = cross_entropy(hidden, head, labels, tiles_of(config, labels, head, model))
        is_valid = labels != IGNORE
        # Label -100 must not index the table.
        lengths = jnp.where(is_valid, byte_lengths[jnp.where(is_valid, labels, 0)], 0)
        aux = custom_loss(params, hidden, microbatch, loss_weights) if custom_loss else AuxOutputs()
        terms = aux.with_layer_losses(out.aux).loss_terms
        results = compute_functions(params, hidden, microbatch)
        if objective is not None:
            metrics = objective(params, hidden, microbatch, loss_weights).metrics
            results = {**results, **{k: x for k, x in metrics.items() if isinstance(x, Mean)}}
        return BatchSums(loss.total, loss.weight, jnp.sum(lengths), terms, results)

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(eval_step, out_shardings=everywhere)


class Evaluator:
    """Evaluates parameters on named sets, with one compiled step.

    Args:
        config: `[train]` determines the size of a batch.
        datasets: sets by name; a single set has the name "".
        tokenizer: the tokenizer of the sets, for bits per byte; None without one.
        frozen: adds the fields of `train.objective` to batches; None: only the cross-entropy and
            evaluation functions are computed.
    """

    def __init__(
        self,
        config: JobConfig,
        mesh: Mesh,
        model: Model,
        datasets: Mapping[str, Dataset],
        tokenizer: Tokenizer | None,
        frozen: FrozenFields | None = None,
    ) -> None:
        self._config, self._mesh, self._datasets = config, mesh, datasets
        objective = None if frozen is None else build_objective(config, model)
        self._step = make_eval_step(model, config.train, mesh, config.eval.functions, objective)
        self._frozen = frozen
        self._abstract = join(model.abstract, model.state.abstract)
        lengths = None if tokenizer is None else tokenizer.byte_lengths()
        self._byte_lengths = _byte_table(lengths, config.model.vocab_size, mesh)
        self._has_bytes = {
            name: lengths is not None and _was_made_by(tokenizer, dataset, name)
            for name, dataset in datasets.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sets."""
        return tuple(self._datasets)

    def __call__(self, params: Params, steps: int | None = None) -> dict[str, SetSums]:
        """Evaluate the first `steps` batches of each set, or all batches."""
        return {name: self.evaluate(params, name, steps)[0] for name in self._datasets}

    def direction(self, metric: str, key: str = BEST_METRIC) -> bool | None:
        """Return whether higher values of a metric are better; None if it is unknown.

        Raises:
            UserError: the evaluation does not report the metric.
        """
        known = self._reports()
        if metric in known:
            return higher_is_better(metric)
        if metric.endswith("bits_per_byte"):
            raise UserError(
                f'{key} = "{metric}": the bytes of tokens are unknown without the byte-level '
                "tokenizer of the data. Set data.tokenizer_path, or use one of "
                f"{', '.join(known)}"
            )
        # Shapes of one batch are enough to know the names: nothing is computed.
        batch = next(eval_batches(self._config, self._mesh, next(iter(self._datasets.values()))))
        sums = jax.eval_shape(self._sums, self._abstract, batch)
        if metric in self._reports(sums.terms):  # terms of loss and layers
            return False
        if metric not in (known := self._reports(sums.terms, sums.functions)):
            raise UserError(
                f'{key} = "{metric}": no such metric. Evaluation reports {", ".join(known)}'
            )
        return higher_is_better(metric)

    def _sums(self, params: Params, batch: Batch) -> BatchSums:
        if self._frozen is not None:
            batch = self._frozen(params, batch)
        return self._step(params, batch, self._byte_lengths)

    def _reports(
        self, terms: Iterable[str] = (), functions: Iterable[str] = ()
    ) -> dict[str, float]:
        zeros, results = dict.fromkeys(terms, 0.0), dict.fromkeys(functions, (0.0,))
        sets = {
            name: SetSums(n_bytes=0 if known else None, terms=zeros, functions=results)
            for name, known in self._has_bytes.items()
        }
        has_average = self._config.train.averages_weights
        return summary(sets) | (summary(sets, prefix=AVERAGE_PREFIX) if has_average else {})

    def evaluate(
        self,
        params: Params,
        name: str,
        steps: int | None,
        begun: SetSums = _NOTHING,
        stop: Callable[[], object] = lambda: False,
        note_batch: Callable[[str, int], None] = lambda name, batch: None,
    ) -> tuple[SetSums, bool]:
        """Evaluate one set.

        Args:
            params: the parameters.
            name: name of the set.
            steps: number of batches; None for all.
            begun: sums of the batches that were evaluated before.
            stop: called before each batch; a true result stops the evaluation.
            note_batch: called with set and number of each batch after its launch.

        Returns:
            The sums, and True if they cover all batches.
        """
        batches = eval_batches(self._config, self._mesh, self._datasets[name])
        sums: list[BatchSums] = []
        stopped = False
        for i, batch in enumerate(itertools.islice(batches, begun.batches, steps), begun.batches):
            if stopped := bool(stop()):
                break
            sums.append(self._sums(params, batch))
            note_batch(name, i)
            jax.block_until_ready(sums[-2:][0])  # at most two batches in flight on the devices
        return _add_up(begun, sums, has_bytes=self._has_bytes[name]), not stopped


def summary(
    sets: Mapping[str, SetSums], *, are_all: bool = True, prefix: str = ""
) -> dict[str, float]:
    """Return the logged metrics: `eval/loss` of all sets, `eval/<name>/loss` of each set.

    Args:
        sets: sums by set.
        are_all: False to leave out the metrics of all sets, because some sets were not evaluated.
        prefix: prefix of the names within a set, such as "ema_" in `eval/<name>/ema_loss`.
    """
    # A mean over a part of the sets would not be comparable with earlier steps.
    total = merge_sums(sets.values()).metrics() if are_all else {}
    metrics = {f"eval/{prefix}{key}": value for key, value in total.items()}
    for name, sums in sets.items():
        if name:
            of_set = sums.metrics().items()
            metrics |= {f"eval/{name}/{prefix}{key}": value for key, value in of_set}
    return metrics


def merge_sums(sets: Iterable[SetSums]) -> SetSums:
    """Return the sums over several sets, in which every token has the same weight."""
    nats, tokens, n_bytes, batches, terms, functions = zip(*sets, strict=True)
    known = [count for count in n_bytes if count is not None]
    # One set of unknown bytes makes those of all sets unknown.
    all_bytes = sum(known) if len(known) == len(n_bytes) else None
    results = functools.reduce(_sum_functions, functions)
    return SetSums(sum(nats), sum(tokens), all_bytes, sum(batches), _sum_terms(terms), results)


def _sum_functions(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    names = first.keys() | second.keys()
    return {name: add_sums(first.get(name, ()), second.get(name, ())) for name in sorted(names)}


def _sum_terms(terms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for set_terms in terms:
        total.update(set_terms)
    return dict(total)


def _add_up(begun: SetSums, batches: list[BatchSums], *, has_bytes: bool) -> SetSums:
    """Add the sums of batches on the host.

    Adding one batch at a time in float64 makes the result independent of where an evaluation was
    stopped. In float32, large token counts would be rounded.
    """
    nats, tokens, n_bytes, terms = begun.nats, begun.tokens, begun.n_bytes or 0, begun.terms
    functions = begun.functions
    for batch in jax.device_get(batches):
        nats += float(batch.nats)
        tokens += int(batch.tokens)
        n_bytes += int(batch.n_bytes)
        batch_terms = {name: float(batch.tokens * term) for name, term in batch.terms.items()}
        terms = _sum_terms([terms, batch_terms])
        results = {name: sums_of(value) for name, value in batch.functions.items()}
        functions = _sum_functions(functions, results)
    count = begun.batches + len(batches)
    return SetSums(nats, tokens, n_bytes if has_bytes else None, count, terms, functions)


def _byte_table(
    lengths: Int[np.ndarray, "n"] | None, vocab_size: int, mesh: Mesh
) -> Int[Array, "v"]:
    """Return the bytes of each token id on every device; 0 for ids without a token."""
    # Padded ids of the vocabulary have no text.
    table = np.zeros(vocab_size, np.int32)
    if lengths is not None:
        table[: len(lengths)] = lengths[:vocab_size]
    return jax.device_put(table, NamedSharding(mesh, PartitionSpec()))


def _was_made_by(tokenizer: Tokenizer | None, dataset: Dataset, name: str) -> bool:
    """Return whether the tokenizer made the set, according to the manifest of the set, if any."""
    manifest = dataset.source.manifest if isinstance(dataset.source, TokenFiles) else None
    if tokenizer is None or manifest is None:
        return tokenizer is not None
    # Bytes of another tokenizer's ids would be wrong without notice.
    if manifest.tokenizer_sha256 == tokenizer.fingerprint:
        if manifest.bos_ids != tokenizer.prefix and not manifest.conversations:
            log.warning(
                "documents of evaluation set %s do not start with BOS, which the tokenizer of this "
                "run adds: losses are not comparable with newly prepared text. Prepare it again",
                name or "[eval]",
            )
        return True
    log.warning(
        "evaluation set %s was tokenized with %s, not with the tokenizer of this run: bits per "
        "byte are not reported",
        name or "[eval]", manifest.tokenizer,
    )  # fmt: skip
    return False
