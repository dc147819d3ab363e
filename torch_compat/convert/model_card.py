"""Hugging Face's model card (`README.md`) of an export.

It is built from the config, the progress and the metrics of the run. Unknown facts and
local paths are left out.
"""

import contextlib
import html
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge import __version__
from jaxforge.checkpoint.weights import Weights
from jaxforge.cli.redaction import redacted
from jaxforge.config.eval import AVERAGE_PREFIX
from jaxforge.config.job import JobConfig
from jaxforge.state.progress import Progress
from jaxforge.storage.untrusted_json import parse_metrics
from jaxforge.telemetry.numbers import human

FILE = "README.md"
LOADER = "AutoModelForCausalLM"
"""Class of transformers that opens language models."""


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
            # The run may have gone on after the exported checkpoint.
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
    loader: str = LOADER,
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
        loader: class of transformers that opens the directory.
    """
    m = config.model
    size = human(parameters)
    trained = f", trained for {progress.step:,} steps" if progress and progress.step else ""
    rows: dict[str, Any] = {
        "architecture": model_type,
        "layers, width": f"{m.n_layers}, {m.dim}",
        "heads": f"{m.n_heads}, {m.kv_heads} of keys and values, {m.head_size} wide",
        "feed-forward": m.ffn_dim,
        "experts": f"{m.num_experts}, {m.moe_top_k} for a token" if m.is_moe else None,
        "vocabulary, context": f"{m.vocab_size:,}, {m.max_seq_len:,}",
        **(_training(config, progress, logged.train) if logged else {}),
        "jaxforge": __version__,
    }
    lines = [f"| {name} | {_plain(str(value))} |" for name, value in rows.items() if value]
    table = "\n".join(["| | |", "|---|---|", *lines])
    how = "made" if logged else "converted"
    about = f"A decoder language model with {size} parameters{trained}, {how} with jaxforge."
    if weights == "ema":
        train = config.train
        every = f", every {train.ema_interval} updates" if train.ema_interval > 1 else ""
        about += (
            " Its weights are an exponential moving average of the trained weights (decay "
            f"{train.ema_decay:g}{every})."
        )
    use = _USE.replace(LOADER, loader) + _USE_TOKENIZER * has_tokenizer
    parts = [
        _front_matter(config, model_type),
        f"# {_plain(name)}",
        about,
        f"```python\n{use}```",
        table,
        _evaluation(logged) if logged else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _front_matter(config: JobConfig, model_type: str) -> str:
    """Return the YAML front matter; its strings are JSON, a subset of YAML."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in ("jaxforge", model_type)]
    # Local paths are left out: the Hub would take them for its own names.
    if names := [name for path, name in _sources(config) if name and not path]:
        lines += ["datasets:", *(f"- {json.dumps(_printable(name))}" for name in names)]
    return "\n".join(["---", *lines, "---"])


_USE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
"""
_USE_TOKENIZER = """\
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
"""


def _sources(config: JobConfig) -> list[tuple[str, str]]:
    """Return path and name on the Hub of each source of data; one of both is empty."""
    data = config.data
    sources = [(item.path, item.hf_name) for item in data.datasets]
    sources = sources or [(data.dataset_path, data.hf_dataset_name or "")]
    return list(dict.fromkeys((path, "" if path else name) for path, name in sources))


def _training(
    config: JobConfig, progress: Progress | None, last: Mapping[str, Any]
) -> dict[str, Any]:
    t, o, s = config.train, config.optimizer, config.scheduler
    batch = t.global_batch_size or t.batch_size * t.grad_accum_steps
    per_rank = "" if t.global_batch_size else " for each data-parallel rank"
    # The last part of a path reveals no local directory.
    data = [Path(redacted(path)).name if path else name for path, name in _sources(config)]
    return {
        "data": ", ".join(filter(None, data)) or "random tokens",
        "steps": f"{progress.step:,} of {t.max_steps:,}" if progress else None,
        "tokens": f"{progress.tokens:,}" if progress else None,
        "update": f"{batch:,} sequences of {t.seq_len:,} tokens{per_rank}",
        "optimizer": f"{o.name}, learning rate {o.lr:g}, weight decay {o.weight_decay:g}",
        "schedule": f"{s.name}, {s.warmup_steps:,} steps of warm-up",
        "precision": f"{t.mixed_precision}, parameters in {t.param_dtype}",
        "last loss": f"{last['train/loss']:.4f}" if _is_number(last.get("train/loss")) else None,
    }


def _evaluation(logged: Logged) -> str:
    """Return the losses of the last evaluation: all sets together first, then each set."""
    losses = {
        name.removeprefix("eval/").removesuffix("loss").rstrip("/") or "all": value
        for name, value in logged.evaluation.items()
        if name.startswith("eval/") and name.endswith("/loss") and _is_number(value)
    }
    if not losses:
        return ""
    lines = [f"| {_plain(name)} | {value:.4f} |" for name, value in losses.items()]
    title = f"| evaluation of step {logged.evaluated:,} | loss |"
    return "\n".join([title, "|---|---|", *lines])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _plain(text: str) -> str:
    """Return text of a config on one line, with all Markdown syntax escaped.

    The text must not begin a line, where digits and `-` have a meaning.
    """
    return _PUNCTUATION.sub(_escaped, " ".join(_printable(text).split()))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _escaped(match: re.Match[str]) -> str:
    """Escape HTML characters as entities, as renderers may pass HTML on, and others with \\."""
    return html.escape(match[0]) if match[0] in "<>&" else f"\\{match[0]}"


_PUNCTUATION = re.compile(r"[!-+;-@\[-`{-~]")
"""ASCII punctuation except `,-./:`, which has no meaning within a line."""
