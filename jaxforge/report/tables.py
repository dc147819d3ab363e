"""What the page says in words and tables: facts, evaluations, configs."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

import numpy as np

from jaxforge.config.job import JobConfig, shown
from jaxforge.report.pictures import by_label
from jaxforge.report.reading import Run
from jaxforge.report.scale import duration, exact
from jaxforge.telemetry.console import human

Rows = Iterable[Sequence[str]]


def facts(runs: Sequence[Run]) -> str:
    """The head of the page: a list for one run, a table to compare several."""
    if len(runs) == 1:
        items = "".join(
            f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>"
            for name, text in _facts(runs[0]).items()
        )
        return f"<dl>{items}</dl>"
    columns = [_facts(run) for run in runs]
    rows = [[run.name, *column.values()] for run, column in zip(runs, columns, strict=True)]
    return table("", ["run", *columns[0]], rows, swatches=True)


def below(runs: Sequence[Run]) -> str:
    """What stands under the charts."""
    latest = max(run.series["train/loss"].time[-1] for run in runs)
    moment = datetime.fromtimestamp(latest, UTC).strftime("%Y-%m-%d %H:%M:%S")
    configs = "".join(
        f"<details><summary>config.toml of {escape(run.name)}</summary>"
        f"<pre>{escape(run.toml)}</pre></details>"
        for run in runs
    )
    evaluations, differences = list(_evaluations(runs)), list(_differences(runs))
    return (
        (table("Evaluations", _EVALUATION, evaluations) if evaluations else "")
        + (table("Configs", ["key", *(r.name for r in runs)], differences) if differences else "")
        + "".join(_samples(run) for run in runs)
        + "".join(_experts(run) for run in runs)
        + configs
        + f"<footer>The last logged step is of {moment} UTC.</footer>"
    )


def _facts(run: Run) -> Mapping[str, str]:
    m, loss = run.config.model, run.series["train/loss"].last
    skipped = f"{run.skipped:,} ({run.skipped / run.steps:.2%})" if run.skipped else "none"
    return {
        "model": f"{m.n_layers} layers, dim {m.dim:,}, {m.n_heads}/{m.kv_heads} heads of "
        f"{m.head_size}, ffn {m.ffn_dim:,}, vocabulary {m.vocab_size:,}",
        "parameters": human(run.parameters),
        "steps": f"{run.steps:,} of {run.config.train.max_steps:,}",
        "tokens": f"{run.tokens:,}" if run.tokens < 1e7 else human(run.tokens),
        "wall time": f"{duration(run.seconds)}, {duration(run.seconds_in_steps)} of it in steps",
        "last loss": exact(loss),
        "best evaluation loss": _best_evaluation(run),
        "skipped steps": skipped,
        "resumed": _resumed(run),
    }


def _best_evaluation(run: Run) -> str:
    if "eval/loss" not in run.series:
        return "none"
    value, step = _best(run, "eval/loss")
    return f"{exact(value)} at step {step:,}"


def _best(run: Run, name: str) -> tuple[float, int]:
    """The lowest value, and its step; NaN where none is finite."""
    step, _, value = run.series[name]
    lowest = int(np.argmin(np.nan_to_num(value, nan=np.inf)))
    return float(value[lowest]), int(step[lowest])


def _resumed(run: Run) -> str:
    if run.resumes is None:
        return "unknown: no logs/process_0.log"
    steps = [
        f"{step:,}" + (f" ({n} times)" if (n := len(list(group))) > 1 else "")
        for step, group in itertools.groupby(run.resumes)
    ]
    return f"from step {', '.join(steps)}" if steps else "never"


_EVALUATION = ["set", "loss", "perplexity", "bits per byte", "lowest loss", "at step"]


def _evaluations(runs: Sequence[Run]) -> Rows:
    for run in runs:
        for label, name in by_label(run.series, "eval/", "/loss").items():
            lowest, step = _best(run, name)
            others = [name.removesuffix("loss") + kind for kind in ("perplexity", "bits_per_byte")]
            yield [
                label if len(runs) == 1 else f"{run.name}: {label}",
                exact(run.series[name].last),
                *(exact(run.series[o].last) if o in run.series else "" for o in others),
                exact(lowest),
                f"{step:,}",
            ]


def _samples(run: Run) -> str:
    """What the model wrote, the latest first."""
    if not run.samples:
        return ""
    texts = (f"step {step:,}\n{prompt}{text}" for step, prompt, text in reversed(run.samples))
    return (
        f"<details><summary>samples of {escape(run.name)}</summary>"
        f"<pre>{escape(_BETWEEN_SAMPLES.join(texts))}</pre></details>"
    )


_BETWEEN_SAMPLES = f"\n\n{'-' * 40}\n\n"


def _experts(run: Run) -> str:
    """Who was idle and who was busy at the last step: there are as many rows as layers."""
    if run.loads is None:
        return ""
    rows = []
    for layer, load in zip(run.loads.layers, run.loads.last, strict=True):
        ends = [(int(i), exact(float(load[i]))) for i in (load.argmin(), load.argmax())]
        told = [f"{value} (expert {i})" for i, value in ends]
        rows.append([str(layer), *told, str(int(np.sum(load == 0)))])
    title = f"load of experts of {run.name} at step {run.loads.last_step:,}"
    return (
        f"<details><summary>{escape(title)}</summary>"
        f"{table('', ['layer', 'least loaded', 'most loaded', 'idle experts'], rows)}</details>"
    )


def _differences(runs: Sequence[Run]) -> Rows:
    """Keys that are not the same in all configs; where they write to always differs."""
    for section in JobConfig.model_fields:
        for key, _ in getattr(runs[0].config, section):
            values = [shown(getattr(getattr(run.config, section), key)) for run in runs]
            if len(set(values)) > 1 and (section, key) != ("checkpoint", "dir"):
                yield [f"{section}.{key}", *values]


def table(title: str, head: Sequence[str], rows: Rows, *, swatches: bool = False) -> str:
    """A table of text.

    Args:
        title: above it; none if empty.
        head: names of the columns.
        rows: as many cells each.
        swatches: show the colours of runs beside their rows.
    """
    caption = f"<caption>{title}</caption>" if title else ""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = []
    for i, (first, *rest) in enumerate(rows):
        swatch = f'<i class="c{i % 8}"></i>' if swatches else ""
        cells = "".join(f"<td>{escape(text)}</td>" for text in rest)
        body.append(f'<tr><th scope="row">{swatch}{escape(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table>{caption}<thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
