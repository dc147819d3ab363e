"""Facts and tables of the page: differences, evaluations, account of time, samples, configs."""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

import numpy as np

from jaxforge.cli.redaction import redacted
from jaxforge.config.eval import AVERAGE_PREFIX, STDERR_SUFFIX, TASKS_PREFIX, higher_is_better
from jaxforge.config.job import short_toml
from jaxforge.runs.reading import Run
from jaxforge.telemetry.goodput import CATEGORIES, DESCRIPTIONS, Attempt, Seconds, account, ratio
from jaxforge.telemetry.numbers import duration, exact, human
from jaxforge.tools.report.charts import constants, metric_name

Rows = Iterable[Sequence[str]]
"""Rows of a table, as cells of text."""

_LONG_FACT = 40  # characters; a longer text spans two columns
_SAMPLES = 120  # newest samples, over all runs
_LONGEST = 4000  # characters of a sample


def facts(runs: Sequence[Run]) -> str:
    """Return the HTML above the charts: a list for one run, a table of differences for several."""
    if len(runs) > 1:
        return _comparison(runs)
    return fact_list(_facts_of_run(runs[0]))


def below(runs: Sequence[Run]) -> str:
    """Return the HTML below the charts."""
    latest = max(run.series["train/loss"].time[-1] for run in runs)
    evaluations, tasks = list(_evaluations(runs)), list(_tasks(runs))
    unchanged = [
        [constant.name, _one_or_each(constant.values, runs)] for constant in constants(runs)
    ]
    return (
        (table("Evaluations", _EVALUATION, evaluations) if evaluations else "")
        + (table("Tasks", _TASKS, tasks) if tasks else "")
        + (table("What did not change", ["metric", "value"], unchanged) if unchanged else "")
        + _samples(runs)
        + "".join(_account(run) for run in runs)
        + "".join(_starts(run) for run in runs)
        + "".join(
            details(f"config.toml of {run.name}", f"<pre>{escape(redacted(run.toml))}</pre>")
            for run in runs
        )
        + f"<footer>The last logged step is of {_moment(latest)}.</footer>"
    )


def _facts_of_run(run: Run) -> Mapping[str, str]:
    m = run.config.model
    return {
        **_reached(run),
        **_parent(run),
        "model": f"{m.n_layers} layers, dim {m.dim:,}, {m.n_heads}/{m.kv_heads} heads of "
        f"{m.head_size}, ffn {m.ffn_dim:,}, vocabulary {m.vocab_size:,}",
        "parameters": "?" if run.parameters is None else human(run.parameters),
        **(_of_start(run.starts[-1]) if run.starts else {}),
    }


def _parent(run: Run) -> Mapping[str, str]:
    """Return the checkpoint of another run from which a run began, if any."""
    parent = run.starts[0].get("parent") if run.starts else None
    if not parent:
        return {}
    name = "branch of" if parent["is_branch"] else "started from"
    return {name: f"{parent['run']} at step {parent['step']:,}"}


def _reached(run: Run) -> Mapping[str, str]:
    loss = run.series["train/loss"]
    average = "eval/ema_loss"
    skipped = f"{run.skipped:,} ({run.skipped / max(1, run.steps):.2%})" if run.skipped else "none"
    return {
        "smoothed loss": exact(loss.smoothed),
        "best evaluation loss": _best_loss(run, "eval/loss"),
        **({"best loss of the average": _best_loss(run, average)} if average in run.series else {}),
        **_best_by_config(run, {"eval/loss", average}),
        "last loss": exact(loss.last),
        "steps": f"{run.steps:,} of {run.config.train.max_steps:,}",
        "tokens": f"{run.tokens:,}" if run.tokens < 1e7 else human(run.tokens),
        "wall time": duration(run.seconds),
        "time in steps": duration(run.seconds_in_steps),
        "skipped steps": skipped,
        "resumed": _resumed(run),
    }


def _best_loss(run: Run, name: str) -> str:
    if name not in run.series:
        return "none"
    value, step = _best(run, name, is_higher_better=False)
    return f"{exact(value)} at step {step:,}"


