"""Config with durations that are not yet converted to updates.

`UnresolvedConfig.resolve` returns a `JobConfig` of plain integers. There is no `JobConfig` before,
so a duration is never mistaken for a number of updates.

    "10%"           of train.max_steps, rounded down, but at least one update
    "2ep"           passes over the training data, rounded up to whole updates
    "1B tok"        tokens, padding included, rounded up to whole updates
    "5M samples"    sequences, rounded up to whole updates

Lengths in epochs, tokens and samples follow train.batch_ramp from their start: the first update, or
for plateau and decay the end of the preceding part. Intervals assume the full batch.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, get_origin

from pydantic import ValidationError

from jaxforge.config.axes import data_parallel
from jaxforge.config.batch_ramp import BatchRamp, Stage
from jaxforge.config.duration import Duration, parse_duration
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.explain import Sources, explain, explain_value
from jaxforge.config.reading.schema import node_at
from jaxforge.config.reading.toml import Path
from jaxforge.config.rules import mesh_shape
from jaxforge.config.section import Interval, facts
from jaxforge.errors import UserError
from jaxforge.storage import trust
from jaxforge.storage.trust import Decision

EpochLength = Callable[[JobConfig, int], int | None]
"""(config, sequences per microbatch) -> sequences per epoch, or None if the data have no epochs.

