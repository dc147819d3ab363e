"""Resolution of a config: what a run uses, and why that differs from what was written.

UnresolvedConfig   as written: lengths in epochs or tokens, a rate per batch size, "auto"
  │  resolve(config, world)      lengths in updates, the rate, the devices of an elastic job
  │  training.resolution         facts of the checkpoint to start from, the fastest execution
  ▼
ResolvedRun        config and reasons; nothing changes the config of a run afterwards
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jaxforge.config import elastic, rules
from jaxforge.config.job import JobConfig, short_toml
from jaxforge.config.reading.unresolved import EpochLength, UnresolvedConfig


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
        recorded: the config that the run directory and checkpoints record; None: `config`. It has
            "auto" where the devices of this start decide, since those of the next may differ.
        notes: lines about keys of the config that have no effect.
    """

    config: JobConfig
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recorded: JobConfig | None = None
    notes: Sequence[str] = ()

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
        full = elastic.full_devices(known, world.devices, world.processes)
    run = ResolvedRun(known)
    if isinstance(config, UnresolvedConfig):
        run = ResolvedRun(known, notes=config.notes)
        run = _with_lengths(run, config, full, epoch_length)
    elastic.check_shrinkable(run.config, full)
    reason = f"{world.devices} of the {full} devices of the whole job have started"
    run = run.after(elastic.shrink(run.config, full, world.devices), reason)
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