def _best_by_config(run: Run, shown: Collection[str]) -> Mapping[str, str]:
    """Return the best value of `checkpoint.best_metric`, unless it is unknown or shown."""
    name, mode = run.config.checkpoint.best_metric, run.config.checkpoint.best_mode
    direction = higher_is_better(name, mode)
    if name in shown or name not in run.series or direction is None:
        return {}
    value, step = _best(run, name, is_higher_better=direction)
    return {f"best {name}": f"{exact(value)} at step {step:,}"}


def _of_start(start: Mapping[str, Any]) -> Mapping[str, str]:
    git, versions = start["git"], start["versions"]
    commit = git.get("commit", "not under git")[:12] + (", changed" if git.get("changed") else "")
    return {
        "devices": str(start.get("devices", "")),
        "code": commit,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "command": redacted(start["command"]),
    }


def _best(run: Run, name: str, *, is_higher_better: bool) -> tuple[float, int]:
    """Return the best value, and its step; NaN if none is finite."""
    step, _, value = run.series[name]
    # [n]; the smallest rank is best, and values that are not finite never are.
    rank = -value if is_higher_better else value
    best = int(np.argmin(np.nan_to_num(rank, nan=np.inf)))
    return float(value[best]), int(step[best])


def _resumed(run: Run) -> str:
    if not run.starts:
        return "unknown: no starts.jsonl"
    steps = [
        f"{step:,}" + (f" ({n} times)" if (n := len(list(group))) > 1 else "")
        for step, group in itertools.groupby(run.resumes)
    ]
    return f"from step {', '.join(steps)}" if steps else "never"


def _comparison(runs: Sequence[Run]) -> str:
    """Return a table of settings and results that differ, one row per run, the best loss first."""
    results = [_facts_of_run(run) for run in runs]
    names = list(dict.fromkeys(name for result in results for name in result))
    always = ("smoothed loss", "best evaluation loss", "tokens", "wall time")
    names = [
        name
        for name in names
        if name in always or len({result.get(name) for result in results}) > 1
    ]
    settings = dict(_differences(runs))
    losses = [run.series["train/loss"].smoothed for run in runs]
    # Diverged runs are last.
    order = np.argsort(np.nan_to_num(losses, nan=np.inf), kind="stable").tolist()
    rows = [
        [
            runs[i].name,
            *(values[i] for values in settings.values()),
            *(results[i].get(name, "unknown") for name in names),
        ]
        for i in order
    ]
    head = ["run", *settings, *names]
    return table("What differs", head, rows, runs=order)


def _differences(runs: Sequence[Run]) -> Iterator[tuple[str, list[str]]]:
    """Yield the settings that differ between runs, except their output directories."""
    settings = [run.config.settings for run in runs]
    for key in settings[0]:
        values = [short_toml(run_settings[key]) for run_settings in settings]
        # Run directories always differ.
        if len(set(values)) > 1 and key != "checkpoint.dir":
            yield key, values


_EVALUATION = ["set", "loss", "perplexity", "bits per byte", "lowest loss", "at step"]


def _evaluations(runs: Sequence[Run]) -> Rows:
    for run in runs:
        for name in run.series:
            if not re.fullmatch(rf"eval/(?!tasks/)(.*/)?({AVERAGE_PREFIX})?loss", name):
                continue
            title, label = metric_name(name)
            label += ", average" if AVERAGE_PREFIX in title else ""
            lowest, step = _best(run, name, is_higher_better=False)
            related = [name.removesuffix("loss") + kind for kind in ("perplexity", "bits_per_byte")]
            yield [
                label if len(runs) == 1 else f"{run.name}: {label}",
                exact(run.series[name].last),
                *(exact(run.series[o].last) if o in run.series else "" for o in related),
                exact(lowest),
                f"{step:,}",
            ]


_TASKS = ["task", "metric", "last", "standard error", "at step", "first", "best", "at step"]


def _tasks(runs: Sequence[Run]) -> Rows:
    """Yield the last value of each metric of a task, with its standard error, first and best.

    The best value is empty if the name of a metric does not determine its direction.
    """
    for run in runs:
        for name in run.series:
            if not name.startswith(TASKS_PREFIX) or name.endswith(STDERR_SUFFIX):
                continue
            task, _, metric = name.removeprefix(TASKS_PREFIX).rpartition("/")
            series, errors = run.series[name], run.series.get(name + STDERR_SUFFIX)
            direction, best = higher_is_better(name), ["", ""]
            if direction is not None:
                value, step = _best(run, name, is_higher_better=direction)
                best = [exact(value), f"{step:,}"]
            yield [
                (task or "all") if len(runs) == 1 else f"{run.name}: {task or 'all'}",
                metric,
                exact(series.last),
                "" if errors is None else exact(errors.last),
                f"{int(series.step[-1]):,}",
                exact(float(series.value[0])),
                *best,
            ]


