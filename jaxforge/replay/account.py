"""What happened in a step: made again, compared with the log and with its neighbours."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxforge import run_directory
from jaxforge.corpus.tokenizer import Tokenizer
from jaxforge.data.packing import IGNORE
from jaxforge.replay.documents import Document, find_documents, oddness, token_losses
from jaxforge.replay.influence import Influence, Influences
from jaxforge.replay.layers import NORMS, LayerNorms, activation_norms, layer_norms, stands_out
from jaxforge.replay.past import Past, Walk, open_past
from jaxforge.step.train_step import Metrics

_SHOWN = 160  # characters of a text


@dataclasses.dataclass(frozen=True)
class Made:
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
    """What happened in a step.

    Attributes:
        made: the step.
        suspects: its documents, what stands out most first (`documents.oddness`).
        without_first: loss and gradient norm of the step without the first of them.
        norms: layer by layer, by step: of this one and its neighbours.
        odd: (part, norm, ratio to the median of the neighbours), what differs most first.
    """

    made: Made
    suspects: list[Suspect]
    without_first: tuple[float, float] | None
    norms: dict[int, LayerNorms]
    odd: list[tuple[str, str, float]]


def replayed(run: Path, first: int, last: int, overrides: Sequence[str] = ()) -> Iterator[Made]:
    """Steps of a run made again, one by one, each with the config that it had."""
    logged = logged_steps(run)
    for begin, end in run_directory.steps_by_start(run, first, last):
        with open_past(run, end, overrides) as past:
            walk = past.walk(begin)
            while walk.progress.step < end:
                yield _made(walk.advance(), logged)


def account(past: Past, step: int, *, around: int, rows: int) -> Account:
    """Makes a step again and looks at it from all sides.

    Args:
        past: the run.
        step: from 1.
        around: how many steps before and after it to compare with, as far as they had its config.
        rows: how many rows of the batch to take apart into documents.
    """
    tokenizer = run_directory.find_tokenizer(past.run)
    logged, looking = logged_steps(past.run), past.step_function(("grads", *NORMS))
    activations = jax.jit(lambda params, batch: activation_norms(past.model, params, batch))
    walk, norms = past.walk(max(past.start + 1, step - around)), {}
    last = min(step + around, past.config.train.max_steps)
    made, suspects, without_first = None, [], None
    while walk.progress.step < last:
        at = walk.progress.step + 1
        metrics = walk.look(looking)
        seen = activations(walk.state.variables, walk.batch)
        norms[at] = layer_norms(metrics, seen)
        if at == step:
            influences = Influences(past, walk, metrics["grads"])
            suspects = _suspects(past, walk, influences, tokenizer, rows)
            without_first = influences.without([suspects[0].document]) if suspects else None
        del metrics
        again = _made(walk.advance(), logged)
        made = again if at == step else made
    assert made is not None
    others = [one for number, one in norms.items() if number != step]
    odd = stands_out(norms[step], others) if others else []
    return Account(made, suspects, without_first, norms, odd)


def _suspects(
    past: Past, walk: Walk, influences: Influences, tokenizer: Tokenizer | None, rows: int
) -> list[Suspect]:
    """All documents; those of the rows that matter most are taken apart."""
    losses = token_losses(past.model, walk.state.variables, walk.batch, past.mesh)
    batch = jax.device_get(walk.batch)
    documents = find_documents(batch, losses, tokenizer.eos_id if tokenizer else None)
    by_row = influences.of_rows()
    counts = (batch["labels"] != IGNORE).sum(-1).reshape(-1)
    means = losses.sum(-1).reshape(-1) / np.maximum(counts, 1)
    most = np.argsort(-oddness(means, counts, [one.norm for one in by_row]))[:rows]
    tokens = batch["input_ids"].reshape(-1, batch["input_ids"].shape[-1])
    length = tokens.shape[1]

    def suspect(one: Document) -> Suspect:
        influence = None
        if (one.start, one.end) == (0, length):
            influence = by_row[one.row]
        elif one.row in most:
            influence = influences.of(one.row, one.start, one.end)
        own = tokens[one.row]
        return Suspect(
            one, walk.name_of(one.row), _text(own[one.start : one.end], tokenizer),
            _text(own[slice(*one.worst)], tokenizer), influence,
        )  # fmt: skip

    found = [suspect(one) for one in documents]
    norms = [one.influence.norm if one.influence else math.nan for one in found]
    odd = oddness([one.loss for one in documents], [one.tokens for one in documents], norms)
    return [found[i] for i in np.argsort(-odd, kind="stable")]


def _text(tokens: np.ndarray, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    return tokenizer.decode([int(one) for one in tokens[:_SHOWN]])[:_SHOWN]


def _made(metrics: Metrics, logged: dict[int, tuple[float, float]]) -> Made:
    names = ("step", "loss", "grad_norm", "applied")
    step, loss, grad_norm, applied = jax.device_get([metrics[name] for name in names])
    return Made(int(step), float(loss), float(grad_norm), bool(applied), logged.get(int(step)))


def logged_steps(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every logged step; of one that was made twice, the latest."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    found = {}
    for line in path.read_bytes().split(b"\n")[:-1]:  # a run may be writing the last
        values = json.loads(line)
        if "train/loss" in values and "train/grad_norm" in values:
            loss, norm = values["train/loss"], values["train/grad_norm"]
            found[int(values["step"])] = (_number(loss), _number(norm))
    return found


def _number(logged: float | None) -> float:
    return math.nan if logged is None else logged


def _relative(here: float, there: float) -> float:
    if here == there or (math.isnan(here) and math.isnan(there)):
        return 0.0
    return abs(here - there) / abs(there) if there else math.inf


def as_json(found: Account) -> dict[str, Any]:
    """All of it as plain values; numbers that are not finite become null."""
    return _finite(
        {
            "step": dataclasses.asdict(found.made) | {"difference": found.made.difference},
            "documents": [_document_json(one) for one in found.suspects],
            "without_the_first": found.without_first,
            "norms": {
                step: {"parts": one.parts, **{name: x.tolist() for name, x in one.norms.items()}}
                for step, one in found.norms.items()
            },
            "odd": found.odd,
        }
    )


def _document_json(one: Suspect) -> dict[str, Any]:
    influence = one.influence._asdict() if one.influence else None
    return {
        **one.document._asdict(), "name": one.name, "text": one.text,
        "worst_text": one.worst_text, "influence": influence,
    }  # fmt: skip


def _finite(values: Any) -> Any:  # noqa: ANN401
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
