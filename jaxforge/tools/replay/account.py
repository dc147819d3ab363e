"""Account of a step: repeated, and compared with the log and with neighbouring steps."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxforge.errors import printable
from jaxforge.runs import run_directory
from jaxforge.step.train_step import Metrics
from jaxforge.storage.untrusted_json import Field, is_number, is_step, read_lines
from jaxforge.tools.replay.documents import (
    Document,
    find_documents,
    outlier_scores,
    token_loss_function,
    token_spread,
)
from jaxforge.tools.replay.influence import Influence, Influences
from jaxforge.tools.replay.layers import (
    NORMS,
    LayerNorms,
    activation_norms,
    layer_norms,
    rank_deviations,
)
from jaxforge.tools.replay.past import PastRun, Walk, open_past

_SHOWN = 160  # characters of a text

log = logging.getLogger(__name__)

LOGGED = {
    "step": Field(is_step, "the number of a step"),
    "train/loss": Field(lambda loss: loss is None or is_number(loss), "a number", required=False),
    "train/grad_norm": Field(
        lambda norm: norm is None or is_number(norm), "a number", required=False
    ),
}
"""What of a line of metrics.jsonl a step that is made again is compared with."""


@dataclasses.dataclass(frozen=True)
class RepeatedStep:
    """A step made again.

    Attributes:
        step: from 1.
        loss: of the update.
        grad_norm: before clipping.
        applied: whether the guard let it through.
        logged: loss and gradient norm as the run logged them; None where it logged none.
    """

    step: int
    loss: float
    grad_norm: float
    applied: bool
    logged: tuple[float, float] | None

    @property
    def difference(self) -> float | None:
        """The larger of the relative differences from what was logged; 0: the same bits."""
        if self.logged is None:
            return None
        return max(map(_relative, (self.loss, self.grad_norm), self.logged))

    @property
    def comparison(self) -> str:
        """The step compared with its line in the log, in words."""
        if self.difference is None:
            return "not logged"
        return f"{self.difference:.1e} apart" if self.difference else "the same"

    def as_json(self) -> dict[str, Any]:
        """Return the step with its difference as plain values."""
        return dataclasses.asdict(self) | {"difference": self.difference}


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A document of the step, and what it does to it.

    Attributes:
        document: where it is, and its loss.
        name: the sequence of the data that it is in.
        text: how it begins; empty without a tokenizer.
        worst_text: the range of it whose loss is largest.
        influence: on the gradient; None where that was not looked at.
    """

    document: Document
    name: str
    text: str
    worst_text: str
    influence: Influence | None


@dataclasses.dataclass(frozen=True)
class Account:
    """Account of what happened in a step.

    Attributes:
        made: the step.
        suspects: its documents, what stands out most first (`documents.oddness`).
        without_first: loss and gradient norm of the step without the first of them.
        norms: layer by layer, by step: of this one and its neighbours.
        odd: (part, norm, ratio to the median of the neighbours), what differs most first.
    """

    step: RepeatedStep
    suspects: list[Suspect]
    without_first: tuple[float, float] | None
    norms: dict[int, LayerNorms]
    odd: list[tuple[str, str, float]]


def replayed(
    run: Path, first: int, last: int, overrides: Sequence[str] = ()
) -> Iterator[RepeatedStep]:
    """Steps of a run made again, one by one, each with the config that it had."""
    logged = logged_steps(run)
    for begin, end in run_directory.steps_by_start(run, first, last):
        with open_past(run, end, overrides) as past:
            walk = past.walk(begin)
            while walk.progress.step < end:
                yield _repeated_step(walk.advance(), logged)


def account(past: PastRun, step: int, *, around: int, rows: int) -> Account:
    """Makes a step again and looks at it from all sides.

    Args:
        past: the run.
        step: from 1.
        around: how many steps before and after it to compare with, as far as they had its config:
            layers with both, the losses of documents with those before.
        rows: how many rows of the batch to take apart into documents.
    """
    reader, before = _Reader(past), list[Document]()
    logged, looking = logged_steps(past.run), past.step_function(("grads", *NORMS))
    activations = jax.jit(lambda params, batch: activation_norms(past.model, params, batch))
    walk, norms = past.walk(max(past.start + 1, step - around)), {}
    last = min(step + around, past.config.train.max_steps)
    created, suspects, without_first = None, [], None
    while walk.progress.step < last:
        at = walk.progress.step + 1
        metrics = walk.look(looking)
        seen = activations(walk.state.variables, walk.batch)
        norms[at] = layer_norms(metrics, seen)
        if at == step:
            influences = Influences(past, walk, metrics["grads"])
            suspects = reader.suspects(walk, influences, before, rows)
            without_first = influences.without([suspects[0].document]) if suspects else None
        elif at < step:
            before += reader.documents(walk)[0]
        del metrics
        again = _repeated_step(walk.advance(), logged)
        created = again if at == step else created
    assert created is not None
    others = [norm for number, norm in norms.items() if number != step]
    odd = rank_deviations(norms[step], others) if others else []
    return Account(created, suspects, without_first, norms, odd)


