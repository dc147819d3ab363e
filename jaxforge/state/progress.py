"""Progress of a run, stored as readable JSON in each checkpoint: `progress/metadata`.

    {"step": 70, ..., "config_crc32": 123, "crc32": 456}

A restore needs the data position, the counts and the run id as much as the arrays, whose hashes are
in `checksums`. The seal is in the file itself because the file is replaced when an evaluation ends
after the save (`Checkpoints.amend`). Files of versions without a seal are read too.
"""

import dataclasses
import math
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from jaxforge.storage.seals import add_seal, check_seal, crc32


@dataclasses.dataclass
class Validation:
    """State of an evaluation that is in progress.

    Attributes:
        pending: sets that are not complete; the first may be partly evaluated. "ema/<set>" is the
            evaluation of a set by the average of the parameters.
        sums: sums over the batches evaluated so far (`evaluation.SetSums`) and their number, by
            set; final for sets that are no longer pending.
        pending_tasks: tasks that are not complete; they follow the sets.
        results: metrics of complete tasks, by task.
        has_begun: True once a batch may have been evaluated.
    """

    pending: list[str]
    sums: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    pending_tasks: list[str] = dataclasses.field(default_factory=list)
    results: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    has_begun: bool = False

    def retain_sets(self, is_retained: Callable[[str], bool]) -> None:
        """Forget the sets whose names the function does not select."""
        self.pending = [name for name in self.pending if is_retained(name)]
        self.sums = {name: sums for name, sums in self.sums.items() if is_retained(name)}

    def retain_tasks(self, names: Collection[str]) -> None:
        """Forget all other tasks."""
        self.pending_tasks = [name for name in self.pending_tasks if name in names]
        self.results = {task: values for task, values in self.results.items() if task in names}

    @property
    def completed(self) -> list[str]:
        """The completed sets, in order."""
        return [name for name in self.sums if name not in self.pending]


