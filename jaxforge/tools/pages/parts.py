"""Parts of the HTML pages that tools write.

Pages are self-contained: style, script and data are inline.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Rows = Iterable[Sequence[str]]
"""Rows of a table, as cells of text."""

_LONG_FACT = 40  # characters; a longer text spans two columns
_CHARTS = """\
<main>
<div id="controls"></div>
<noscript>The charts need JavaScript.</noscript>
<div id="charts"></div>
</main>
"""
_SCRIPT = """\
<script type="application/json" id="data">{data}</script>
<script>
{library}
(() => {{
{script}}})();
</script>
"""


def document(
    title: str,
    above: str,
    below: str = "",
    data: Mapping[str, Any] | None = None,
    *,
    watch: bool = False,
) -> str:
    """Return a page.

    Args:
        title: title of the page, as text.
        above: HTML above the charts.
        below: HTML below the charts.
        data: data that `charts.js` draws; None for a page without scripts.
        watch: the page polls its server for newer data.
    """
    script, style = "", _file("page.css")
    if data is not None:
        # "<" is escaped, so that no text of a run can end the script.
        text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        script = _SCRIPT.format(
            data=text, library=_file("vendor/uPlot.iife.min.js"), script=_file("charts.js")
        )
        style += _file("vendor/uPlot.min.css")
    page = Template(_file("page.html")).substitute(
        title=escape(title), style=style, above=above, below=below, script=script,
        charts="" if data is None else _CHARTS, connect="'self'" if watch else "'none'",
    )  # fmt: skip
    # JSON may have lone surrogates, which UTF-8 cannot encode.
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def paragraphs(messages: Iterable[str]) -> str:
    """Return messages as paragraphs."""
    return "".join(f"<p>{escape(message)}</p>" for message in messages)


def fact_list(facts: Mapping[str, str]) -> str:
    """Return names with their texts as a list of terms."""
    items = (
        f"<div{' class=long' if len(text) > _LONG_FACT else ''}>"
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in facts.items()
    )
    return f"<dl>{''.join(items)}</dl>"


def details(title: str, body: str) -> str:
    """Return a collapsed HTML section, which a click on its title expands."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def table(
    title: str,
    head: Sequence[str],
    rows: Rows,
    *,
    runs: Sequence[int] = (),
    aligns: bool = False,
) -> str:
    """Return a table of text.

    Args:
        title: caption; none if empty.
        head: names of the columns.
        rows: cells of each row.
        runs: index of each row's run, for its colour; a click on a column head then
            sorts the rows.
        aligns: align cells that begin with a digit to the right.
    """
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = []
    for i, (first, *values) in enumerate(rows):
        run = f' data-run="{runs[i]}"' if runs else ""
        cells = "".join(
            f"<td{' class=n' if aligns and text[:1].isdigit() else ''}>{escape(text)}</td>"
            for text in values
        )
        body.append(f'<tr{run}><th scope="row">{escape(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table{" class=runs" if runs else ""}>{caption}'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def encode_column(values: np.ndarray, kind: str) -> str:
    """Return numbers as `charts.js` reads them: their kind, then little-endian bytes in base64.

    Args:
        values: [n].
        kind: "f4", "f8" or "i4".
    """
    data = np.ascontiguousarray(values, f"<{kind}").tobytes()
    return f"{kind}:{base64.b64encode(data).decode()}"


class Pool:
    """Deduplicated columns of a page, shared by its curves."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}

    def add(self, values: np.ndarray, kind: str) -> int:
        """Return the index of a column in `columns`; arguments as for `encode_column`."""
        return self._indices.setdefault(encode_column(values, kind), len(self._indices))

    @property
    def columns(self) -> list[str]:
        """All columns, encoded."""
        return list(self._indices)

    def data(self, charts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the data of a page of charts without runs, whose curves are of this pool."""
        return {"charts": list(charts), "columns": self.columns, "runs": []}


def curve(
    pool: Pool, label: str, x: ArrayLike, y: ArrayLike, *, dots: bool, colour: int
) -> dict[str, Any]:
    """Return a curve in the format of `charts.js`, without points that are not finite.

    Args:
        pool: pool for the column of x.
        label: label in the legend.
        x: [n].
        y: [n].
        dots: draw points as dots.
        colour: index of a colour of the style.
    """
    points = np.array([x, y], float)
    finite_x, values = points[:, np.isfinite(points[1])]
    return {
        "label": label,
        "x": pool.add(finite_x, "f8"),
        "y": encode_column(values, "f8"),
        "dots": dots,
        "colour": colour,
        "last": float(values[-1]) if values.size else None,
    }


def chart(
    title: str,
    unit: str,
    curves: Sequence[Mapping[str, Any]],
    axis: Mapping[str, Any],
    *,
    wide: bool = False,
) -> dict[str, Any]:
    """Return a chart in the format of `charts.js`.

    Args:
        title: title above the chart.
        unit: unit of the values.
        curves: curves, from `curve`.
        axis: the horizontal axis: its `label`, and `log` for a logarithmic scale.
        wide: the chart takes the width of the page.
    """
    return {"title": title, "unit": unit, "group": "", "wide": wide, "curves": curves, "x": axis}
