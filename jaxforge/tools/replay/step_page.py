"""`--html`: the account of a step as one page that loads nothing."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import numpy as np

from jaxforge.telemetry.numbers import exact
from jaxforge.tools.pages.parts import Pool, Rows, chart, chart_document, curve, fact_list, table
from jaxforge.tools.replay.account import Account, Suspect

_ODD = 12  # rows of what differs most
_ODD_HEAD = ["part", "norm", "its median in the steps around"]
_TELLING = 5  # documents with their text above the table


def page(found: Account, run: str) -> str:
    """The page of a step.

    Args:
        found: what happened in it.
        run: what the run is called.
    """
    pool, cards = Pool(), "".join(map(_card, found.suspects[:_TELLING]))
    rows = [[part, norm, f"{ratio:.3g} times"] for part, norm, ratio in found.odd[:_ODD]]
    above = fact_list(_facts(found))
    above += f"<h2>Documents that stand out</h2>{cards}" if cards else ""
    above += table("Layers that stand out", _ODD_HEAD, rows) if rows else ""
    below = table("All documents", _HEAD, _rows(found), sorts=True) if found.suspects else ""
    title = f"Step {found.made.step:,} of {run}"
    return chart_document(title, _charts(found, pool), pool, above, below)


def _facts(found: Account) -> Mapping[str, str]:
    made = found.made
    facts = {
        "loss": exact(made.loss),
        "gradient norm": exact(made.grad_norm),
        "what was logged": made.comparison.replace("same", "same, bit for bit"),
        "update": "applied" if made.applied else "left out by the guard",
        "documents": f"{len(found.suspects):,}",
    }
    if found.without_first:
        loss, norm = map(exact, found.without_first)
        facts["without the first document"] = f"loss {loss}, gradient norm {norm}"
    return facts


def _card(one: Suspect) -> str:
    start, end = one.document.worst
    worst = f"tokens {start:,} to {end - 1:,}, loss {exact(one.document.worst_loss)}"
    texts = f"{escape(one.text)}<br><b>{escape(one.worst_text)}</b>" if one.text else ""
    return (
        f'<p class="sample"><small>{escape(_where(one))}: loss {exact(one.document.loss)}; worst '
        f"are {worst}</small>{texts}</p>"
    )


def _where(one: Suspect) -> str:
    place = one.document
    return f"{one.name}, row {place.row}, tokens {place.start:,} to {place.end - 1:,}"


_HEAD = ["where", "tokens", "loss", "own norm", "norm without", "worst loss", "text"]


def _rows(found: Account) -> Rows:
    for one in found.suspects:
        norms = [exact(norm) for norm in one.influence] if one.influence else ["", ""]
        place = one.document
        yield [_where(one), f"{place.tokens:,}", exact(place.loss), *norms,
               exact(place.worst_loss), one.text]  # fmt: skip


def _charts(found: Account, pool: Pool) -> Iterator[dict[str, Any]]:
    """Each norm over the layers: of this step in colour, of its neighbours behind it."""
    step = found.made.step
    order = sorted(found.norms, key=lambda number: (number == step, number))
    parts = found.norms[step].parts
    names = [part.removeprefix("layers.").replace("_", " ") for part in parts]
    axis, places = {"label": "layer", "log": False, "names": names}, np.arange(len(parts))
    for norm in found.norms[step].norms:
        curves = [
            curve(pool, f"step {number:,}", places, found.norms[number].norms[norm],
                  dots=True, colour=1 if number == step else 7)
            for number in order
        ]  # fmt: skip
        title = norm[:1].upper() + norm[1:]
        yield chart(title, "norm", curves, axis, group="Norms by layer")
