"""Hugging Face's model card (`README.md`) of an export.

It is built from the config, the progress and the metrics of the run. Unknown facts and
local paths are left out.
"""

import contextlib
import html
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge import __version__
from jaxforge.checkpoint.paths import Weights
from jaxforge.cli.redaction import redacted
from jaxforge.config.eval import AVERAGE_PREFIX
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from jaxforge.storage.untrusted_json import parse_metrics
from jaxforge.telemetry.numbers import human

FILE = "README.md"

_EVALUATED = ("loss", "perplexity", "bits_per_byte")


class Logged(NamedTuple):
    """Last logged metrics of a run up to a step.

    Attributes:
        train: metrics of the last logged step.
        evaluation: metrics of the last evaluation; empty if there is none.
        evaluated: step of the last evaluation.
    """

    train: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    evaluated: int


def read_logged(run: Path, step: int, weights: Weights = "raw") -> Logged:
    """Return the last metrics in `metrics.jsonl`; the file may be missing or truncated.

    Args:
        run: the run directory.
        step: last step.
        weights: the weights whose evaluation is returned.
    """
    train: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    with contextlib.suppress(OSError), (run / "metrics.jsonl").open("rb") as lines:
        for line, problem in map(parse_metrics, lines):
            if problem or line.get("step", step + 1) > step:
                continue
            train = line if "train/loss" in line else train
            evaluation = line if "eval/loss" in line else evaluation
    step = evaluation.get("step", 0)
    return Logged(train, dict(_of_weights(evaluation, weights)), step)


def _of_weights(evaluation: Mapping[str, Any], weights: Weights) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of an evaluation that are of these weights, without their prefix."""
    for name, value in evaluation.items():
        parent, slash, metric = name.rpartition("/")
        if metric.startswith(AVERAGE_PREFIX) == (weights == "ema"):
            yield f"{parent}{slash}{metric.removeprefix(AVERAGE_PREFIX)}", value


def model_card(
    name: str,
    config: JobConfig,
    progress: Progress | None,
    parameters: int,
    model_type: str,
    logged: Logged | None,
    *,
    has_tokenizer: bool,
    weights: Weights = "raw",
) -> str:
    """Return the text of the model card.

    Args:
        name: name of the run.
        config: config of the checkpoint.
        progress: progress of the checkpoint; None if unknown.
        parameters: number of parameters.
        model_type: Hugging Face's name of the family.
        logged: metrics of the run; None if the config does not describe how the model was trained.
        has_tokenizer: whether the directory of the card has a tokenizer.
        weights: the exported weights.
    """
    m = config.model
    size = human(parameters)
    trained = f", trained for {progress.step:,} steps" if progress and progress.step else ""
    sections = {
        "Use": _WITH_TOKENIZER if has_tokenizer else _WITHOUT_TOKENIZER,
        "Model": _table({
            "parameters": f"{parameters:,}",
            "architecture": model_type,
            "layers": m.n_layers,
            "width": m.dim,
            "heads": f"{m.n_heads}, {m.kv_heads} of keys and values, {m.head_size} wide",
            "feed-forward": m.ffn_dim,
            "experts": f"{m.num_experts}, {m.moe_top_k} for a token" if m.is_moe else None,
            "vocabulary": m.vocab_size,
            "context": m.max_seq_len,
        }),
        "Data": "\n".join(_data(config)) if logged else "",
        "Training": _table(_training(config, progress, logged.train)) if logged else "",
        "Evaluation": _evaluation(logged) if logged else "",
        "Versions": _table({
            "jaxforge": __version__,
            "jax": version("jax"),
            "Python": platform.python_version(),
        }) + "\n\nThese are of the export.",
    }  # fmt: skip
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items() if text)
    how = "made" if logged else "converted"
    about = f"A decoder language model with {size} parameters{trained}, {how} with jaxforge."
    if weights == "ema":
        train = config.train
        every = f", every {train.ema_interval} updates" if train.ema_interval > 1 else ""
        about += (
            " Its weights are an exponential moving average of the trained weights (decay "
            f"{train.ema_decay:g}{every})."
        )
    return f"{_front_matter(config, model_type)}\n# {_plain(name)}\n\n{about}\n\n{body}\n"


def _front_matter(config: JobConfig, model_type: str) -> str:
    """Return the YAML front matter; its strings are JSON, a subset of YAML."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in ("jaxforge", model_type)]
    if names := list(dict.fromkeys(_hub_names(config))):
        lines += ["datasets:", *(f"- {json.dumps(_printable(name))}" for name in names)]
    return "\n".join(["---", *lines, "---", ""])


