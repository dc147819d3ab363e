"""HTML page of runs: charts, with facts above them and tables below."""

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.errors import UserError
from jaxforge.runs.metrics_file import NotYetError
from jaxforge.runs.reading import Run, readers
from jaxforge.tools.pages.parts import Pool, document, paragraphs
from jaxforge.tools.report import charts, goodput, tables
from jaxforge.tools.report.names import AXES


def page(runs: Sequence[Run], axis: str) -> str:
    """Return the page as a self-contained HTML document.

    Args:
        runs: the runs, whose curves are overlaid.
        axis: horizontal axis, a key of `AXES`.
    """
    facts, below, data = parts(runs)
    return document(title_of([run.name for run in runs]), facts, below, {**data, "axis": axis})


def title_of(names: Sequence[str]) -> str:
    """Return the title of a page of runs."""
    return ", ".join(names) if len(names) < 4 else f"{len(names)} runs"


def parts(runs: Sequence[Run]) -> tuple[str, str, dict[str, Any]]:
    """Return the parts of a page that change: HTML above and below the charts, and their data."""
    pool = Pool()
    with np.errstate(over="ignore", invalid="ignore"):  # values outside float32's range
        drawn, maps = charts.charts(runs, pool), charts.heat_maps(runs, pool)
        data = {
            "axes": AXES,
            "runs": [
                {"name": run.name, "along": charts.axis_values(run), "resumes": run.resumes,
                 "skips": charts.steps_with_skips(run)}
                for run in runs
            ],
            "charts": drawn,
            "maps": maps,
            "bands": charts.bands() if maps else [],
            "columns": pool.columns,
        }  # fmt: skip
        if not runs:
            return "", "", data
        above, below = tables.facts(runs) + goodput.bars(runs), tables.below(runs)
    messages = [message for run in runs for message in run.omissions]
    return above + paragraphs(messages), below, data


class LivePage:
    """Page of runs in their current state; updates read appended data only.

    Args:
        paths: run directories, which need not exist yet.
        axis: horizontal axis, a key of `AXES`.
    """

    def __init__(self, paths: Sequence[Path], axis: str) -> None:
        self._readers, self._axis, self._lock = readers(paths), axis, threading.Lock()

    def page(self) -> str:
        """Return the complete page."""
        parts = self.parts()
        data = {**parts["data"], "axis": self._axis, "watch": True, "version": parts["version"]}
        return document(parts["title"], parts["facts"], parts["below"], data, watch=True)

    def parts(self) -> dict[str, Any]:
        """Return title, facts, below and data of the page, and `version`, a hash of them."""
        with self._lock:
            runs, messages = [], []
            for reader in self._readers:
                try:
                    runs.append(reader.read())
                except NotYetError:
                    messages.append(f"{reader.name}: waiting for its first step")
                except UserError as error:
                    messages.append(f"{reader.name}: {error}")
        facts, below, data = parts(runs)
        title = title_of([reader.name for reader in self._readers])
        content = {
            "title": title, "facts": facts + paragraphs(messages), "below": below, "data": data,
        }  # fmt: skip
        version = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        return content | {"version": version}
