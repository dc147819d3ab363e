"""Replayed steps of a run, compared with its log, and the documents of a step's batch."""

import argparse
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float
from rich.console import Console
from rich.table import Table

from jaxforge.cli.running import STDOUT, wide_console, write_json
from jaxforge.data.packing import IGNORE
from jaxforge.errors import printable
from jaxforge.model.transformer import Model, Params
from jaxforge.runs import run_directory
from jaxforge.step.context import spread_sequences
from jaxforge.step.train_step import Metrics
from jaxforge.step.update_loss import Batch
from jaxforge.storage import urls
from jaxforge.storage.untrusted_json import Field, is_number, is_step, read_lines
from jaxforge.telemetry.console import begin_command
from jaxforge.telemetry.numbers import finite
from jaxforge.tools.replay.past import PastRun, Walk, open_past

_SHOWN = 160  # characters of a document
_SHOWN_IN_TABLE = 60
_LOGITS = 1 << 24  # elements that are computed at once

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
    def contradicts_log(self) -> bool:
        """True if the run logged other values."""
        return self.difference not in (None, 0.0)

    @property
    def comparison(self) -> str:
        """Comparison with the log in words, with the first value that differs."""
        if self.logged is None:
            return "not logged"
        values = zip(("loss", "grad norm"), (self.loss, self.grad_norm), self.logged, strict=True)
        for name, value, logged in values:
            if apart := _relative(value, logged):
                return f"{name} was {logged:.9g} ({apart:.1e} apart)"
        return "the same" if self.applied else "the same, update skipped"

    def as_json(self) -> dict[str, Any]:
        """Return the step with its difference as plain values."""
        return dataclasses.asdict(self) | {"difference": self.difference}


def replayed(
    run: Path, first: int, last: int, overrides: Sequence[str] = ()
) -> Iterator[RepeatedStep]:
    """Replay steps of a run, each with its own config, and yield them one by one."""
    logged = logged_steps(run)
    # Each start may have another config: other data, rates or mesh.
    for begin, end in run_directory.steps_by_start(run, first, last):
        with open_past(run, end, overrides) as past:
            walk = past.walk(begin)
            while walk.progress.step < end:
                yield _repeated_step(walk.advance(), logged)


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
    # The log has all digits of float32, so equality is equality of bits.
    if value == logged or (math.isnan(value) and math.isnan(logged)):
        return 0.0
    return abs(value - logged) / abs(logged) if logged else math.inf


class Document(NamedTuple):
    """Tokens of a document in a row of a batch.

    Attributes:
        row: row of the batch, counted over the microbatches.
        start: position of the first token in the row.
        end: position after the last token.
        tokens: number of tokens with loss.
        loss: mean -log p over the tokens with loss, in nats.
        sequence: name of the row in the dataset.
        text: beginning of the document; empty without a tokenizer.
    """

    row: int
    start: int
    end: int
    tokens: int
    loss: float
    sequence: str = ""
    text: str = ""


def explain(past: PastRun, step: int) -> tuple[RepeatedStep, list[Document]]:
    """Replay a step; return it, and the documents of its batch by decreasing loss.

    Losses are those before the update. Documents whose loss is not finite come first.
    """
    walk = past.walk(step)
    documents = _documents_of(past, walk)  # first: the step donates the parameters
    return _repeated_step(walk.advance(), logged_steps(past.run)), documents


def _documents_of(past: PastRun, walk: Walk) -> list[Document]:
    tokenizer = run_directory.find_tokenizer(past.run)
    losses = token_loss_function(past.model, past.mesh)(walk.state.variables, walk.batch)
    batch = jax.device_get(walk.batch)
    rows = batch["input_ids"].reshape(-1, batch["input_ids"].shape[-1])

    def text(document: Document) -> str:
        if tokenizer is None:
            return ""
        tokens = rows[document.row, document.start : document.end][:_SHOWN]
        return tokenizer.decode([int(token) for token in tokens])[:_SHOWN]

    documents = find_documents(batch, losses, tokenizer.eos_id if tokenizer else None)
    # NaN compares with nothing: give it the rank of the largest loss.
    documents.sort(key=lambda document: -document.loss if math.isfinite(document.loss) else -np.inf)
    return [
        document._replace(sequence=walk.name_of(document.row), text=text(document))
        for document in documents
    ]


