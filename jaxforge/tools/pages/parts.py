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


def document(
    title: str, data: Mapping[str, Any], above: str, below: str, *, watch: bool = False
) -> str:
    """Return a page of charts.

    Args:
        title: title of the page, as text.
        data: data that `drawing.js` draws.
        above: HTML above the charts.
        below: HTML below the charts.
        watch: the page polls its server for newer data.
    """
    own = _file("drawing.js") + _file("page.js")
    body = Template(_file("charts.html")).substitute(
        facts=above,
        below=below,
        data=as_json(data),
        script=_file("vendor/uPlot.iife.min.js") + f"\n(() => {{\n{own}}})();\n",
    )
    style = _file("vendor/uPlot.min.css") + _file("page.css")
    return _framed(title, style, body, "'self'" if watch else "'none'")


def chart_document(
    title: str, charts: Iterable[Mapping[str, Any]], pool: "Pool", above: str, below: str
) -> str:
    """Return a page of charts without runs; `charts` is consumed before `pool` is read."""
    data = {"charts": list(charts), "columns": pool.columns, "runs": []}
    return document(title, data, above, below)


def plain_document(title: str, style: str, body: str) -> str:
    """Return a page without scripts.

    Args:
        title: title of the page, as text.
        style: name of a CSS file of this package.
        body: HTML below the title.
    """
    return _framed(title, _file(style), f"</header>\n{body}\n", "'none'")


def _framed(title: str, style: str, body: str, connect: str) -> str:
    return Template(_file("page.html")).substitute(
        title=escape_surrogates(escape(title)),
        style=_file("base.css") + style,
        body=body,
        connect=connect,
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def escape_surrogates(text: str) -> str:
    """Escape lone surrogates, which JSON may have and UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def as_json(data: object) -> str:
    """Return JSON that may stand inside of HTML: nothing in it can end a script."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def paragraphs(messages: Iterable[str]) -> str:
    """Return messages as paragraphs."""
    return escape_surrogates("".join(f"<p>{escape(message)}</p>" for message in messages))


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
    sorts: bool = False,
    aligns: bool = False,
) -> str:
    """Return a table of text.

    Args:
        title: caption; none if empty.
        head: names of the columns.
        rows: cells of each row.
        runs: index of each row's run, for its colour; implies `sorts`.
        sorts: a click on a column head sorts the rows.
        aligns: align cells that begin with a digit to the right.
    """
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = []
    for i, (first, *others) in enumerate(rows):
        run = f' data-run="{runs[i]}"' if runs else ""
        cells = "".join(
            f"<td{' class=n' if aligns and text[:1].isdigit() else ''}>{escape(text)}</td>"
            for text in others
        )
        body.append(f'<tr{run}><th scope="row">{escape(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table{" class=runs" if runs or sorts else ""}>{caption}'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def encode_column(values: np.ndarray, kind: str) -> str:
    """Return numbers as `drawing.js` reads them: their kind, then little-endian bytes in base64.

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


def curve(
    pool: Pool, label: str, x: ArrayLike, y: ArrayLike, *, dots: bool, colour: int
) -> dict[str, Any]:
    """Return a curve in the format of `drawing.js`, without points that are not finite.

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
    group: str = "",
    wide: bool = False,
) -> dict[str, Any]:
    """Return a chart in the format of `drawing.js`.

    Args:
        title: title above the chart.
        unit: unit of the values.
        curves: curves, from `curve`.
        axis: the horizontal axis: its `label`, `log` for a logarithmic scale, `names` of its ticks.
        group: heading above charts that belong together.
        wide: the chart takes the width of the page.
    """
    return {"title": title, "unit": unit, "group": group, "wide": wide, "curves": curves, "x": axis}