def rank_documents(
    documents: Sequence[Document],
    losses: Float[np.ndarray, "m b s"],
    of_rows: Sequence[Influence],
    influence_of: Callable[[Document], Influence],
    *,
    before: Sequence[Document] = (),
    rows: int,
) -> list[tuple[Document, Influence | None]]:
    """The documents of a batch, what stands out most first (`documents.oddness`).

    Args:
        documents: all of them.
        losses: of the tokens.
        of_rows: the influence of each row.
        influence_of: that of a document; asked for those of some rows alone, as it takes long.
        before: documents of other batches, to compare losses with.
        rows: how many those are: the ones that stand out most, whole or by a document.
    """
    known = [(document.loss, document.tokens) for document in before]
    odd_of = functools.partial(outlier_scores, spread=token_spread(documents, losses))
    tokens, means = (
        [document.tokens for document in documents],
        [document.loss for document in documents],
    )
    where, n = [document.row for document in documents], len(of_rows)
    nats = np.bincount(where, np.multiply(means, tokens), n)
    counts = np.bincount(where, tokens, n)
    of_row = (nats / np.maximum(counts, 1)).tolist(), counts.astype(int).tolist()
    odd_rows = odd_of(*of_row, [document.norm for document in of_rows])
    by_loss = odd_of(means, tokens, [math.nan] * len(documents), before=known)
    np.maximum.at(odd_rows, where, by_loss)
    most = set(np.argsort(-odd_rows)[:rows].tolist())
    whole = 0, losses.shape[-1]

    def influence(document: Document) -> Influence | None:
        if (document.start, document.end) == whole:
            return of_rows[document.row]
        return influence_of(document) if document.row in most else None

    result = [influence(document) for document in documents]
    odd = odd_of(
        means,
        tokens,
        [document.norm if document else math.nan for document in result],
        before=known,
    )
    return [(documents[i], result[i]) for i in np.argsort(-odd, kind="stable")]


class _Reader:
    """Takes batches apart into documents with their losses."""

    def __init__(self, past: PastRun) -> None:
        self._tokenizer = run_directory.find_tokenizer(past.run)
        self._losses = token_loss_function(past.model, past.mesh)

    def documents(self, walk: Walk) -> tuple[list[Document], Float[np.ndarray, "m b s"]]:
        """Return the documents of the next batch and the losses of their tokens."""
        losses, eos = self._losses(walk.state.variables, walk.batch), None
        if self._tokenizer is not None:
            eos = self._tokenizer.eos_id
        return find_documents(jax.device_get(walk.batch), losses, eos), losses

    def suspects(
        self, walk: Walk, influences: Influences, before: Sequence[Document], rows: int
    ) -> list[Suspect]:
        """All documents; those of the rows that matter most are taken apart."""
        documents, losses = self.documents(walk)
        batch = jax.device_get(walk.batch["input_ids"])
        tokens = batch.reshape(-1, batch.shape[-1])

        def influence_of(document: Document) -> Influence:
            return influences.of(document.row, document.start, document.end)

        order = rank_documents(
            documents, losses, influences.of_rows(), influence_of, before=before, rows=rows
        )
        return [
            Suspect(
                document,
                walk.name_of(document.row),
                self._text(tokens[document.row, document.start : document.end]),
                self._text(tokens[document.row, slice(*document.worst)]),
                influence,
            )
            for document, influence in order
        ]

    def _text(self, tokens: np.ndarray) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode([int(token) for token in tokens[:_SHOWN]])[:_SHOWN]


def _repeated_step(metrics: Metrics, logged: dict[int, tuple[float, float]]) -> RepeatedStep:
    names = ("step", "loss", "grad_norm", "applied")
    step, loss, grad_norm, applied = jax.device_get([metrics[name] for name in names])
    return RepeatedStep(
        int(step), float(loss), float(grad_norm), bool(applied), logged.get(int(step))
    )


def logged_steps(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every logged step; of one that was made twice, the latest."""
    return {
        int(values["step"]): (_number(values["train/loss"]), _number(values["train/grad_norm"]))
        for values in logged_values(run)
    }


def logged_values(run: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl that have loss and gradient norm; log which are damaged."""
    lines, messages = read_lines(run / "metrics.jsonl", LOGGED)
    for message in messages:
        log.warning("%s", printable(message))
    return [values for values in lines if LOGGED.keys() <= values.keys()]


def _number(logged: float | None) -> float:
    return math.nan if logged is None else logged


def _relative(here: float, there: float) -> float:
    if here == there or (math.isnan(here) and math.isnan(there)):
        return 0.0
    return abs(here - there) / abs(there) if there else math.inf


def as_json(result: Account) -> dict[str, Any]:
    """All of it as plain values; numbers that are not finite become null."""
    return _finite(
        {
            "step": result.step.as_json(),
            "documents": [_document_json(suspect) for suspect in result.suspects],
            "without_the_first": result.without_first,
            "norms": {
                step: {
                    "parts": suspect.parts,
                    **{name: x.tolist() for name, x in suspect.norms.items()},
                }
                for step, suspect in result.norms.items()
            },
            "odd": result.odd,
        }
    )


def _document_json(suspect: Suspect) -> dict[str, Any]:
    influence = suspect.influence._asdict() if suspect.influence else None
    return {
        **suspect.document._asdict(), "name": suspect.name, "text": suspect.text,
        "worst_text": suspect.worst_text, "influence": influence,
    }  # fmt: skip


def _finite(values: Any) -> Any:  # noqa: ANN401
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
