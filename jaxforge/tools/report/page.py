"""The page: its charts, the facts above them and the tables below."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

import numpy as np

from jaxforge.runs.reading import Run
from jaxforge.tools.report import charts, tables
from jaxforge.tools.report.columns import Pool
from jaxforge.tools.report.heat_map import bands, heat_maps
from jaxforge.tools.report.names import AXES


def page(runs: Sequence[Run], axis: str) -> str:
    """The page as one HTML document that loads nothing.

    Args:
        runs: one, or several to lay over each other.
        axis: a key of `AXES`.
    """
    known = parts(runs)
    title = title_of([run.name for run in runs])
    return document(title, {**known["data"], "axis": axis}, known["facts"], known["below"])


def title_of(names: Sequence[str]) -> str:
    """Of a page of runs."""
    return ", ".join(names) if len(names) < 4 else f"{len(names)} runs"


def parts(runs: Sequence[Run]) -> dict[str, Any]:
    """What changes while runs go on: HTML, and the data of the charts."""
    pool = Pool()
    with np.errstate(over="ignore", invalid="ignore"):  # of values that float32 does not have
        drawn, maps = charts.charts(runs, pool), heat_maps(runs, pool)
        data = {
            "axes": AXES,
            "runs": [
                {"name": run.name, "along": charts.along(run), "resumes": run.resumes,
                 "skips": charts.skips(run)}
                for run in runs
            ],
            "charts": drawn,
            "maps": maps,
            "bands": bands() if maps else [],
            "columns": pool.columns,
        }  # fmt: skip
        above, below = tables.facts(runs), tables.below(runs)
    messages = [message for run in runs for message in run.omissions]
    return {"facts": encodable(above + notes(messages)), "below": encodable(below), "data": data}


def notes(messages: Sequence[str]) -> str:
    """Format messages about runs as paragraphs."""
    return encodable("".join(f"<p>{escape(message)}</p>" for message in messages))


def encodable(text: str) -> str:
    """Escape lone surrogates, which JSON may have and UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def document(
    title: str, data: Mapping[str, Any], above: str, below: str, *, watch: bool = False
) -> str:
    """A page of charts.

    Args:
        title: of the page, as text.
        data: what `drawing.js` draws.
        above: HTML before the charts.
        below: HTML after them.
        watch: it asks where it came from for newer data.
    """
    ours = _file("drawing.js") + _file("page.js")
    return Template(_file("page.html")).substitute(
        title=encodable(escape(title)),
        style=base_style() + _file("vendor/uPlot.min.css") + _file("page.css"),
        script=_file("vendor/uPlot.iife.min.js") + f"\n(() => {{\n{ours}}})();\n",
        facts=above,
        below=below,
        data=as_json(data),
        connect="'self'" if watch else "'none'",
    )


def as_json(data: object) -> str:
    """JSON that may stand inside of HTML: nothing in it can end a script."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def base_style() -> str:
    """Colours and type of all pages of ours."""
    return _file("base.css")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
