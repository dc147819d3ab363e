"""Resolution of a config: what a run uses, and why that differs from what was written.

    UnresolvedConfig    as written: lengths in epochs or tokens, a rate per batch size, "auto"
    resolve             lengths in updates, the rate, the devices of an elastic job
    resolve_run         facts of the checkpoint to start from, the fastest execution (`training`)
    ResolvedRun         config and reasons; nothing changes the config of a run afterwards

A job of `distributed.elastic_processes` processes may start with fewer of them, because hosts were
lost. Its pipeline, tensor, context and expert parallelism stay the same, since they determine how a
model fits into memory. The data-parallel axes shrink, and updates accumulate more microbatches:

    4 processes, dp_shard 4    1 microbatch  of 4 x 8 sequences
    3 processes, dp_shard 3    2 microbatches of 3 x 6 sequences, the last 4 rows are padding

Positions in the data, samples per update and the schedule do not change, so that losses equal those
of the whole job up to rounding.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from jaxforge.config import rules
from jaxforge.config.axes import BATCH_AXES, Mesh, data_parallel
from jaxforge.config.job import JobConfig, short_toml
from jaxforge.config.model import ModelConfig
from jaxforge.config.reading.unresolved import EpochLength, UnresolvedConfig
from jaxforge.config.train import BatchStage, TrainConfig
from jaxforge.errors import UserError


@dataclasses.dataclass(frozen=True)
class World:
    """The devices of a job.

    Attributes:
        devices: devices of the processes that have started, or that are planned.
        processes: processes that have started; None for a job that is planned as a whole.
    """

    devices: int
    processes: int | None = None


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """The config of a run, and the reasons of values that the user did not write.

    Attributes:
        config: the config.
        reasons: dotted key -> reason of its value.
        written: the config with "auto" where the devices of this start decide, since those of the
            next may differ; None: `config`.
        notes: lines about keys of the config that have no effect.
        teacher: `[model]` of `distillation.teacher`; None without one.
    """

    config: JobConfig
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    written: JobConfig | None = None
    notes: Sequence[str] = ()
    teacher: ModelConfig | None = None

    @property
    def recorded(self) -> JobConfig:
        """The config that the run directory and checkpoints record."""
        return self.written or self.config

    def after(self, config: JobConfig, reason: str) -> "ResolvedRun":
        """Return the run with another config; the reason applies to the keys that differ."""
        before = self.config.settings
        changed = {key: reason for key, value in config.settings.items() if value != before[key]}
        return dataclasses.replace(self, config=config, reasons={**self.reasons, **changed})

    def rows(self) -> Iterator[str]:
        """Yield a line for each value that the user did not write."""
        settings = self.config.settings
        for key, reason in self.reasons.items():
            yield f"{key} = {short_toml(settings[key])}: {reason}"


def known_config(config: JobConfig | UnresolvedConfig) -> JobConfig:
    """Return the config as far as it is known before devices and data are."""
    return config.known if isinstance(config, UnresolvedConfig) else config


def resolve(
    config: JobConfig | UnresolvedConfig, world: World, epoch_length: EpochLength | None = None
) -> ResolvedRun:
    """Resolve what depends on devices and on the length of the data.

    Args:
        config: the config as written. Lengths of a `JobConfig` are resolved already.
        world: the devices of the job.
        epoch_length: returns the length of the data; called for lengths in epochs only.

    Raises:
        UserError: a length cannot be resolved, or the config does not fit the devices.
    """
    known = known_config(config)
    full = world.devices
    if world.processes is not None:
        full = full_devices(known, world.devices, world.processes)
    run = ResolvedRun(known)
    if isinstance(config, UnresolvedConfig):
        run = _with_lengths(ResolvedRun(known, notes=config.notes), config, full, epoch_length)
    # Checked for all sizes now: a job that cannot shrink would fail when a host is lost.
    check_shrinkable(run.config, full)
    reason = f"{world.devices} of the {full} devices of the whole job have started"
    run = run.after(shrink(run.config, full, world.devices), reason)
    rules.check(run.config, world.devices)
    return run


def _with_lengths(
    run: ResolvedRun, written: UnresolvedConfig, devices: int, epoch_length: EpochLength | None
) -> ResolvedRun:
    """Return the run with lengths in updates and the learning rate for the batch."""
    rule = run.config.optimizer.lr_scale_rule
    resolved = written.resolve(devices, epoch_length)
    run = run.after(resolved, "a tenth of the run")  # the default of the warm-up
    texts = {".".join(key.split(".")[:2]): text for key, text in written.durations.items()}
    reasons = {key: f'written as "{text}"' for key, text in texts.items()}
    scaled = f'optimizer.lr_scale_rule = "{rule}"'
    reasons |= {key: scaled for key in run.reasons if key.startswith("optimizer.")}
    return dataclasses.replace(run, reasons={**run.reasons, **reasons})


def full_devices(config: JobConfig, n_devices: int, n_processes: int) -> int:
    """Return the number of devices of the whole job.

    Raises:
        UserError: too many or too few processes have started.
    """
    section = config.distributed
    if section.elastic_processes is None:
        return n_devices
    if not section.elastic_min_processes <= n_processes <= section.elastic_processes:
        raise UserError(
            f"{n_processes} processes have started. distributed.elastic_min_processes = "
            f"{section.elastic_min_processes} and distributed.elastic_processes = "
            f"{section.elastic_processes} do not allow this number: change them, or the job"
        )
    return n_devices * section.elastic_processes // n_processes


def shrink(config: JobConfig, full: int, n_devices: int) -> JobConfig:
    """Return the config for fewer devices than those of the whole job.

    Raises:
        UserError: the config cannot run on this number of devices.
    """
    if n_devices == full:
        return config
    if problems := list(_problems(config)):
        raise UserError("\n".join(problems))
    mesh = rules.mesh_shape(config, full)
    changes = _data_axes(config, mesh, full, n_devices)
    before, ranks = data_parallel(mesh), math.prod((*changes.values(), mesh["ep"]))
    if config.train.trains_apart:
        train = _with_fewer_groups(config, mesh, changes)
    else:
        train = _accumulating(config, before, ranks)
    distributed = config.distributed.with_values(changes)
    values = {"distributed": distributed, "train": train}
    return config.with_values(values | {"eval.batch_size": config.eval_batch_size(before)})


def check_shrinkable(config: JobConfig, n_devices: int) -> None:
    """Check that an elastic job can run with each allowed number of processes.

    Raises:
        UserError: the job cannot run with some number of processes.
    """
    section = config.distributed
    n_processes = section.elastic_processes
    if n_processes is None:
        return
    per_process, group = n_devices // n_processes, group_size(rules.mesh_shape(config, n_devices))
    for count in range(n_processes - 1, section.elastic_min_processes - 1, -1):
        if count * per_process % group:
            continue  # the supervisor leaves out the hosts of incomplete groups
        try:
            fewer = count * per_process
            rules.check(shrink(config, n_devices, fewer), fewer)
        except UserError as error:
            raise UserError(
                f"this job cannot shrink to {count} processes, which "
                f"distributed.elastic_min_processes = {section.elastic_min_processes} allows: "
                f"{error}"
            ) from error


def group_size(mesh: Mesh) -> int:
    """Return the number of devices that hold one copy of the model and leave a job together."""
    return math.prod(
        size for axis, size in mesh.items() if axis not in ("dp_replicate", "dp_shard")
    )


def _problems(config: JobConfig) -> Iterator[str]:
    """Yield the settings that tie batches to the number of processes."""
    if config.data.order == "torch":
        yield (
            'data.order = "torch" depends on the sequences of a microbatch, which change when '
            'processes leave: set data.order = "grain", or do not make the job elastic'
        )
    if config.data.hf_streaming:
        yield (
            "data.hf_streaming = true assigns streams to the rows of a microbatch, which change "
            "when processes leave: prepare the dataset, or do not make the job elastic"
        )
    if config.train.loss_norm == "microbatch":
        yield (
            'train.loss_norm = "microbatch" depends on the microbatches, which change when '
            'processes leave: set train.loss_norm = "tokens", or do not make the job elastic'
        )


def _data_axes(config: JobConfig, mesh: Mesh, full: int, n_devices: int) -> dict[str, int]:
    """Return dp_replicate and dp_shard for fewer devices; whole replicas leave if possible."""
    group = group_size(mesh)
    if n_devices % group:
        axes = " * ".join(axis for axis in mesh if axis not in BATCH_AXES[:2] and mesh[axis] > 1)
        raise UserError(
            f"{n_devices} of {full} devices are not a multiple of distributed.{axes} = {group}: "
            "these devices hold one copy of the model. Start a job of "
            f"{n_devices // group * group} devices"
        )
    left, shards = n_devices // group, mesh["dp_shard"]
    # Whole replicas leave: the remaining ones keep their sharding.
    if left % shards == 0:
        return {"dp_replicate": left // shards, "dp_shard": shards}
    return {"dp_replicate": 1, "dp_shard": left}


def _with_fewer_groups(config: JobConfig, mesh: Mesh, changes: Mapping[str, int]) -> TrainConfig:
    """Return `[train]` for fewer groups that train apart: each keeps its batch."""
    train, axis = config.train, "dp_replicate"
    if changes["dp_shard"] != mesh["dp_shard"]:
        raise UserError(
            f"train.outer_interval = {train.outer_interval} requires whole groups of "
            f"{group_size(mesh) * mesh['dp_shard']} devices to leave or to join: start a job of a "
            "multiple of that number"
        )

    return train.of_groups(changes[axis], mesh[axis])


def _accumulating(config: JobConfig, before: int, ranks: int) -> TrainConfig:
    """Return `[train]` with the same sequences per update on fewer ranks."""
    train = config.train
    rows = train.microbatch_size(before)
    per_rank, sizes = rows // before, [stage.accum * rows for stage in train.stages()]
    if len(sizes) > 1:
        # Batches of several sizes are not padded, so each must consist of whole microbatches.
        unit = math.gcd(*sizes)
        fitting = [n for n in range(1, per_rank + 1) if unit % (n * ranks) == 0]
        if not fitting:
            raise UserError(
                f"the batch ramp has updates of {', '.join(map(str, sizes))} sequences, which "
                f"{ranks} data-parallel ranks cannot share equally: allow only numbers of "
                "processes that divide them, or remove the ramp"
            )
        per_rank = fitting[-1]
        accum = sizes[-1] // (per_rank * ranks)
    else:
        needed = -(-sizes[0] // ranks)
        accum = _fitting_accumulation(config, -(-needed // per_rank))
    ramp = tuple(
        BatchStage(start=stage.start, grad_accum_steps=size // (per_rank * ranks))
        for stage, size in zip(train.stages(), sizes, strict=True)
    )
    values = {
        **dict(train), "batch_size": -(-sizes[-1] // (accum * ranks)), "grad_accum_steps": accum,
        "global_batch_size": sizes[-1],
        "batch_ramp": ramp if len(ramp) > 1 else (),
    }  # fmt: skip
    # The user's batch_size was that of the whole job.
    return TrainConfig.model_construct(train.model_fields_set - {"batch_size"}, **values)


def _fitting_accumulation(config: JobConfig, accum: int) -> int:
    """Return the least number of microbatches from `accum` on that fills the pipeline."""
    section = config.distributed
    accum = max(accum, section.pp)
    unit = section.pp if section.chunks > 1 else 1
    return -(-accum // unit) * unit