def _one_or_each(values: Sequence[float | None], runs: Sequence[Run]) -> str:
    logged = {run.name: value for run, value in zip(runs, values, strict=True) if value is not None}
    texts = {name: exact(value) for name, value in logged.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name}: {text}" for name, text in texts.items())


def _samples(runs: Sequence[Run]) -> str:
    """Return the samples of each model, the newest first."""
    return "".join(
        details(
            f"samples of {run.name}",
            # The newest come first, and runs have equal shares.
            "".join(map(_sample, run.samples[: -1 - max(1, _SAMPLES // len(runs)) : -1])),
        )
        for run in runs
        if run.samples
    )


def _sample(sample: Mapping[str, Any]) -> str:
    prompt, text = (escape(str(sample[key])[:_LONGEST]) for key in ("prompt", "text"))
    return (
        f'<p class="sample"><small>step {int(sample["step"]):,}</small><b>{prompt}</b>'
        f"<span>{text}</span></p>"
    )


def _starts(run: Run) -> str:
    if len(run.starts) < 2:
        return ""
    starts = [
        {"at": _moment(start["time"]), "from step": f"{start['step']:,}", **_of_start(start)}
        for start in reversed(run.starts)
    ]
    rows = [[*start.values()] for start in starts]
    return details(f"starts of {run.name}", table("", list(starts[0]), rows))


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


_LABELS: Mapping[str, str] = {name: name.replace("_", " ") for name in CATEGORIES}
_COLOURS: Mapping[str, str] = {
    "step": "c2", "rework": "alarm", "data_wait": "c5", "evaluation": "c4", "save": "c6",
    "rollback": "c1", "start": "c7", "restore": "c3", "compile": "c0", "other": "soft",
    "down": "ink", "idle": "hair",
}  # fmt: skip
"""Names of colours of the style by category."""


def goodput_bars(runs: Sequence[Run]) -> str:
    """Return a stacked bar for each run with an account, and one legend; empty without accounts."""
    accounts = {run.name: account(run.attempts[0]) for run in runs if run.attempts.get(0)}
    if not accounts:
        return ""
    drawn = [
        f"<figure><h3>{escape(_bar_title(name, seconds, len(runs)))}</h3>{_bar(seconds)}</figure>"
        for name, seconds in accounts.items()
    ]
    shown = [name for name in CATEGORIES if any(seconds[name] for seconds in accounts.values())]
    items = "".join(
        f'<li><i style="--c: var(--{_COLOURS[name]})"></i>{_LABELS[name]}</li>' for name in shown
    )
    return f'{"".join(drawn)}<ul class="key">{items}</ul>'


def _bar_title(name: str, seconds: Seconds, n_runs: int) -> str:
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


def _account(run: Run) -> str:
    """Return a collapsed table of the account, with a column per process; empty without one."""
    if not run.attempts:
        return ""
    head, rows = _account_rows(run.attempts)
    return details(f"time of {run.name}", table("", head, rows, aligns=True))


def goodput_text(name: str, attempts: Mapping[int, Sequence[Attempt]]) -> str:
    """Return the account of a run as a table for the terminal.

    Args:
        name: the run directory.
        attempts: attempts of each process.
    """
    head, rows = _account_rows(attempts)
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


def _account_rows(attempts: Mapping[int, Sequence[Attempt]]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: categories that are not 0, the total and the wall time.

    Process 0 stands for the run. With several processes there are two more columns: the mean over
    all processes, and the process with the most seconds.
    """
    accounts = {process: account(of_process) for process, of_process in attempts.items()}
    # Process 0, unless its file is lost.
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
    # Compared with the total, this shows time that no attempt accounts for.
    walls = {process: of[-1].seen - of[0].began for process, of in attempts.items()}
    rows.append(row("total", totals, "sum of the above"))
    rows.append(row("wall time", walls, "from the first start to the last sign of life"))
    return head, rows


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
