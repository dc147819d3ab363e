"""The page: its charts, the facts above them and the tables below."""

from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from jaxforge.report.chart import Frame, Mark, figure
from jaxforge.report.heat_map import heat_maps
from jaxforge.report.pictures import charts
from jaxforge.report.reading import Run
from jaxforge.report.scale import AXES, Scale
from jaxforge.report.tables import below, facts


def page(runs: Sequence[Run], axis: str) -> str:
    """The page as one HTML document that loads nothing.

    Args:
        runs: one, or several to lay over each other.
        axis: a key of `AXES`.
    """
    frame = _frame(runs, axis)
    known, others = charts(runs, axis)
    return Template(_file("page.html")).substitute(
        title=escape(", ".join(run.name for run in runs)),
        style=chart_style(),
        script=_file("page.js"),
        facts=facts(runs),
        charts="".join(figure(chart, frame) for chart in known)
        + heat_maps(runs, axis, frame)
        + "".join(figure(chart, frame) for chart in others),
        below=below(runs),
        axis=escape(frame.x_label),
        low=repr(frame.x.low),
        high=repr(frame.x.high),
    )


def base_style() -> str:
    """Colours and type of all pages of ours."""
    return _file("base.css")


def chart_style() -> str:
    """What charts and tables look like on a page."""
    return base_style() + _file("page.css")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _frame(runs: Sequence[Run], axis: str) -> Frame:
    ends = [
        position
        for run in runs
        for series in run.series.values()
        for position in run.position(series.step[[0, -1]], axis).tolist()
    ]
    low, high = min(ends), max(ends)
    low = 0.0 if low < 0.05 * high else low
    resumes = [
        Mark(
            float(run.position(step, axis)),
            f"{run.name}: resumed from step {step:,}",
            None if len(runs) == 1 else colour,
        )
        for colour, run in enumerate(runs)
        for step in run.resumes or ()
    ]
    scale = Scale(low, high if high > low else low + 1, whole=axis != "hours")
    return Frame(scale, AXES[axis], resumes)
