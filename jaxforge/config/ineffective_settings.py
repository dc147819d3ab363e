"""Warnings about settings that are valid but have no effect, or a harmful one.

Each warning names the key, its value and a change. `plan.checks` has the warnings that depend on
the data and the disk.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from jaxforge.config.eval import TASKS_PREFIX, EvalSchedule
from jaxforge.config.job import JobConfig, short_toml
from jaxforge.config.optimizer import UNUSUAL_LR
from jaxforge.config.section import Needs, Requires, WithinRun, facts
from jaxforge.storage import urls


def ineffective_settings(config: JobConfig, platform: str) -> list[str]:
    """Return the warnings about a config."""
    rates = [f"optimizer.{name}" for name in config.optimizer.large_rates(UNUSUAL_LR)]
    return [
        *rates,
        *_data(config),
        *_precision(config, platform),
        *_unused(config),
        *_average(config),
        *schedule(config),
        *_intervals(config),
    ]


def answers(config: JobConfig) -> list[str]:
    """Return a line for each key whose default differs from KempnerForge's."""
    scheduler, usual = config.scheduler, config.usual_warmup(10**9)
    is_shortened = not config.is_set("scheduler.warmup_steps") and scheduler.warmup_steps < usual
    if is_shortened and scheduler.name != "none":
        return [
            f"scheduler.warmup_steps is not set: {scheduler.warmup_steps:,} updates, a tenth of "
            f"the run (in KempnerForge {usual:,})"
        ]
    return []


def _data(config: JobConfig) -> Iterator[str]:
    section = config.data
    if not section.has_source and section.dataset_type in ("auto", "synthetic"):
        yield (
            "no data are set, so tokens are random: set data.dataset_path "
            "(jaxforge prepare TEXT --output DIR creates the data)"
        )
    if config.eval.enabled:
        yield from _evaluated_on_training_data(config)


def _evaluated_on_training_data(config: JobConfig) -> Iterator[str]:
    section = config.data
    paths = [source.path for source in section.datasets] or [section.dataset_path]
    trained = {_absolute(path) for path in paths if path}
    hf_keys = ("hf_dataset_name", "hf_dataset_config", "hf_dataset_split")
    for i, source in enumerate(config.eval.sources().values()):
        key = f"eval.datasets[{i}]"
        if source.dataset_path:
            if _absolute(source.dataset_path) in trained:
                yield _same(f"{key}.dataset_path = {short_toml(source.dataset_path)}")
        elif not trained and all(getattr(source, k) == getattr(section, k) for k in hf_keys):
            yield _same(f"{key}.hf_dataset_split = {short_toml(source.hf_dataset_split)}")


def _absolute(path: str) -> str:
    return path.rstrip("/") if urls.in_bucket(path) else str(Path(path).resolve())


def _same(what: str) -> str:
    return (
        f"{what} is also the training data, so its loss does not measure generalization: hold "
        "out a part (jaxforge prepare --validation-fraction 0.01)"
    )


def _precision(config: JobConfig, platform: str) -> Iterator[str]:
    precision = config.train.mixed_precision
    if platform == "cpu" and precision != "fp32":
        yield (
            f'train.mixed_precision = "{precision}" is slow on CPUs, which compute in float32: '
            f'change train.mixed_precision to "fp32"'
        )


def _unused(config: JobConfig) -> Iterator[str]:
    """Yield settings whose effect depends on another key.

    Values equal to the default do not count, because the config of a run contains all keys.
    """
    defaults = JobConfig().settings
    changed = {
        key: value for key, value in config.settings.items()
        if value is not False and value != defaults[key]
    }  # fmt: skip
    unused: dict[tuple[str, Needs], list[str]] = {}
    for key, needed, needs in _unmet(config):
        unused.setdefault((needed, needs), []).extend(
            f"{name} = {short_toml(x)}" for name, x in changed.items()
            if name == key or name.startswith(f"{key}.")
        )  # fmt: skip
    for (needed, needs), settings in unused.items():
        if settings:
            yield needs.message(settings, needed, config.settings[needed])


def _unmet(config: JobConfig) -> Iterator[tuple[str, str, Needs]]:
    """Yield each key or table without effect, the setting that it needs, and the need itself."""
    settings = config.settings  # made of all sections, by each access
    for key, needs in facts(JobConfig, Needs):
        is_refused = isinstance(needs, Requires)
        if not is_refused and not needs.is_met(settings[needs.absolute(key)]):
            yield key, needs.absolute(key), needs


def _average(config: JobConfig) -> Iterator[str]:
    """Yield settings of an average that is too short, or is lost in rounding errors."""
    train = config.train
    if not train.averages_weights:
        return
    if train.ema_interval > train.max_steps - train.ema_start:
        yield (
            f"train.ema_interval = {train.ema_interval:,} and train.ema_start = "
            f"{train.ema_start:,} leave no update of the average up to train.max_steps = "
            f"{train.max_steps:,}: change train.ema_interval to 1"
        )
    # An update rounds by up to a digit: a variance of 1/6 of its square, for evenly spread values.
    digits = math.sqrt(1 / 6 / (1 - train.ema_decay**2))
    if train.ema_dtype == "bfloat16" and digits > _LARGE_ERROR:
        yield (
            f'train.ema_dtype = "bfloat16" adds a random error of about {digits:.0f} in the last '
            f"digit with train.ema_decay = {train.ema_decay:g}: change train.ema_dtype to "
            '"float32"'
        )


_LARGE_ERROR = 2  # in units of the last digit