def token_loss_function(
    model: Model, mesh: Mesh
) -> Callable[[Params, Batch], Float[np.ndarray, "m b s"]]:
    """Return a function that computes -log p(label) of every token, 0 for ignored labels.

    Args:
        model: the model.
        mesh: mesh of the parameters (`TrainState.variables`) and of the batches.
    """

    def of_chunk(chunk: tuple[Array, Array], params: Params) -> Float[Array, "b s"]:
        hidden, labels = chunk
        logits = model.logits(params, hidden)
        # Ignored labels are negative. Any index serves, since the next line drops the value.
        at = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(labels == IGNORE, 0.0, jax.nn.logsumexp(logits, axis=-1) - at)

    def of_microbatch(params: Params, microbatch: Batch) -> Float[Array, "b s"]:
        hidden, labels = model.forward(params, microbatch)[0], microbatch["labels"]
        # Sequences are split into n equal parts, so that logits have at most `_LOGITS` elements.
        rows, length = labels.shape
        least = -(-rows * length * model.config.vocab_size // _LOGITS)
        n = next(n for n in range(min(least, length), length + 1) if length % n == 0)
        # [b, s, ...] -> [n, b, s / n, ...]
        split = [
            x.reshape(x.shape[0], n, -1, *x.shape[2:]).swapaxes(0, 1) for x in (hidden, labels)
        ]
        losses = jax.lax.map(functools.partial(of_chunk, params=params), tuple(split))
        return losses.swapaxes(0, 1).reshape(labels.shape)

    def run(params: Params, batch: Batch) -> tuple[Array, Array]:
        length = batch["labels"].shape[-1]
        position = jnp.broadcast_to(jnp.arange(length), batch["labels"].shape)
        batch = spread_sequences(model, {**batch, "position": position})  # may reorder tokens
        positions = batch.pop("position")
        return jax.lax.map(functools.partial(of_microbatch, params), batch), positions

    # Replicated: every process can read all losses.
    compiled = jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def in_order(params: Params, batch: Batch) -> Float[np.ndarray, "m b s"]:
        losses, positions = jax.device_get(compiled(params, batch))
        # Inverse of `spread_sequences`.
        ordered = np.zeros_like(losses)
        np.put_along_axis(ordered, positions, losses, axis=-1)
        return ordered

    return in_order


def find_documents(
    batch: Mapping[str, np.ndarray], losses: Float[np.ndarray, "m b s"], eos: int | None
) -> list[Document]:
    """Return the documents of a host batch that have tokens with loss, in order.

    Packed rows are split by their segments, other rows after each `eos`. A row without either is a
    single document.
    """
    rows = {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items() if x.ndim == losses.ndim}
    nats = losses.reshape(-1, losses.shape[-1])
    documents = []
    for row, tokens in enumerate(rows["input_ids"]):
        if "segment_ids" in rows:
            begins = np.flatnonzero(np.diff(rows["segment_ids"][row])) + 1
        else:
            # No token is -1: without `eos`, a row is one document.
            begins = np.flatnonzero(tokens[:-1] == (-1 if eos is None else eos)) + 1
        counts = rows["labels"][row] != IGNORE
        for start, end in itertools.pairwise([0, *begins.tolist(), len(tokens)]):
            if n := int(counts[start:end].sum()):
                loss = float(nats[row, start:end][counts[start:end]].mean())
                documents.append(Document(row, start, end, n, loss))
    return documents


def run(args: argparse.Namespace, overrides: Sequence[str], first: int, last: int) -> int:
    """Run `jaxforge replay`: print steps or documents, write JSON, and return the exit code."""
    begin_command()
    run = urls.path(args.run)
    if args.steps:
        is_exact = _print_steps(wide_console(), replayed(run, first, last, overrides))
        return 0 if is_exact or not args.check else 1
    with open_past(run, first, overrides) as past:
        step, documents = explain(past, first)
    if jax.process_index() == 0:
        if args.json:
            listed = [document._asdict() for document in documents]
            write_json(args.json, finite({"step": step.as_json(), "documents": listed}))
        if args.json != STDOUT:
            _print_step(wide_console(), step, documents, args.top)
    return 1 if step.contradicts_log and args.check else 0


def _print_steps(console: Console, steps: Iterable[RepeatedStep]) -> bool:
    """Print each step as it is replayed; return True if all match the log."""
    all_exact = True
    console.print(f"{'step':>8} {'loss':>14} {'grad norm':>14}  logged", highlight=False)
    for step in steps:
        all_exact &= not step.contradicts_log
        console.print(
            f"{step.step:8} {step.loss:14.9g} {step.grad_norm:14.9g}  {step.comparison}",
            highlight=False,
        )
    return all_exact


def _print_step(
    console: Console, step: RepeatedStep, documents: Sequence[Document], top: int
) -> None:
    console.print(
        f"[bold]step {step.step}[/]: loss {step.loss:.6g}, gradient norm {step.grad_norm:.6g}; "
        f"logged: {step.comparison}",
        highlight=False,
    )
    shown = documents[:top]
    table = Table(title=f"documents of the step ({len(shown)} of {len(documents)})",
                  title_justify="left")  # fmt: skip
    table.add_column("position", overflow="fold")
    for name in ("tokens", "loss"):
        table.add_column(name, justify="right")
    table.add_column("text", overflow="fold")
    for document in shown:
        position = f"{document.sequence}, {document.start}:{document.end}"
        text = repr(document.text)[1:-1][:_SHOWN_IN_TABLE].replace("[", "\\[")  # no markup
        table.add_row(position, str(document.tokens), f"{document.loss:.4g}", text)
    console.print(table)
