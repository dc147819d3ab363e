"""Account of a step: a replay, compared with the log and, by layer, with neighbouring steps."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxforge.config.eval import STREAM
from jaxforge.config.model import LAYERS
from jaxforge.errors import printable
from jaxforge.model.layer import Capture
from jaxforge.model.transformer import Model, Params
from jaxforge.runs import run_directory
from jaxforge.step.context import spread_sequences
from jaxforge.step.train_step import Metrics
from jaxforge.step.update_loss import Batch
from jaxforge.storage.untrusted_json import Field, is_number, is_step, read_lines
from jaxforge.telemetry.numbers import finite
from jaxforge.tools.replay.documents import (
    Document,
    find_documents,
    outlier_scores,
    token_loss_function,
    token_spread,
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


NORMS = {
    "grad_norms_per_layer": "gradient",
    "update_norms_per_layer": "update",
    "params_norms_per_layer": "parameters",
}
"""Display names of the metrics that a step collects."""


@dataclasses.dataclass(frozen=True)
class LayerNorms:
    """Norms of the layers in a step.

    Attributes:
        parts: names of the parts: "layers.0", ..., then parts outside of layers.
        norms: norms of all parts, [parts], by kind: L2 norms of "gradient", "update" and
            "parameters", and root mean squares of the points of `STREAM` (NaN outside of layers).
    """

    parts: list[str]
    norms: dict[str, np.ndarray]


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
    """A document of the step.

    Attributes:
        document: position and loss of the document.
        name: name of its sequence in the dataset.
        text: beginning of the document; empty without a tokenizer.
        worst_text: text of the range with the largest loss.
    """

    document: Document
    name: str
    text: str
    worst_text: str


@dataclasses.dataclass(frozen=True)
class Account:
    """Account of a step.

    Attributes:
        step: the replayed step.
        suspects: its documents, by decreasing `documents.outlier_scores`.
        norms: norms by layer, for this step and its neighbours, by step.
        odd: (part, norm, ratio to the median of the neighbours), the largest deviations first.
    """

    step: RepeatedStep
    suspects: list[Suspect]
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


def account(past: PastRun, step: int, *, around: int) -> Account:
    """Replay a step and analyse its documents and layers.

    Args:
        past: the run.
        step: number of the step, from 1.
        around: number of steps before and after to compare with, as far as they have the same
            config. Layers are compared with both, losses of documents with steps before.
    """
    reader, before = _Reader(past), list[Document]()
    logged, collecting = logged_steps(past.run), past.step_function(tuple(NORMS))
    activations = jax.jit(lambda params, batch: activation_norms(past.model, params, batch))
    walk, norms = past.walk(max(past.start + 1, step - around)), {}
    last = min(step + around, past.config.train.max_steps)
    replayed_step, suspects = None, []
    while walk.progress.step < last:
        number = walk.progress.step + 1
        metrics = walk.measure(collecting)
        norms[number] = layer_norms(metrics, activations(walk.state.variables, walk.batch))
        if number == step:
            suspects = reader.suspects(walk, before)
        elif number < step:
            before += reader.documents(walk)[0]
        result = _repeated_step(walk.advance(), logged)
        replayed_step = result if number == step else replayed_step
    assert replayed_step is not None
    neighbours = [norm for number, norm in norms.items() if number != step]
    odd = rank_deviations(norms[step], neighbours) if neighbours else []
    return Account(replayed_step, suspects, norms, odd)


def activation_norms(
    model: Model, params: Params, batch: Batch
) -> dict[str, Float[Array, "layers"]]:
    """Return the root mean square of each layer's activations at the points of `STREAM`."""

    def square(name: str, x: Array) -> Array:
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def of_microbatch(microbatch: Batch) -> dict[str, Float[Array, "rows"]]:
        _, out = model.forward(params, microbatch, capture=Capture(STREAM, square))
        return dict(out.activations)

    squares = jax.lax.map(of_microbatch, spread_sequences(model, batch))
    return {name: model.stack.unstack(jnp.sqrt(jnp.mean(x, 0))) for name, x in squares.items()}


def layer_norms(metrics: Metrics, activations: dict[str, Array]) -> LayerNorms:
    """Return the norms of a step from its metrics (`NORMS`) and its activation norms."""
    collected = jax.device_get({name: metrics[name] for name in NORMS})
    first = collected["grad_norms_per_layer"]
    outer = [name for name in first if name != LAYERS]
    parts = [f"{LAYERS}.{i}" for i in range(len(first[LAYERS]))] + outer
    norms = {
        shown: np.array([*collected[name][LAYERS], *(collected[name][part] for part in outer)])
        for name, shown in NORMS.items()
    }
    outside = np.full(len(outer), np.nan)
    for name, layers in jax.device_get(activations).items():
        norms[name] = np.concatenate([layers, outside])
    return LayerNorms(parts, norms)


def rank_deviations(
    step: LayerNorms, neighbours: Sequence[LayerNorms]
) -> list[tuple[str, str, float]]:
    """Return (part, norm, ratio to the other steps' median), the largest deviations first."""
    deviations = []
    for name, values in step.norms.items():
        medians = np.median([neighbour.norms[name] for neighbour in neighbours], axis=0)
        for part, value, median in zip(step.parts, values, medians, strict=True):
            if not np.isnan(median):
                ratio = float(value / median) if median else float("inf")
                deviations.append((part, name, 1.0 if value == median else ratio))
    return sorted(deviations, key=lambda deviation: -_distance(deviation[2]))


def _distance(ratio: float) -> float:
    """Return the distance of a ratio from 1, in either direction; infinite if it is not finite."""
    return abs(float(np.log(ratio))) if np.isfinite(ratio) and ratio > 0 else float("inf")


def rank_documents(
    documents: Sequence[Document],
    losses: Float[np.ndarray, "m b s"],
    before: Sequence[Document] = (),
) -> list[Document]:
    """Return the documents of a batch by decreasing `documents.outlier_scores`.

    Args:
        documents: all documents of the batch.
        losses: losses of the tokens.
        before: documents of other batches, to compare losses with.
    """
    scores = outlier_scores(
        [document.loss for document in documents],
        [document.tokens for document in documents],
        spread=token_spread(documents, losses),
        before=[(document.loss, document.tokens) for document in before],
    )
    return [documents[i] for i in np.argsort(-scores, kind="stable")]


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

    def suspects(self, walk: Walk, before: Sequence[Document]) -> list[Suspect]:
        """Return all documents in the order of `rank_documents`."""
        documents, losses = self.documents(walk)
        batch = jax.device_get(walk.batch["input_ids"])
        tokens = batch.reshape(-1, batch.shape[-1])
        return [
            Suspect(
                document,
                walk.name_of(document.row),
                self._text(tokens[document.row, document.start : document.end]),
                self._text(tokens[document.row, slice(*document.worst)]),
            )
            for document in rank_documents(documents, losses, before)
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
    return finite(
        {
            "step": result.step.as_json(),
            "documents": [_document_json(suspect) for suspect in result.suspects],
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
    texts = {name: getattr(suspect, name) for name in ("name", "text", "worst_text")}
    return suspect.document._asdict() | texts
