"""Account of a run's time: a stacked bar for the page, and a table for the terminal."""

from collections.abc import Mapping, Sequence
from html import escape

from jaxforge.runs.reading import Run
from jaxforge.telemetry.goodput import CATEGORIES, DESCRIPTIONS, Attempt, Seconds, account, ratio
from jaxforge.telemetry.numbers import duration
from jaxforge.tools.pages.parts import details, table

_LABELS: Mapping[str, str] = {name: name.replace("_", " ") for name in CATEGORIES}
_COLOURS: Mapping[str, str] = {
    "step": "c2", "rework": "alarm", "data_wait": "c5", "evaluation": "c4", "save": "c6",
    "rollback": "c1", "start": "c7", "restore": "c3", "compile": "c0", "other": "soft",
    "down": "ink", "idle": "hair",
}  # fmt: skip
"""Names of colours of the style by category."""


def bars(runs: Sequence[Run]) -> str:
    """Return a stacked bar for each run with an account, and one legend; empty without accounts."""
    accounts = {run.name: account(run.attempts[0]) for run in runs if run.attempts.get(0)}
    if not accounts:
        return ""
    drawn = [
        f"<figure><h3>{escape(_title(name, seconds, len(runs)))}</h3>{_bar(seconds)}</figure>"
        for name, seconds in accounts.items()
    ]
    shown = [name for name in CATEGORIES if any(seconds[name] for seconds in accounts.values())]
    items = "".join(
        f'<li><i style="--c: var(--{_COLOURS[name]})"></i>{_LABELS[name]}</li>' for name in shown
    )
    return f'{"".join(drawn)}<ul class="key">{items}</ul>'


def _title(name: str, seconds: Seconds, n_runs: int) -> str:
    title = f"Goodput {ratio(seconds):.1%} of {duration(sum(seconds.values()))}"
    return f"{title}: {name}" if n_runs > 1 else title


def _bar(seconds: Seconds) -> str:
    total = sum(seconds.values()) or 1.0
    segments = "".join(
        f'<i style="--c: var(--{_COLOURS[name]}); width: {100 * value / total:.3f}%" '
        f'title="{_LABELS[name]}: {duration(value)} ({value / total:.1%})"></i>'
        for name, value in seconds.items()
        if value
    )
    return f'<div class="stack">{segments}</div>'


def below(run: Run) -> str:
    """Return a collapsed table of the account, with a column per process; empty without one."""
    if not run.attempts:
        return ""
    head, rows = _table(run.attempts)
    return details(f"time of {run.name}", table("", head, rows, aligns=True))


def text(name: str, attempts: Mapping[int, Sequence[Attempt]]) -> str:
    """Return the account of a run as a table for the terminal.

    Args:
        name: the run directory.
        attempts: attempts of each process.
    """
    head, rows = _table(attempts)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join([label.ljust(widths[0]), *map(str.rjust, numbers, widths[1:-1]), meaning])
        for label, *numbers, meaning in (head, *rows)
    ]
    seconds = account(attempts[min(attempts)])
    summary = f"{name}: goodput {ratio(seconds):.2%}, {_attempts(attempts[min(attempts)])}"
    return "\n".join((summary, "", *lines))


def _attempts(attempts: Sequence[Attempt]) -> str:
    killed = sum(attempt.code is None for attempt in attempts[:-1])
    count = f"{len(attempts)} attempt{'s' * (len(attempts) > 1)}"
    return f"{count}, {killed} of them without an exit code" if killed else count


def _table(attempts: Mapping[int, Sequence[Attempt]]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: categories that are not 0, the total and the wall time.

    Process 0 stands for the run. With several processes there are two more columns: the mean over
    all processes, and the process with the most seconds.
    """
    accounts = {process: account(of_process) for process, of_process in attempts.items()}
    first = min(accounts)
    totals = {process: sum(seconds.values()) for process, seconds in accounts.items()}
    several = ["mean", "most"] if len(accounts) > 1 else []
    head = ["category", "seconds", "share", *several, "meaning"]

    def row(label: str, values: Mapping[int, float], meaning: str) -> list[str]:
        share = f"{values[first] / totals[first]:.1%}" if totals[first] else ""
        most = max(values, key=lambda process: values[process])
        mean = sum(values.values()) / len(values)
        more = [f"{mean:,.1f}", f"{values[most]:,.1f} (process {most})"] if several else []
        return [label, f"{values[first]:,.1f}", share, *more, meaning]

    rows = []
    for name in CATEGORIES:
        values = {process: seconds[name] for process, seconds in accounts.items()}
        if any(values.values()):
            rows.append(row(_LABELS[name], values, DESCRIPTIONS[name]))
    walls = {process: of[-1].seen - of[0].began for process, of in attempts.items()}
    rows.append(row("total", totals, "sum of the above"))
    rows.append(row("wall time", walls, "from the first start to the last sign of life"))
    return head, rows
