"""HTML page of runs: charts, with facts above them and tables below."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxforge.runs.reading import Run
from jaxforge.tools.pages.parts import Pool, document, escape_surrogates, paragraphs
from jaxforge.tools.report import charts, goodput, tables
from jaxforge.tools.report.heat_map import bands, heat_maps
from jaxforge.tools.report.names import AXES


def page(runs: Sequence[Run], axis: str) -> str:
    """Return the page as a self-contained HTML document.

    Args:
        runs: the runs, whose curves are overlaid.
        axis: horizontal axis, a key of `AXES`.
    """
    content = parts(runs)
    title = title_of([run.name for run in runs])
    return document(title, {**content["data"], "axis": axis}, content["facts"], content["below"])


def title_of(names: Sequence[str]) -> str:
    """Return the title of a page of runs."""
    return ", ".join(names) if len(names) < 4 else f"{len(names)} runs"


def parts(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the parts of a page that change: HTML, and the data of the charts."""
    pool = Pool()
    with np.errstate(over="ignore", invalid="ignore"):  # values outside float32's range
        drawn, maps = charts.charts(runs, pool), heat_maps(runs, pool)
        data = {
            "axes": AXES,
            "runs": [
                {"name": run.name, "along": charts.axis_values(run), "resumes": run.resumes,
                 "skips": charts.steps_with_skips(run)}
                for run in runs
            ],
            "charts": drawn,
            "maps": maps,
            "bands": bands() if maps else [],
            "columns": pool.columns,
        }  # fmt: skip
        above, below = tables.facts(runs) + goodput.bars(runs), tables.below(runs)
    messages = [message for run in runs for message in run.omissions]
    return {
        "facts": escape_surrogates(above) + paragraphs(messages),
        "below": escape_surrogates(below),
        "data": data,
    }