@dataclasses.dataclass
class Progress:
    """Counters of the host: a copy of the device's, ahead of them by the steps in flight.

    All host code reads the step counters here.

    Attributes:
        step: steps attempted, bad ones included.
        samples: sequences drawn from the data; the next batch starts there, on any mesh. After a
            rollback it is ahead of the step, because those samples are not read again.
        tokens: tokens of applied updates, including padding and masked tokens.
        valid_tokens: tokens of applied updates that have a label.
        padding: padding tokens of applied updates.
        skipped: steps whose update was not applied.
        consecutive_bad: latest steps in a row whose update was not applied.
        nonfinite: steps whose loss or gradient norm was not finite, applied or not.
        spikes: steps whose loss was a spike, applied or not.
        sequences_per_epoch: sequences of the training data; None if unknown.
        validation: the evaluation in progress at this step; None outside of evaluations.
        best_metric: best value so far of `checkpoint.best_metric`.
        best_step: the step of that value.
        best_name: name of that metric; empty in older checkpoints.
        mixtures: mixtures used so far and their first samples, as in `training_data.Phases`.
        rollbacks: step, target step and skipped samples of each rollback.
        early_stop: state of early stopping.
        callbacks: states of callbacks by class, as `training.callbacks.exports` encodes them.
        data: fingerprint of each dataset (`data.fingerprint`); empty in older checkpoints.
        base: dtype and hash of each array of the model that adapters belong to; empty without.
        frozen: dtype and hash of each array of the reference or teacher; empty without.
        run_id: identifies the run across restarts; also the id in W&B.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    valid_tokens: int = 0
    padding: int = 0
    skipped: int = 0
    consecutive_bad: int = 0
    nonfinite: int = 0
    spikes: int = 0
    sequences_per_epoch: int | None = None
    validation: Validation | None = None
    best_metric: float | None = None
    best_step: int | None = None
    best_name: str = ""
    mixtures: list[Any] = dataclasses.field(default_factory=list)
    rollbacks: list[dict[str, int]] = dataclasses.field(default_factory=list)
    early_stop: dict[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    base: dict[str, Any] = dataclasses.field(default_factory=dict)
    frozen: dict[str, Any] = dataclasses.field(default_factory=dict)
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def updates(self) -> int:
        """The number of applied updates."""
        return self.step - self.skipped

    @property
    def epoch(self) -> int | None:
        """The number of complete passes over the training data; None if its length is unknown."""
        return self.samples // self.sequences_per_epoch if self.sequences_per_epoch else None

    @property
    def stage(self) -> str:
        """The stage of the run, "training" or "validation"."""
        return "validation" if self.validation else "training"

    def advance(self, samples: int, tokens: int) -> None:
        """Count one attempted step that drew `samples` sequences of `tokens` tokens in total."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens

    def sync_from_device(self, step: int, guard: Any, counts: Any) -> None:  # noqa: ANN401
        """Synchronize the counters with the device state.

        Args:
            step: `TrainState.step`.
            guard: `TrainState.guard`, copied to the host.
            counts: `TrainState.counts`, copied to the host.
        """
        self.step, self.samples = int(step), int(counts.samples)
        self.tokens, self.valid_tokens = int(counts.tokens), int(counts.valid_tokens)
        self.padding = int(counts.padding)
        self.skipped, self.consecutive_bad = int(guard.total), int(guard.consecutive)
        self.nonfinite, self.spikes = int(guard.nonfinite), int(guard.spikes)

    def note_metric(self, name: str, value: float, *, is_higher_better: bool) -> bool:
        """Record the value of a metric if it is the best so far; return whether it is."""
        best = self.best_metric if self.best_name in ("", name) else None
        if math.isnan(value):
            return False
        if best is not None and not (value > best if is_higher_better else value < best):
            return False
        self.best_metric, self.best_step, self.best_name = value, self.step, name
        return True

    def begin_validation(self, sets: Iterable[str], tasks: Iterable[str] = ()) -> Validation:
        """Start an evaluation of sets and tasks, or return the one in progress at this step."""
        if self.validation is None:
            self.validation = Validation(list(sets), pending_tasks=list(tasks))
        return self.validation

    def roll_back_to(self, earlier: "Progress") -> None:
        """Restore the counters of an earlier step, except for the position in the data."""
        jump = {"from": self.step, "to": earlier.step, "samples": self.samples - earlier.samples}
        # The position in the data stays, so that the bad span is not read again. The number of
        # rollbacks is limited.
        retained = {
            "samples": self.samples,
            "rollbacks": [*self.rollbacks, jump],
            "data": self.data,
        }
        for name, value in (vars(earlier) | retained).items():
            setattr(self, name, value)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, and for readers also `updates`, `epoch` and `stage`."""
        derived = {"updates": self.updates, "epoch": self.epoch, "stage": self.stage}
        return dataclasses.asdict(self) | derived

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Progress":
        """Return the progress that any version wrote.

        Unknown fields are dropped; missing fields get defaults.
        """
        # Derived fields of `to_json` are among the unknown ones.
        known = {field.name for field in dataclasses.fields(cls)}
        progress = cls(**{k: v for k, v in values.items() if k in known})
        if isinstance(progress.validation, dict):
            progress.validation = Validation(**progress.validation)
        return progress


_CONFIG = "config_crc32"


def seal_progress(progress: Progress, config_crc32: int | None) -> dict[str, Any]:
    """Return the JSON of `progress/metadata`.

    Args:
        progress: the counters.
        config_crc32: `crc32` of the config stored in the same checkpoint; None if unknown.
    """
    return add_seal(progress.to_json() | ({} if config_crc32 is None else {_CONFIG: config_crc32}))


def unseal_progress(values: Mapping[str, Any], step: int | None = None) -> Progress:
    """Return the counters of `progress/metadata`.

    Args:
        values: JSON of the file.
        step: step in the name of the directory. None: any step, as for the conversion of a single
            checkpoint.

    Raises:
        ValueError: the content differs from what was saved, or is of another step.
    """
    check_seal(values, "progress/metadata")
    progress = Progress.from_json(dict(values))
    if step not in (None, progress.step):
        raise ValueError(f"progress/metadata is of step {progress.step}, not of step {step}")
    return progress


def stored_config_crc32(values: Mapping[str, Any]) -> int | None:
    """Return the checksum of the config from `progress/metadata`, if any."""
    return values.get(_CONFIG)


def check_config(values: Mapping[str, Any], config: Any) -> None:  # noqa: ANN401 (any JSON)
    """Compare a config with its checksum in the JSON of `progress/metadata`, if any.

    Raises:
        ValueError: the config differs from what was saved.
    """
    if stored_config_crc32(values) not in (None, crc32(config)):
        raise ValueError("config/metadata is not what was saved")
