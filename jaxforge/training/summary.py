"""`schedule_summary.txt`: the schedule of a run in numbers, for people to read.

Steps count updates: an entry at step 1,000 happens after update 1,000 and before the next one, as
with checkpoints.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxforge.checkpoint.save_policy import SavePolicy
from jaxforge.config.batch_ramp import BatchRamp
from jaxforge.config.eval import ATTENTION_WEIGHTS, LOGITS, STREAM
from jaxforge.config.job import JobConfig, toml
from jaxforge.config.optimizer import SCHEDULERS
from jaxforge.errors import file_error
from jaxforge.model.transformer import Model
from jaxforge.optim.schedule import learning_rate_after
from jaxforge.parallel.device_memory import gigabytes
from jaxforge.step.group_traffic import group_traffic
from jaxforge.storage import safe_files
from jaxforge.telemetry.numbers import human

FILE = "schedule_summary.txt"
_SHOWN = 8  # steps per list


def write_summary(run: Path, text: str) -> None:
    """Write the file into a run directory. A restart replaces it.

    Raises:
        UserError: the file cannot be written.
        StorageError: the disk is full or fails.
    """
    if jax.process_index() != 0:
        return
    try:
        safe_files.replace_text(run / FILE, text)
    except OSError as error:
        raise file_error(f"checkpoint.dir = {run}", error) from error


def schedule_summary(config: JobConfig, dp: int, sequences_per_epoch: int | None = None) -> str:
    """Return the schedule of a run as text, with one paragraph per subject."""
    ramp = config.train.ramp(dp)
    subjects = {
        "length": _length(config, ramp, sequences_per_epoch),
        "batch": _batch(config, ramp),
        "learning rate": _learning_rate(config),
        "phases": _phases(config),
        "evaluation": _evaluation(config),
        "samples": _samples(config),
        "activations": _activations(config),
        "checkpoints": _checkpoints(config),
        "early stopping": _early_stop(config),
    }
    return "\n".join(
        "\n".join([name, *(f"  {line}" for line in lines), ""]) for name, lines in subjects.items()
    )


def _length(config: JobConfig, ramp: BatchRamp, per_epoch: int | None) -> Iterator[str]:
    samples = ramp.samples(config.train.max_steps)
    yield f"{config.train.max_steps:,} updates"
    yield f"{samples * config.train.seq_len:,} tokens"
    yield f"{samples:,} sequences of {config.train.seq_len:,} tokens"
    if per_epoch is None:
        yield "no epochs: the length of the data is not known"
    else:
        rounding = epoch_rounding(per_epoch, ramp.sequences(config.train.grad_accum_steps))
        yield f"{samples / per_epoch:.4g} epochs of {per_epoch:,} sequences{rounding}"


def epoch_rounding(per_epoch: int, per_update: int) -> str:
    """Return the end of a sentence about epochs, if whole updates change their number visibly."""
    # Below a twentieth, rounding does not change the printed digits of the epochs.
    is_visible = per_update > per_epoch / 20
    return f", in whole updates of {per_update:,} sequences" if is_visible else ""


def _batch(config: JobConfig, ramp: BatchRamp) -> Iterator[str]:
    for start, accum in ramp.stages:
        size = ramp.sequences(accum)
        yield _at(
            start,
            f"{size:,} sequences, {size * config.train.seq_len:,} tokens: "
            f"{accum:,} microbatch(es) of {ramp.rows:,} sequences",
        )


def _learning_rate(config: JobConfig) -> Iterator[str]:
    base = config.optimizer.lr_base_batch
    base_batch = f", for updates of {base:,} sequences" if base else ""
    yield f"{config.scheduler.name}, peak {config.optimizer.lr:.4g}{base_batch}"
    for step, changes in sorted(_turns(config).items()):
        yield _at(step, f"{learning_rate_after(config, step):<10.4g}  {', '.join(changes)}")


def _turns(config: JobConfig) -> dict[int, list[str]]:
    """Return the steps at which the schedule changes its shape, and the changes.

    Schedules that users register have none but the first and the last step.
    """
    turns: dict[int, list[str]] = {0: ["first update"]}
    if config.optimizer.name == "schedule_free_adamw":
        warmed = begin = end = config.optimizer.schedule_free_adamw.warmup_steps
    elif config.scheduler.name == "none" or config.scheduler.name not in SCHEDULERS.built_in:
        warmed = begin = end = 0
    else:
        warmed, begin, end = config.scheduler.boundaries(config.train.max_steps)
    if warmed:
        turns.setdefault(warmed, []).append("warm-up ends")
    # A run that is too short for its decay has no such turn.
    if end > begin and config.scheduler.name != "constant":
        turns.setdefault(begin, []).append("decay begins")
        turns.setdefault(end, []).append("decay ends")
    turns.setdefault(config.train.max_steps, []).append("end of the run")
    return turns


def _phases(config: JobConfig) -> Iterator[str]:
    data = config.data
    for phase in data.phases:
        weights = f", weights {toml(phase.dataset_weights)}" if phase.dataset_weights else ""
        yield _at(phase.start_step, f"learning rate x {phase.lr_scale:g}{weights}")
    if not data.phases:
        yield "none"


def _evaluation(config: JobConfig) -> Iterator[str]:
    if not config.eval.enabled:
        yield "none"
        return
    yield from _tasks(config)
    schedules = config.eval.schedules()
    is_common = len(set(schedules.values())) == 1
    for name, schedule in list(schedules.items())[: 1 if is_common else None]:
        begun = f" from step {schedule.start_step:,} on" if schedule.start_step else ""
        sets = "each set" if is_common else name
        yield f"every {schedule.interval:,} updates{begun}, {schedule.steps:,} batches of {sets}"
        steps = schedule.due_steps(config.train.max_steps)
        yield _listed(steps, len(steps))


def _tasks(config: JobConfig) -> Iterator[str]:
    section = config.eval
    if section.has_tasks:
        schedule = section.tasks_schedule()
        begun = f" from step {schedule.start_step:,} on" if schedule.start_step else ""
        names = [*section.tasks, *(["CORE"] if section.tasks_core else [])]
        yield f"every {schedule.interval:,} updates{begun}, tasks {', '.join(names)}"


def _samples(config: JobConfig) -> Iterator[str]:
    interval, n = config.eval.sample_interval, len(config.eval.sample_prompts)
    if not interval:
        yield "none"
        return
    tokens = config.eval.sample_tokens
    yield f"every {interval:,} updates, {n} of at most {tokens:,} tokens each"


def _activations(config: JobConfig) -> Iterator[str]:
    section = config.eval
    interval, n = section.activations_interval, section.activations_sequences
    if not interval:
        yield "none"
        return
    captures = config.train.max_steps // interval
    yield f"every {interval:,} updates, of {n:,} sequences of the first evaluation set"
    size = n * _captured_bytes(config)
    yield f"{captures:,} in all, {gigabytes(size)} each: {', '.join(section.captured_points)}"


def _captured_bytes(config: JobConfig) -> int:
    """Return the float32 bytes of captured activations per sequence."""
    section, model, length = config.eval, config.model, config.train.seq_len
    layers = len(section.activations_layers) or model.n_layers
    elements = dict.fromkeys(STREAM, layers * model.dim)  # per token
    elements |= {ATTENTION_WEIGHTS: layers * model.n_heads * length, LOGITS: model.vocab_size}
    return 4 * length * sum(elements[name] for name in section.captured_points)


def _checkpoints(config: JobConfig) -> Iterator[str]:
    last, window = config.train.max_steps, config.checkpoint.dyn_ckpt_window
    yield f"every {config.checkpoint.interval:,} updates, and the last"
    if every := config.checkpoint.epoch_interval:
        epochs = "epoch" if every == 1 else f"{every:,} epochs"
        yield f"at the end of every {epochs} of the data, not counted below"
    if window:
        yield f"steps {window.start:,} to {window.stop:,}: a window of its own, kept for good"
    due = SavePolicy(config)
    # The last step is always saved.
    at_the_end = [] if due(last) else [last]
    count = due.count(last) + len(at_the_end)
    yield _listed(itertools.chain(due.steps(last), at_the_end), count)


def describe_groups(config: JobConfig, model: Model, mesh: Mesh | AbstractMesh) -> str:
    """Describe what groups that train apart send to each other; empty without them."""
    traffic = group_traffic(config, model, mesh)
    if traffic is None:
        return ""
    return (
        f"{traffic.groups} train apart for {traffic.interval} updates: {human(traffic.apart)}B per "
        f"device and update between them, {human(traffic.together)}B if they trained together"
    )


def _early_stop(config: JobConfig) -> Iterator[str]:
    stop = config.early_stop
    if not stop.conditions:
        yield "none"
        return
    for key, value in stop:
        if value is not None:
            yield f"{key} = {toml(value)}"


def _at(step: int, text: str) -> str:
    return f"{f'step {step:,}':<18}{text}"


def _listed(steps: Iterable[int], n: int) -> str:
    """Return the number of steps and the first of them."""
    shown = [f"{step:,}" for step in itertools.islice(steps, _SHOWN)]
    more = ["..."] if n > _SHOWN else []
    return f"{n:,} in all: {', '.join([*shown, *more])}" if n else "0 in all"
