"""`[eval]`: evaluation during training, and the names and directions of metrics that it logs."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Literal, NamedTuple

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from jaxforge.cli.suggestions import choices
from jaxforge.config.duration import PositiveSteps, Steps
from jaxforge.config.section import BucketPath, Interval, LocalPath, Needs, Section
from jaxforge.registry import Registry

METRICS = ("loss", "perplexity", "bits_per_byte")
"""Metrics that are logged for each evaluation set."""

AVERAGE_PREFIX = "ema_"
"""Prefix of the same metrics of the average of the parameters (`train.ema_decay`)."""

TASKS_PREFIX = "eval/tasks/"
"""Prefix of metrics of tasks (`eval.tasks`)."""

STDERR_SUFFIX = "_stderr"
"""Suffix of the standard error of a metric of a task."""

CORE_METRICS = (f"{TASKS_PREFIX}core", f"{TASKS_PREFIX}{AVERAGE_PREFIX}core")
"""CORE of the parameters, and of their average."""

EVAL_FUNCTIONS = Registry("eval.functions", "accuracy")
"""Registered evaluation functions (`training.eval_functions`)."""


Mode = Literal["auto", "min", "max"]
"""Direction in a config: "min" if lower values are better, "max" if higher values are better."""

_LOSS_GROUPS = ("loss", "terms")  # first parts of the names of losses
_LOWER = ("loss", "perplexity", "bits_per_byte", "kl")  # endings of names
_LOWER_NAMES = ("grad_norm", "step_time", "step_time_sec", "data_wait_sec")
_HIGHER_NAMES = (
    "acc", "acc_norm", "accuracy", "centered_acc", "core", "exact_match", "f1", "margin", "mcc",
    "mfu", "mfu_causal", "tflops_per_device", "tokens_per_sec",
)  # fmt: skip

BEST_METRIC, EARLY_STOP_METRIC = "checkpoint.best_metric", "early_stop.metric"
MODE_KEYS = {BEST_METRIC: "checkpoint.best_mode", EARLY_STOP_METRIC: "early_stop.mode"}
"""Keys of metrics that a run compares, and of their modes."""

STREAM = ("attention", "mlp", "residual")
"""Points of each layer: both contributions to the residual stream, and the stream itself."""

ATTENTION_WEIGHTS = "attention_weights"
LOGITS = "logits"
MAX_LOGITS = "max_logits"
"""The largest attention logits: a value of layers, but not a point that `[eval]` can name."""

POINTS = (*STREAM, ATTENTION_WEIGHTS, LOGITS)
"""Names of all points."""


class EvalDataset(Section):
    """`[[eval.datasets]]`: an evaluation set."""

    name: str = ""
    """Name in metrics: letters, digits, "_", "." and "-"; a single set needs no name."""
    dataset_path: BucketPath = ""
    """Directory of token shards, or the prefix of .bin and .idx files of Megatron-LM."""
    file_pattern: str = "*.npy"
    """Glob of the shards in dataset_path."""
    hf_dataset_name: str | None = None
    """Hugging Face dataset to tokenize and evaluate on, as an alternative to dataset_path."""
    hf_dataset_config: str | None = None
    """Configuration of the Hugging Face dataset."""
    hf_dataset_split: str = "validation"
    """Split of the Hugging Face dataset."""
    interval: Annotated[PositiveSteps | None, Interval(is_reported=False)] = None
    """Updates between evaluations of this set; by default eval.interval."""
    start_step: Steps | None = None
    """Updates before the first evaluation of this set; by default eval.start_step."""
    steps: PositiveInt | None = None
    """Batches per evaluation of this set; by default eval.steps."""

    def _problems(self) -> Iterator[str]:
        if not re.fullmatch(r"[A-Za-z0-9_.-]*", self.name):
            yield f'name = "{self.name}" must consist of letters, digits, "_", "." and "-"'
        if not self.dataset_path and not self.hf_dataset_name:
            yield "a set requires dataset_path or hf_dataset_name"


class EvalSchedule(NamedTuple):
    """Schedule of an evaluation set.

    Attributes:
        interval: updates between evaluations.
        start_step: updates before the first evaluation.
        steps: batches per evaluation.
    """

    interval: int
    start_step: int
    steps: int

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate the set after `step` updates."""
        return step >= self.start_step and step % self.interval == 0

    def due_steps(self, last: int) -> range:
        """Return the updates after which the set is evaluated, up to `last`."""
        # The first multiple of the interval that is not before start_step, nor step 0.
        first = -(-max(self.start_step, 1) // self.interval) * self.interval
        return range(first, last + 1, self.interval)


class EvalConfig(Section):
    """Schedule and data of evaluation."""

    enabled: bool = False
    """Evaluate during training."""
    interval: Annotated[PositiveSteps, Interval(is_reported=False)] = 1000
    """Updates between evaluations."""
    start_step: Steps = 0
    """Updates before the first evaluation, which follows at the next multiple of interval."""
    batch_size: PositiveInt | None = None
    """Sequences per evaluation batch; by default those of a training microbatch of all ranks."""
    steps: PositiveInt = 50
    """Batches per evaluation and set; each evaluation uses the same batches."""
    datasets: tuple[EvalDataset, ...] = ()
    """Evaluation sets."""
    functions: tuple[Annotated[str, EVAL_FUNCTIONS], ...] = ()
    """Names of registered evaluation functions, such as accuracy, logged for each set."""
    tasks: tuple[str, ...] = ()
    """Names or YAML files of lm_eval tasks and groups to evaluate on, such as lambada_openai."""
    tasks_path: Annotated[LocalPath, Needs("tasks")] = ""
    """Directory of YAML files with tasks of your own, by name."""
    tasks_core: LocalPath = ""
    """Directory of DCLM's CORE tasks (core.yaml, eval_meta_data.csv, eval_data) to evaluate on."""
    tasks_interval: Annotated[PositiveSteps | None, Interval(is_reported=False)] = None
    """Updates between evaluations on tasks; by default eval.interval."""
    tasks_num_fewshot: Annotated[NonNegativeInt | None, Needs("tasks")] = None
    """Examples before each question of lm_eval's tasks; by default those of each task."""
    tasks_limit: PositiveInt | None = None
    """Documents per task, always the first; by default all."""
    tasks_batch_size: PositiveInt = 32
    """Sequences per batch of tasks, over all devices."""
    tasks_weights: Literal["raw", "ema"] = "raw"
    """Weights that are evaluated on tasks: the parameters, or their average (train.ema_decay)."""
    sample_interval: Annotated[Steps, Interval()] = 0
    """Updates between generated text samples, also without evaluation; 0 disables them."""
    sample_prompts: Annotated[tuple[str, ...], Needs("sample_interval")] = ("",)
    """Prompts of the samples; an empty prompt begins a document."""
    sample_tokens: Annotated[PositiveInt, Needs("sample_interval")] = 64
    """Maximum number of tokens per sample."""
    sample_temperature: Annotated[NonNegativeFloat, Needs("sample_interval")] = 0.8
    """Sampling temperature; 0 selects the most likely token."""
    activations_interval: Annotated[Steps, Interval()] = 0
    """Updates between captures of activations, also without evaluation; 0 disables them."""
    activations_points: Annotated[tuple[str, ...], Needs("activations_interval")] = ("residual",)
    """Names or patterns of captured points: attention, mlp, residual, attention_weights, logits."""
    activations_layers: Annotated[tuple[NonNegativeInt, ...], Needs("activations_interval")] = ()
    """Indices of the captured layers, from 0; [] captures all."""
    activations_sequences: Annotated[PositiveInt, Needs("activations_interval")] = 8
    """Number of captured sequences, the first of the first evaluation set."""

    def _problems(self) -> Iterator[str]:
        if self.sample_interval and not self.sample_prompts:
            yield 'sample_prompts = [] is empty: give prompts, or [""] to begin a document'
        if problem := unknown_point(self.activations_points):
            yield f"activations_points: {problem}"
        if self.activations_interval and not self.activations_points:
            yield 'activations_points = [] is empty: give names of points, such as ["residual"]'
        names = Counter(dataset.name for dataset in self.datasets)
        if "" in names and len(self.datasets) > 1:
            yield "several evaluation sets require names: set name in each table of datasets"
        for name in (name for name, count in names.items() if count > 1 and name):
            yield f'two evaluation sets have the name "{name}": rename one'
        if len(set(self.functions)) < len(self.functions):
            yield "functions contains a name twice: remove one"
        if len(set(self.tasks)) < len(self.tasks):
            yield "tasks contains a name twice: remove one"

    def schedules(self) -> dict[str, EvalSchedule]:
        """Return the schedule of each set by name; a single set may have the name ""."""
        usual, schedules = EvalSchedule(self.interval, self.start_step, self.steps), {}
        for dataset in self.datasets:
            values = {key: getattr(dataset, key) for key in EvalSchedule._fields}
            changes = {key: value for key, value in values.items() if value is not None}
            schedules[dataset.name] = usual._replace(**changes)
        return schedules

    def due_sets(self, step: int) -> list[str]:
        """Return the names of the sets to evaluate after `step` updates."""
        return [name for name, schedule in self.schedules().items() if schedule.is_due(step)]

    def tasks_schedule(self) -> EvalSchedule:
        """Return the schedule of the tasks; `steps` does not apply to them."""
        return EvalSchedule(self.tasks_interval or self.interval, self.start_step, 0)

    def are_tasks_due(self, step: int) -> bool:
        """Return whether to evaluate on tasks after `step` updates."""
        return self.has_tasks and self.tasks_schedule().is_due(step)

    def is_sample_due(self, step: int) -> bool:
        """Return whether to write samples after `step` updates."""
        return self.sample_interval > 0 and step % self.sample_interval == 0

    def is_capture_due(self, step: int) -> bool:
        """Return whether to capture activations after `step` updates."""
        return self.activations_interval > 0 and step % self.activations_interval == 0

    @property
    def has_tasks(self) -> bool:
        """True if any task is named."""
        return bool(self.tasks or self.tasks_core)

    @property
    def captured_points(self) -> tuple[str, ...]:
        """Names of the captured points."""
        return matching_points(self.activations_points)

    @property
    def reads_data(self) -> bool:
        """True if a run reads evaluation sets, to evaluate or to capture activations."""
        return self.enabled or self.activations_interval > 0

    def sources(self) -> dict[str, EvalDataset]:
        """Return the evaluation sets by name; a single set may have the name ""."""
        return {dataset.name: dataset for dataset in self.datasets}

    def metric_names(self, *, has_average: bool = False) -> tuple[str, ...]:
        """Return the metrics of an evaluation: over all sets, then for each named set."""
        sets = ["", *(f"{dataset.name}/" for dataset in self.datasets if dataset.name)]
        metrics = [*METRICS, *(AVERAGE_PREFIX + metric for metric in METRICS if has_average)]
        return tuple(f"eval/{name}{metric}" for name in sets for metric in metrics)


def higher_is_better(metric: str, mode: Mode = "auto") -> bool | None:
    """Return whether higher values are better; None if neither mode nor name determine it."""
    if mode != "auto":
        return mode == "max"
    group, *parts = metric.split("/")
    # Parts that count layers or depths do not name the metric.
    names = [part for part in parts if not part.startswith(("layers.", "depths."))]
    name = names[-1].removeprefix(AVERAGE_PREFIX) if names else group
    if name in _HIGHER_NAMES:
        return True
    if group in _LOSS_GROUPS or name in _LOWER_NAMES or name.endswith(_LOWER):
        return False
    return None


def unknown_direction(key: str, metric: str) -> str:
    """Return the message for a metric whose direction is unknown."""
    return (
        f'{key} = "{metric}": the direction of this metric is unknown. Set {MODE_KEYS[key]} to '
        '"min" if lower values are better, or to "max" if higher values are better'
    )


def matching_points(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the points that match a pattern, such as "att*", in the order of `POINTS`."""
    patterns = tuple(patterns)
    return tuple(name for name in POINTS if any(fnmatchcase(name, pattern) for pattern in patterns))


def unknown_point(patterns: Iterable[str]) -> str | None:
    """Return a message about the first pattern that matches no name, or None."""
    for pattern in patterns:
        if not matching_points([pattern]):
            return f'unknown point "{pattern}"{choices(pattern, POINTS)}'
    return None
