"""HTML page of runs: charts, with facts above them and tables below.

The page is self-contained: style, script and data are inline.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

import numpy as np

from jaxforge.runs.reading import Run
from jaxforge.tools.report import charts, tables


def page(runs: Sequence[Run], axis: str) -> str:
    """Return the page as a self-contained HTML document.

    Args:
        runs: the runs, whose curves are overlaid.
        axis: horizontal axis, a key of `charts.AXES`.
    """
    pool = charts.Pool()
    with np.errstate(over="ignore", invalid="ignore"):  # values outside float32's range
        data = {
            "axis": axis,
            "axes": charts.AXES,
            "runs": [
                {"name": run.name, "along": charts.axis_values(run), "resumes": run.resumes,
                 "skips": charts.steps_with_skips(run)}
                for run in runs
            ],
            "charts": charts.charts(runs, pool),
            "columns": pool.columns,
        }  # fmt: skip
        above, below = tables.facts(runs) + tables.goodput_bars(runs), tables.below(runs)
    above += tables.paragraphs(message for run in runs for message in run.omissions)
    # "<" is escaped, so that no text of a run can end the script.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    html = Template(_file("page.html")).substitute(
        title=escape(", ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"),
        style=_file("page.css") + _file("vendor/uPlot.min.css"),
        above=above,
        below=below,
        data=text,
        library=_file("vendor/uPlot.iife.min.js"),
        script=_file("charts.js"),
    )
    # JSON may have lone surrogates, which UTF-8 cannot encode.
    return html.encode("utf-8", "backslashreplace").decode("utf-8")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