In this config, keys with unresolved durations have `Duration` values, which fail on arithmetic.
"""

_MAX_STEPS: Path = ("train", "max_steps")
_RAMP: Path = ("train", "batch_ramp")
_WARMUP = ("scheduler", "warmup_steps")
_PLATEAU: Path = ("scheduler", "stable_steps")
_DECAY: Path = ("scheduler", "decay_steps")


class UnresolvedConfig:
    """Config as read, validated except for rules that depend on durations.

    Args:
        values: Section -> key -> value.
        sources: Sources of the values, for messages.
        trusts: Decides whether `[plugins]` is imported. If not, other sections may contain
            unregistered names, which cannot be built.
        notes: Lines about keys without effect.

    Raises:
        UserError: If a value is invalid independently of devices and data.
    """

    def __init__(
        self,
        values: Mapping[Any, Any],
        sources: Sources,
        trusts: Decision = trust.always,
        notes: Sequence[str] = (),
    ) -> None:
        self.notes = tuple(notes)
        self._values, self._sources = _with_lists(values), sources
        self._context = {
            "trusts": trusts,
            "on_command_line": tuple(
                setting.path[1] for setting in sources.settings if setting.path[:1] == ("plugins",)
            ),
        }
        self._durations = dict(_durations(self._values))
        self._known = self._validated(_without(self._values, self._durations))

    @property
    def known(self) -> JobConfig:
        """The config as known before devices exist, with defaults for durations."""
        return self._known

    @property
    def file(self) -> str:
        """The file of the config, or ""."""
        return self._sources.file

    def is_on_command_line(self, key: str) -> bool:
        """Return whether a setting names `key`, as in "checkpoint.dir", or its section."""
        path = tuple(key.split("."))
        return any(path[: len(each.path)] == each.path for each in self._sources.settings)

    @property
    def durations(self) -> dict[str, str]:
        """Durations as written, by key: "train.max_steps" -> "2ep"."""
        return {
            ".".join(map(str, path)): duration.text for path, duration in self._durations.items()
        }

    def resolve(
        self, n_devices: int | None = None, epoch_length: EpochLength | None = None
    ) -> JobConfig:
        """Return the config with durations in updates, and the learning rate scaled to the batch.

        Args:
            n_devices: Devices of the whole job, or None without a job.
            epoch_length: Returns the length of the training data, which it opens. Called only for
                durations in epochs. None if the data are not available.

        Raises:
            UserError: If a duration cannot be resolved, or the numbers break a rule.
        """
        # Most configs: nothing depends on devices or data.
        if not self._durations and self._known.optimizer.lr_scale_rule == "none":
            return self._known
        batch = _Batch(self._known, self._durations, n_devices, epoch_length)
        updates = self._updates(batch)
        # Validated from scratch, so that resolved numbers obey all rules of their sections.
        values = copy.deepcopy(self._values)
        for path, steps in updates.items():
            _put(values, path, steps)
        config = self._validated(values)
        if config.optimizer.lr_scale_rule == "none":
            return config
        values.setdefault("optimizer", {}).update(_scaled(config, batch.rows))
        return self._validated(values)

    def _updates(self, batch: "_Batch") -> dict[Path, int]:
        """Convert each duration to updates, in the order of their dependencies."""
        for _, paths in groupby(
            sorted(self._durations, key=_rank), key=lambda path: _rank(path) > _rank(_MAX_STEPS)
        ):  # the ramp and max_steps first, then the durations that depend on them
            # Problems of one rank do not depend on each other: all are reported.
            problems = []
            for path in paths:
                try:
                    batch.converted[path] = batch.updates(path)
                except _Unknown as reason:
                    text = self._durations[path].text
                    problems.append(explain_value(path, text, str(reason), self._sources))
            if problems:
                raise UserError("\n".join(problems))
        return batch.converted

    def _validated(self, values: Mapping[Any, Any]) -> JobConfig:
        try:
            return JobConfig.model_validate(values, context=self._context)
        except ValidationError as error:
            raise UserError(explain(error, self._sources)) from None


class _Unknown(Exception):
    """The number of updates of a duration is unknown; the message states the reason."""


@dataclass
class _Batch:
    """Sequences and tokens per update along the run, to convert durations into updates."""

    known: JobConfig
    durations: Mapping[Path, Duration]
    n_devices: int | None
    epoch_length: EpochLength | None
    converted: dict[Path, int] = field(default_factory=dict)

    @cached_property
    def rows(self) -> int | None:
        """Sequences of a microbatch over all ranks; None if that depends on unknown devices."""
        train, distributed = self.known.train, self.known.distributed
        dp = distributed.dp_replicate * distributed.dp_shard * distributed.ep
        if self.n_devices is not None:
            dp = data_parallel(mesh_shape(self.known, self.n_devices))
        if dp < 0 and train.global_batch_size is None:
            return None
        return max(1, train.microbatch_size(dp))  # the rules refuse values below 1

    def updates(self, path: Path) -> int:
        """Return the number of updates of a duration.

        Raises:
            _Unknown: The number is not known.
        """
        duration = self.durations[path]
        if duration.unit == "run":
            return duration.share(self._max_steps(path))
        per_epoch = self._per_epoch if duration.unit == "epochs" else 0
        sequences = duration.sequences(self.known.train.seq_len, per_epoch)
        return self._ramp(path).updates(sequences, self._begin(path))

    def _max_steps(self, path: Path) -> int:
        if path == _MAX_STEPS:
            raise _Unknown("the run cannot be a share of itself; give updates, epochs or tokens")
        if _MAX_STEPS in self.durations and _MAX_STEPS not in self.converted:
            raise _Unknown(
                "train.max_steps depends on train.batch_ramp: give one of them in updates"
            )
        return self._number(_MAX_STEPS)

    def _number(self, path: Path) -> int:
        """Return the value of a key in updates, or 0 if not set."""
        if (
            path == _WARMUP
            and path not in self.converted
            and not self.known.is_set(".".join(_WARMUP))
        ):
            return self.known.usual_warmup(self._number(_MAX_STEPS))
        section, key = path
        return self.converted.get(path, getattr(getattr(self.known, str(section)), str(key)) or 0)

    def _begin(self, path: Path) -> int:
        """Return the updates before the start of a length."""
        if path == _PLATEAU:
            return self._number(_WARMUP)
        if path == _DECAY:
            # Only wsd has a plateau before its decay.
            is_wsd = self.known.scheduler.name == "wsd"
            return self._number(_WARMUP) + (self._number(_PLATEAU) if is_wsd else 0)
        return 0

    def _ramp(self, path: Path) -> BatchRamp:
        """Return the batch ramp by which a length is counted."""
        if self.rows is None:
            raise _Unknown(
                "the sequences per update are unknown here: set train.global_batch_size, or "
                "distributed.dp_shard"
            )
        stages = [
            Stage(self.converted.get((*_RAMP, i, "start"), start), accum)
            for i, (start, accum) in enumerate(self.known.train.stages())
        ]
        key = ".".join(part for part in path if isinstance(part, str))
        # An interval in tokens counts full batches, or it would change along the ramp.
        if key in dict(facts(JobConfig, Interval)):
            stages = [Stage(0, stages[-1].accum)]
        elif path[:2] == _RAMP:  # the preceding stages
            stages = stages[: max(1, int(path[2]))]
        return BatchRamp(tuple(stages), self.rows)

    @cached_property
    def _per_epoch(self) -> int:
        self._ramp(_MAX_STEPS)
        if self.epoch_length is None:
            raise _Unknown("the training data are not read here: give updates, a share or tokens")
        config = self.known
        # A placeholder number must not be read as a length.
        for (section, key, *_), duration in self.durations.items():
            config = config.with_values({f"{section}.{key}": duration})
        assert self.rows is not None
        length = self.epoch_length(config, self.rows)
        if length is None:
            raise _Unknown(
                "random tokens, streams and mixtures have no epochs: give updates, a share such as "
                '"10%", or tokens such as "1B tok"'
            )
        return length


def _rank(path: Path) -> int:
    """Return the rank of a duration; lower ranks are resolved first."""
    if path[:2] == _RAMP:
        return int(path[2])
    # A plateau begins at the end of the warm-up, and a decay at the end of the plateau.
    first = (_MAX_STEPS, _WARMUP, _PLATEAU)
    return 1000 + (first.index(path) if path in first else len(first))


def _scaled(config: JobConfig, rows: int | None) -> dict[str, Any]:
    """Return `[optimizer]` keys with learning rates for the batch, without a further scale rule.

    Raises:
        UserError: The batch size is unknown.
    """
    optimizer = config.optimizer
    rule, base = optimizer.lr_scale_rule, optimizer.lr_base_batch
    if rows is None:
        raise UserError(
            f'optimizer.lr_scale_rule = "{rule}": the sequences per update are unknown here: '
            "set train.global_batch_size, or distributed.dp_shard"
        )
    assert base is not None
    batch = rows * config.train.grad_accum_steps
    # The rate of the full batch: the ramp does not change it.
    factor = batch / base if rule == "linear" else math.sqrt(batch / base)
    scaled = {"lr": optimizer.lr * factor, "lr_scale_rule": "none", "lr_base_batch": batch}
    if optimizer.muon.adam_lr is not None:
        scaled["muon"] = {**dict(optimizer.muon), "adam_lr": optimizer.muon.adam_lr * factor}
    return scaled


def _durations(value: Any, path: Path = ()) -> Iterator[tuple[Path, Duration]]:  # noqa: ANN401
    """Yield the durations among the values, for keys that accept durations."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _durations(item, (*path, name))
    elif (
        isinstance(value, str)
        and (duration := parse_duration(value))
        and (node_at(path) or {}).get("duration")
    ):
        yield path, duration