def schedule(config: JobConfig) -> Iterator[str]:
    """Yield parts of the schedule that the run is too short for."""
    last, scheduler = config.train.max_steps, config.scheduler
    warmup, decay, _ = scheduler.boundaries(last)
    if scheduler.name != "none" and warmup >= last:
        yield (
            f"scheduler.warmup_steps = {warmup:,} is not less than train.max_steps = {last:,}, so "
            "the learning rate never reaches optimizer.lr: lower scheduler.warmup_steps"
        )
    elif scheduler.name == "wsd" and not scheduler.stable_steps:
        yield (
            'scheduler.name = "wsd" without scheduler.stable_steps decays from the end of the '
            "warm-up: set scheduler.stable_steps"
        )
    elif scheduler.name not in ("none", "constant") and decay >= last:
        yield (
            f"scheduler.stable_steps = {scheduler.stable_steps:,} ends at update {decay:,}, not "
            f"before train.max_steps = {last:,}, so the learning rate never decays: lower "
            "scheduler.stable_steps"
        )
    for i, phase in enumerate(config.data.phases):
        if phase.start_step >= last:
            yield (
                f"data.phases[{i}].start_step = {phase.start_step:,} is not less than "
                f"train.max_steps = {last:,}, so the phase never begins: change one of them"
            )
    yield from _evaluation(config)
    if config.checkpoint.interval > last and not config.checkpoint.epoch_interval:
        yield (
            f"checkpoint.interval = {config.checkpoint.interval:,} exceeds train.max_steps = "
            f"{last:,}, so a killed run cannot resume: lower checkpoint.interval"
        )


def _evaluation(config: JobConfig) -> Iterator[str]:
    """Yield evaluation sets that are never evaluated, and metrics that are never logged."""
    section, last = config.eval, config.train.max_steps
    if not section.enabled:
        if section.has_tasks:
            key = "eval.tasks" if section.tasks else "eval.tasks_core"
            yield f"{key} has no effect with eval.enabled = false: change eval.enabled to true"
        return
    messages: list[str] = []
    for i, schedule in enumerate(section.schedules().values()):
        dataset, table = section.datasets[i], f"eval.datasets[{i}]"
        interval_key = "eval.interval" if dataset.interval is None else f"{table}.interval"
        start_key = "eval.start_step" if dataset.start_step is None else f"{table}.start_step"
        messages += _never_due(schedule, interval_key, start_key, last, "evaluation never runs")
    if section.has_tasks:
        key = "eval.interval" if section.tasks_interval is None else "eval.tasks_interval"
        schedule = section.tasks_schedule()
        messages += _never_due(schedule, key, "eval.start_step", last, "tasks are never evaluated")
    if not messages and section.sources():
        messages += _metrics_of_all_sets(config)
    yield from dict.fromkeys(messages)


def _never_due(
    schedule: EvalSchedule, interval_key: str, start_key: str, last: int, what: str
) -> Iterator[str]:
    """Yield the key whose value prevents all evaluations of a run of `last` updates."""
    if schedule.interval > last:
        yield (
            f"{interval_key} = {schedule.interval:,} exceeds train.max_steps = {last:,}, so "
            f"{what}: lower {interval_key}"
        )
    elif not schedule.due_steps(last):
        yield (
            f"{start_key} = {schedule.start_step:,} leaves no multiple of {interval_key} = "
            f"{schedule.interval:,} up to train.max_steps = {last:,}, so {what}: lower {start_key}"
        )


def _metrics_of_all_sets(config: JobConfig) -> Iterator[str]:
    """Yield keys whose metric covers all sets, if no step evaluates all sets."""
    schedules, last = config.eval.schedules(), config.train.max_steps
    # All sets are evaluated together at common multiples of their intervals only.
    interval = math.lcm(*(schedule.interval for schedule in schedules.values()))
    start = max(schedule.start_step for schedule in schedules.values())
    if EvalSchedule(interval, start, 1).due_steps(last):
        return
    stop, uses = config.early_stop, {}
    if config.checkpoint.keep_best_n:
        uses["checkpoint.best_metric"] = config.checkpoint.best_metric
    if stop.uses_metric:
        uses["early_stop.metric"] = stop.metric
    for key, metric in uses.items():
        if metric.startswith(TASKS_PREFIX):
            continue
        prefix, _, name = metric.partition("/")
        if prefix == "eval" and name.partition("/")[0] not in schedules:
            yield (
                f'{key} = "{metric}" is never logged, because no step up to train.max_steps = '
                f"{last:,} evaluates all sets: name the metric of one set, such as "
                f"eval/{next(iter(schedules))}/{name}"
            )


def _intervals(config: JobConfig) -> Iterator[str]:
    """Yield intervals that are longer than the run."""
    last, unused = config.train.max_steps, {key for key, *_ in _unmet(config)}
    settings = config.settings
    for key, fact in facts(JobConfig, WithinRun):
        is_used = not unused & {key, key.partition(".")[0]}
        steps = settings.get(key) or 0  # keys of tables in lists have rules of their own
        if steps > last and is_used and fact.is_reported:
            yield (
                f"{key} = {steps:,} exceeds train.max_steps = {last:,}, so it has no effect: lower "
                "it"
            )
    saves = config.checkpoint
    every = saves.export_interval
    has_interval = saves.interval <= last and not saves.epoch_interval
    if every and not saves.export_last and has_interval:
        n_saves = -(-last // saves.interval)
        if every > n_saves:
            yield (
                f"checkpoint.export_interval = {every:,} exceeds the {n_saves:,} checkpoints of "
                "the run, so nothing is exported: lower it, or set checkpoint.export_last"
            )