def _hub_names(config: JobConfig) -> Iterator[str]:
    data = config.data
    if not data.datasets and not data.dataset_path and data.hf_dataset_name:
        yield data.hf_dataset_name
    yield from (name.hf_name for name in data.datasets if name.hf_name and not name.path)


_WITHOUT_TOKENIZER = """\
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
```"""
_WITH_TOKENIZER = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```"""


def _data(config: JobConfig) -> Iterator[str]:
    data = config.data
    sources = [(item.path, item.name or item.hf_name, item.weight) for item in data.datasets]
    if not sources:
        sources = [(data.dataset_path, data.hf_dataset_name or "", 1.0)]
    total = sum(weight for *_, weight in sources)
    for path, name, weight in sources:
        if not path and not name:
            yield "Random tokens."
            return
        share = f", weight {weight / total:.3g}" if len(sources) > 1 else ""
        yield f"- {_plain(name or _last_parts(path))}{_counts(path)}{share}"


def _last_parts(path: str) -> str:
    """Return the last two parts of a path, which reveal no local directory."""
    return "/".join(Path(redacted(path)).parts[-2:]).lstrip("/") if path else ""


def _counts(path: str) -> str:
    """Return the counts in a manifest of token shards, if it still exists."""
    from jaxforge.data.corpus.manifest import (
        Manifest,  # imported here: data of the Hub have no manifest
    )

    try:
        manifest = Manifest.read(Path(path)) if path else None
    except UserError:
        return ""
    if manifest is None:
        return ""
    return f": {human(manifest.tokens)} tokens in {manifest.documents:,} documents"


def _training(
    config: JobConfig, progress: Progress | None, last: Mapping[str, Any]
) -> dict[str, Any]:
    t, o, s = config.train, config.optimizer, config.scheduler
    batch = t.global_batch_size or t.batch_size * t.grad_accum_steps
    per_rank = "" if t.global_batch_size else " for each data-parallel rank"
    return {
        "steps": f"{progress.step:,} of {t.max_steps:,}" if progress else None,
        "tokens": f"{progress.tokens:,}" if progress else None,
        "update": f"{batch:,} sequences of {t.seq_len:,} tokens{per_rank}",
        "optimizer": o.name,
        "peak learning rate": f"{o.lr:g}",
        "weight decay": f"{o.weight_decay:g}",
        "schedule": f"{s.name}, {s.warmup_steps:,} steps of warm-up",
        "precision": f"{t.mixed_precision}, parameters in {t.param_dtype}",
        "seed": t.seed,
        "last loss": f"{last['train/loss']:.4f}" if _is_number(last.get("train/loss")) else None,
    }


def _evaluation(logged: Logged) -> str:
    """Return the table of the last evaluation: all sets together first, then each set."""
    metrics = {name.removeprefix("eval/"): value for name, value in logged.evaluation.items()
             if name.startswith("eval/") and _is_number(value)}  # fmt: skip
    sets = list(dict.fromkeys(name.rpartition("/")[0] for name in metrics))
    columns = [item for item in _EVALUATED if any(name.endswith(item) for name in metrics)]
    if not sets:
        return ""
    rows = [
        [
            _plain(name) or "all",
            *(_format(metrics.get(f"{name}/{item}" if name else item)) for item in columns),
        ]
        for name in sets
    ]
    lines = [["set", *columns], ["---"] * (1 + len(columns)), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\nOf step {logged.evaluated:,}."


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _plain(text: str) -> str:
    """Return text of a config on one line, with all Markdown syntax escaped."""
    line = " ".join(_printable(text).split())
    return _AT_START.sub(r"\1\\\2", _PUNCTUATION.sub(_escaped, line))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _escaped(match: re.Match[str]) -> str:
    """Escape HTML characters as entities, as renderers may pass HTML on, and others with \\."""
    return html.escape(match[0]) if match[0] in "<>&" else f"\\{match[0]}"


_PUNCTUATION = re.compile(r"[!-+;-@\[-`{-~]")
"""ASCII punctuation except `,-./:`, which has no meaning within a line."""
_AT_START = re.compile(r"^(\d{1,9}(?=\.(?: |$))|(?=-))([-.])")
"""Characters that begin a list item or a rule at the start of a line."""


def _table(rows: Mapping[str, Any]) -> str:
    """Return a table of the rows whose value is not None."""
    lines = [
        f"| {name} | {f'{value:,}' if isinstance(value, int) else _plain(value)} |"
        for name, value in rows.items()
        if value is not None
    ]
    return "\n".join(["| | |", "|---|---|", *lines])
