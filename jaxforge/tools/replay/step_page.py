"""HTML page with the account of a step (`--html`), self-contained."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import numpy as np

from jaxforge.telemetry.numbers import exact
from jaxforge.tools.pages.parts import Pool, Rows, chart, curve, document, fact_list, table
from jaxforge.tools.replay.account import Account, Suspect

_ODD = 12  # rows of layers that stand out
_ODD_HEAD = ["part", "norm", "its median in the steps around"]
_TELLING = 5  # documents with their text above the table


def page(account: Account, run: str) -> str:
    """Return the page of a step.

    Args:
        account: account of the step.
        run: name of the run.
    """
    pool, cards = Pool(), "".join(map(_card, account.suspects[:_TELLING]))
    rows = [[part, norm, f"{ratio:.3g} times"] for part, norm, ratio in account.odd[:_ODD]]
    above = fact_list(_facts(account))
    above += f"<h2>Documents that stand out</h2>{cards}" if cards else ""
    above += table("Layers that stand out", _ODD_HEAD, rows) if rows else ""
    below = table("All documents", _HEAD, _rows(account), sorts=True) if account.suspects else ""
    title = f"Step {account.step.step:,} of {run}"
    return document(title, above, below, pool.data(_charts(account, pool)))


def _facts(account: Account) -> Mapping[str, str]:
    step = account.step
    return {
        "loss": exact(step.loss),
        "gradient norm": exact(step.grad_norm),
        "comparison with the log": step.comparison.replace("same", "same, bit for bit"),
        "update": "applied" if step.applied else "skipped by the guard",
        "documents": f"{len(account.suspects):,}",
    }


def _card(suspect: Suspect) -> str:
    start, end = suspect.document.worst
    worst = f"tokens {start:,} to {end - 1:,}, loss {exact(suspect.document.worst_loss)}"
    texts = f"{escape(suspect.text)}<br><b>{escape(suspect.worst_text)}</b>" if suspect.text else ""
    loss = exact(suspect.document.loss)
    return (
        f'<p class="sample"><small>{escape(_where(suspect))}: loss {loss}; worst '
        f"are {worst}</small>{texts}</p>"
    )


def _where(suspect: Suspect) -> str:
    document = suspect.document
    return f"{suspect.name}, row {document.row}, tokens {document.start:,} to {document.end - 1:,}"


_HEAD = ["where", "tokens", "loss", "worst loss", "text"]


def _rows(account: Account) -> Rows:
    for suspect in account.suspects:
        document = suspect.document
        yield [_where(suspect), f"{document.tokens:,}", exact(document.loss),
               exact(document.worst_loss), suspect.text]  # fmt: skip


def _charts(account: Account, pool: Pool) -> Iterator[dict[str, Any]]:
    """Yield a chart per norm over the layers: this step in colour, its neighbours in grey."""
    step = account.step.step
    order = sorted(account.norms, key=lambda number: (number == step, number))
    parts = account.norms[step].parts
    names = [part.removeprefix("layers.").replace("_", " ") for part in parts]
    axis, positions = {"label": "layer", "log": False, "names": names}, np.arange(len(parts))
    for norm in account.norms[step].norms:
        curves = [
            curve(pool, f"step {number:,}", positions, account.norms[number].norms[norm],
                  dots=True, colour=1 if number == step else 7)
            for number in order
        ]  # fmt: skip
        title = norm[:1].upper() + norm[1:]
        yield chart(title, "norm", curves, axis, group="Norms by layer")