def _with_lists(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy in which a single table becomes a list, for keys that take lists."""
    copied = copy.deepcopy(dict(values))
    for section, table in copied.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, dict) and _is_list(section, key):
                table[key] = [value]
    return copied


def _is_list(section: str, key: str) -> bool:
    """Return whether a key takes a list, without building the schema, which is slow."""
    table = JobConfig.model_fields.get(section)
    field_info = getattr(table and table.annotation, "model_fields", {}).get(key)
    return field_info is not None and get_origin(field_info.annotation) is tuple


def _without(values: dict[Any, Any], durations: Mapping[Path, Duration]) -> dict[Any, Any]:
    """Return a copy with placeholder numbers for durations, without lists and tables of durations.

    The ramp keeps its batch sizes.
    """
    values = copy.deepcopy(values)
    for section, key in {path[:2] for path in durations}:
        # Rules need the sizes of the ramp; its starts only have to increase.
        if (section, key) == _RAMP:
            values["train"][key] = list(_with_some_starts(values["train"][key]))
        elif (section, key) in durations:
            values[section][key] = 1
        else:
            del values[section][key]
    return values


def _with_some_starts(stages: list[Any]) -> Iterator[Any]:
    """Yield the stages of a ramp, with increasing placeholder starts for durations."""
    previous = -1
    for stage in stages:
        start = stage.get("start", 0) if isinstance(stage, dict) else None
        if isinstance(start, str) and parse_duration(start):
            start = previous + 1
            stage = {**stage, "start": start}
        if str(start).isdigit():
            previous = int(str(start))
        yield stage


def _put(values: Any, path: Path, value: int) -> None:  # noqa: ANN401
    *parents, last = path
    for part in parents:
        values = values[part]
    values[last] = value
