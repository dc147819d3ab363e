"""Account of a run's time: a stacked bar for the page, and a table for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from jaxforge.runs.reading import Run
from jaxforge.telemetry.goodput import CATEGORIES, DESCRIPTIONS, Attempt, Seconds, account, ratio
from jaxforge.telemetry.numbers import duration
from jaxforge.tools.pages.parts import details, table

_LABELS: Mapping[str, str] = {name: name.replace("_", " ") for name in CATEGORIES}
_NARROW = 0.002  # share of the bar below which a category is not drawn


def bars(runs: Sequence[Run]) -> str:
    """Return a stacked bar for each run with an account, and one legend; empty without accounts."""
    accounts = {run.name: account(run.attempts[0]) for run in runs if run.attempts.get(0)}
    if not accounts:
        return ""
    drawn = [
        f"<figure><figcaption><h3>{escape(_title(name, seconds, len(runs)))}</h3></figcaption>"
        f'<div class="stack">{"".join(_segments(seconds))}</div></figure>'
        for name, seconds in accounts.items()
    ]
    shown = [name for name in CATEGORIES if any(seconds[name] for seconds in accounts.values())]
    legend = "".join(
        f'<li title="{escape(DESCRIPTIONS[name])}"><i class="t-{name}"></i>{_LABELS[name]}</li>'
        for name in shown
    )
    return f'<div class="goodput">{"".join(drawn)}<ul class="legend">{legend}</ul></div>'


def _title(name: str, seconds: Seconds, n_runs: int) -> str:
    title = f"Goodput {ratio(seconds):.1%} of {duration(sum(seconds.values()))}"
    return f"{title}: {name}" if n_runs > 1 else title


def _segments(seconds: Seconds) -> Iterator[str]:
    total = sum(seconds.values()) or 1.0
    for name, value in seconds.items():
        share = value / total
        if share >= _NARROW:
            text = escape(f"{_LABELS[name]}: {duration(value)} ({share:.1%})")
            yield f'<i class="t-{name}" style="flex: {share:.5f}" title="{text}"></i>'


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
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    numbers = range(1, len(head) - 1)
    table_lines = [
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    seconds = account(attempts[min(attempts)])
    summary = f"{name}: goodput {ratio(seconds):.2%}, {_attempts(attempts[min(attempts)])}"
    return "\n".join((summary, "", *table_lines))


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
