"""Rules of `[eval]` with other sections, and of the metrics that a run compares."""

from collections.abc import Iterator

from jaxforge.cli.suggestions import choices
from jaxforge.config.axes import Mesh
from jaxforge.config.eval import (
    BEST_METRIC,
    EARLY_STOP_METRIC,
    TASKS_PREFIX,
    higher_is_better,
    unknown_direction,
)
from jaxforge.config.job import JobConfig
from jaxforge.config.train import CROSS_ENTROPIES


def eval_has_source(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require a data source or tasks for evaluation."""
    section = config.eval
    if section.enabled and not section.sources() and not section.has_tasks:
        yield (
            "eval.enabled = true requires data: set eval.datasets or eval.tasks, or "
            "eval.enabled = false"
        )


def captures_have_source(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require an evaluation set for captured activations."""
    section, names = config.eval, list(config.eval.sources())
    if not section.activations_interval:
        return
    if not names:
        yield (
            f"eval.activations_interval = {section.activations_interval} requires data: set "
            "eval.datasets, or eval.activations_interval = 0"
        )
    elif section.activations_set and section.activations_set not in names:
        asked = f'eval.activations_set = "{section.activations_set}"'
        if names == [""]:
            yield f"{asked}: the only evaluation set has no name; remove it"
        else:
            yield f"{asked} is not an evaluation set{choices(section.activations_set, names)}"


def captured_layers_exist(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that captured layers exist in the model."""
    last = config.model.n_layers - 1
    absent = [n for n in config.eval.activations_layers if n > last]
    if config.eval.activations_interval and absent:
        yield (
            f"eval.activations_layers: layer {absent[0]} does not exist: the layers of "
            f"model.n_layers = {last + 1} are 0 to {last}"
        )


def best_metric_is_logged(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that the metric that ranks checkpoints is logged."""
    metric, known = config.checkpoint.best_metric, _evaluation_metrics(config)
    if not config.eval.enabled:
        return
    if metric.startswith(TASKS_PREFIX):
        yield from _tasks_are_named(BEST_METRIC, config)
    elif metric not in known and not _has_terms(config):
        near = choices(metric, known)
        yield f'checkpoint.best_metric = "{metric}" is not a metric of [eval]{near}'
    elif config.checkpoint.keep_best_n and not config.eval.sources():
        yield (
            f'checkpoint.keep_best_n ranks by "{metric}", which requires an evaluation set: set '
            "eval.datasets, or checkpoint.keep_best_n = 0"
        )


def early_stop_metric_is_logged(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that the early-stop metric is logged."""
    stop, known = config.early_stop, _evaluation_metrics(config)
    if not stop.uses_metric:
        return
    if not stop.metric.startswith("eval/"):
        if stop.metric.partition("/")[0] not in _STEP_METRIC_GROUPS:
            near = choices(stop.metric, (*_STEP_METRICS, *known))
            yield f'early_stop.metric = "{stop.metric}" is not a metric of a run{near}'
        elif higher_is_better(stop.metric, stop.mode) is None:
            yield unknown_direction(EARLY_STOP_METRIC, stop.metric)
    elif not config.eval.enabled:
        yield (
            f'early_stop.metric = "{stop.metric}" requires eval.enabled = true; or use "train/loss"'
        )
    elif stop.metric.startswith(TASKS_PREFIX):
        yield from _tasks_are_named(EARLY_STOP_METRIC, config)
    elif not config.eval.sources():
        yield (
            f'early_stop.metric = "{stop.metric}" requires an evaluation set: set '
            'eval.datasets, or use "train/loss"'
        )
    elif stop.metric not in known and not _has_terms(config):
        near = choices(stop.metric, known)
        yield f'early_stop.metric = "{stop.metric}" is not a metric of [eval]{near}'


_STEP_METRICS = ("train/loss", "train/grad_norm", "train/lr", "smoothed/loss")
"""Metrics that every logged step has."""
_STEP_METRIC_GROUPS = {
    "train", "smoothed", "terms", "loss", "data", "dpo", "distillation", "model", "moe",
    "attention", "gpu", "goodput",
}  # fmt: skip
"""First parts of the names of metrics that a logged step may have."""


def _tasks_are_named(key: str, config: JobConfig) -> Iterator[str]:
    """Yield a problem if a key names a metric of a task, and the config has no tasks."""
    if not config.eval.has_tasks:
        yield (
            f'{key} = "{config.settings[key]}" is a metric of a task, and there are no tasks: set '
            "eval.tasks or eval.tasks_core"
        )


def _evaluation_metrics(config: JobConfig) -> tuple[str, ...]:
    return config.eval.metric_names(has_average=config.train.averages_weights)


def _has_terms(config: JobConfig) -> bool:
    """Return whether a loss, evaluation function or model may add metrics, known once built."""
    train = config.train
    own = train.loss_fn not in CROSS_ENTROPIES or train.objective != "next_token"
    return bool(own or config.eval.functions) or config.model.model_type != "transformer"
