"""Account of a step: a replay, compared with the log and with neighbouring steps."""

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
"""Fields of metrics.jsonl that a replayed step is compared with."""


@dataclasses.dataclass(frozen=True)
class RepeatedStep:
    """A replayed step.

    Attributes:
        step: number of the step, from 1.
        loss: loss of the update.
        grad_norm: gradient norm before clipping.
        applied: True if the guard accepted the update.
        logged: loss and gradient norm that the run logged; None if it logged none.
    """

    step: int
    loss: float
    grad_norm: float
    applied: bool
    logged: tuple[float, float] | None

    @property
    def difference(self) -> float | None:
        """Larger relative difference from the logged values; 0 if bit-identical, None if none."""
        if self.logged is None:
            return None
        return max(map(_relative, (self.loss, self.grad_norm), self.logged))

    @property
    def comparison(self) -> str:
        """Comparison with the log in words."""
        if self.difference is None:
            return "not logged"
        return f"{self.difference:.1e} apart" if self.difference else "the same"

    def as_json(self) -> dict[str, Any]:
        """Return the step with its difference as plain values."""
        return dataclasses.asdict(self) | {"difference": self.difference}


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A document of the step, and its influence.

    Attributes:
        document: position and loss of the document.
        name: name of its sequence in the dataset.
        text: beginning of the document; empty without a tokenizer.
        worst_text: text of the range with the largest loss.
        influence: influence on the gradient; None if it was not measured.
    """

    document: Document
    name: str
    text: str
    worst_text: str
    influence: Influence | None


@dataclasses.dataclass(frozen=True)
class Account:
    """Account of a step.

    Attributes:
        step: the replayed step.
        suspects: its documents, by decreasing `documents.outlier_scores`.
        without_first: loss and gradient norm of the step without the first suspect.
        norms: norms by layer, for this step and its neighbours, by step.
        odd: (part, norm, ratio to the median of the neighbours), the largest deviations first.
    """

    step: RepeatedStep
    suspects: list[Suspect]
    without_first: tuple[float, float] | None
    norms: dict[int, LayerNorms]
    odd: list[tuple[str, str, float]]


def replayed(
    run: Path, first: int, last: int, overrides: Sequence[str] = ()
) -> Iterator[RepeatedStep]:
    """Replay steps of a run, each with its own config, and yield them one by one."""
    logged = logged_steps(run)
    for begin, end in run_directory.steps_by_start(run, first, last):
        with open_past(run, end, overrides) as past:
            walk = past.walk(begin)
            while walk.progress.step < end:
                yield _repeated_step(walk.advance(), logged)


def account(past: PastRun, step: int, *, around: int, rows: int) -> Account:
    """Replay a step and analyse its documents and layers.

    Args:
        past: the run.
        step: number of the step, from 1.
        around: number of steps before and after to compare with, as far as they have the same
            config. Layers are compared with both, losses of documents with steps before.
        rows: number of rows of the batch whose documents are measured separately.
    """
    reader, before = _Reader(past), list[Document]()
    logged, collecting = logged_steps(past.run), past.step_function(("grads", *NORMS))
    activations = jax.jit(lambda params, batch: activation_norms(past.model, params, batch))
    walk, norms = past.walk(max(past.start + 1, step - around)), {}
    last = min(step + around, past.config.train.max_steps)
    replayed_step, suspects, without_first = None, [], None
    while walk.progress.step < last:
        number = walk.progress.step + 1
        metrics = walk.measure(collecting)
        norms[number] = layer_norms(metrics, activations(walk.state.variables, walk.batch))
        if number == step:
            influences = Influences(past, walk, metrics["grads"])
            suspects = reader.suspects(walk, influences, before, rows)
            without_first = influences.without([suspects[0].document]) if suspects else None
        elif number < step:
            before += reader.documents(walk)[0]
        del metrics  # gradients are as large as parameters
        result = _repeated_step(walk.advance(), logged)
        replayed_step = result if number == step else replayed_step
    assert replayed_step is not None
    others = [norm for number, norm in norms.items() if number != step]
    odd = rank_deviations(norms[step], others) if others else []
    return Account(replayed_step, suspects, without_first, norms, odd)


def rank_documents(
    documents: Sequence[Document],
    losses: Float[np.ndarray, "m b s"],
    row_influences: Sequence[Influence],
    influence_of: Callable[[Document], Influence],
    *,
    before: Sequence[Document] = (),
    rows: int,
) -> list[tuple[Document, Influence | None]]:
    """Return the documents of a batch by decreasing `documents.outlier_scores`.

    Measuring every document would take too long. Whole rows are measured first. Then the documents
    of the `rows` rows with the highest scores are measured, by the score of the row or of a
    document's loss.

    Args:
        documents: all documents of the batch.
        losses: losses of the tokens.
        row_influences: influence of each row.
        influence_of: measures the influence of a document.
        before: documents of other batches, to compare losses with.
        rows: number of rows whose documents are measured.
    """
    known = [(document.loss, document.tokens) for document in before]
    scores_of = functools.partial(outlier_scores, spread=token_spread(documents, losses))
    tokens = [document.tokens for document in documents]
    means = [document.loss for document in documents]
    row_of, n = [document.row for document in documents], len(row_influences)
    nats = np.bincount(row_of, np.multiply(means, tokens), n)
    counts = np.bincount(row_of, tokens, n)
    row_losses = (nats / np.maximum(counts, 1)).tolist(), counts.astype(int).tolist()
    row_scores = scores_of(*row_losses, [influence.norm for influence in row_influences])
    by_loss = scores_of(means, tokens, [math.nan] * len(documents), before=known)
    np.maximum.at(row_scores, row_of, by_loss)
    selected = set(np.argsort(-row_scores)[:rows].tolist())
    full_row = 0, losses.shape[-1]

    def measured(document: Document) -> Influence | None:
        if (document.start, document.end) == full_row:
            return row_influences[document.row]
        return influence_of(document) if document.row in selected else None

    influences = [measured(document) for document in documents]
    norms = [influence.norm if influence else math.nan for influence in influences]
    scores = scores_of(means, tokens, norms, before=known)
    return [(documents[i], influences[i]) for i in np.argsort(-scores, kind="stable")]


class _Reader:
    """Reader of a batch's documents and their losses."""

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
        """Return all documents in the order of `rank_documents`."""
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
    """Return loss and gradient norm of every logged step; of repeated steps, the latest."""
    return {
        int(values["step"]): (_number(values["train/loss"]), _number(values["train/grad_norm"]))
        for values in logged_values(run)
    }


def logged_values(run: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl with loss and gradient norm; log damaged lines."""
    lines, messages = read_lines(run / "metrics.jsonl", LOGGED)
    for message in messages:
        log.warning("%s", printable(message))
    return [values for values in lines if LOGGED.keys() <= values.keys()]


def _number(logged: float | None) -> float:
    return math.nan if logged is None else logged


def _relative(value: float, logged: float) -> float:
    if value == logged or (math.isnan(value) and math.isnan(logged)):
        return 0.0
    return abs(value - logged) / abs(logged) if logged else math.inf


def as_json(result: Account) -> dict[str, Any]:
    """Return an account as plain values; numbers that are not finite become null."""
    return _finite(
        {
            "step": result.step.as_json(),
            "documents": [_document_json(suspect) for suspect in result.suspects],
            "without_the_first": result.without_first,
            "norms": {
                step: {
                    "parts": norms.parts,
                    **{name: x.tolist() for name, x in norms.norms.items()},
                }
                for step, norms in result.norms.items()
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
