"""Progress of a run, stored as readable JSON in each checkpoint."""

import dataclasses
import math
import uuid
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass
class Validation:
    """An evaluation on its way: what is evaluated, and how far that is.

    Attributes:
        pending: sets still to evaluate; the first may be begun.
        sums: by set, what its batches so far add up to (`evaluation.SetSums`, and how many they
            are); whole for sets that are not pending any more.
    """

    pending: list[str]
    sums: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def completed(self) -> list[str]:
        """Sets that are done, in order."""
        return [name for name in self.sums if name not in self.pending]


@dataclasses.dataclass
class Progress:
    """The host's counters: a view of the device's, ahead of it by the steps that are under way.

    Everything on the host that counts steps reads it here.

    Attributes:
        step: steps attempted, bad ones included.
        samples: sequences drawn from the data; the next batch starts there, on any mesh. After a
            rollback they are ahead of the step: what led there is not read again.
        tokens: tokens of applied updates, padding and masked ones included.
        valid_tokens: those of them that were learned from.
        padding: those of them that are padding.
        skipped: steps whose update was not applied.
        consecutive_bad: such steps in a row, up to now.
        nonfinite: steps whose loss or gradient norm was not finite, applied or not.
        spikes: steps whose loss was a spike, applied or not.
        sequences_per_epoch: of the training data; None where that is not known.
        validation: what is left to evaluate at this step; None outside of evaluations.
        best_metric: lowest value so far of `checkpoint.best_metric`.
        best_step: the step that had it.
        mixtures: what was drawn from, as of `training.phases`: where each mixture began.
        rollbacks: each one's step, the step it went back to, and the samples left out.
        early_stop: what early stopping remembers.
        data: fingerprint of each dataset (`data.fingerprint`); empty in older checkpoints.
        run_id: names the run through all its restarts; in W&B it is the id.
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
    mixtures: list[Any] = dataclasses.field(default_factory=list)
    rollbacks: list[dict[str, int]] = dataclasses.field(default_factory=list)
    early_stop: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def updates(self) -> int:
        """Updates applied."""
        return self.step - self.skipped

    @property
    def epoch(self) -> int | None:
        """Passes over the training data that are complete; None where their length is not known."""
        return self.samples // self.sequences_per_epoch if self.sequences_per_epoch else None

    @property
    def stage(self) -> str:
        """ "training" or "validation"."""
        return "validation" if self.validation else "training"

    def advance(self, samples: int, tokens: int) -> None:
        """Counts one attempted step that drew `samples` sequences of `tokens` tokens in all."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens

    def follow(self, step: int, guard: Any, counts: Any) -> None:  # noqa: ANN401
        """Takes the device's word on which steps were attempted and which were bad.

        Args:
            step: `TrainState.step`.
            guard: `TrainState.guard`, on the host.
            counts: `TrainState.counts`, on the host.
        """
        self.step, self.samples = int(step), int(counts.samples)
        self.tokens, self.valid_tokens = int(counts.tokens), int(counts.valid_tokens)
        self.padding = int(counts.padding)
        self.skipped, self.consecutive_bad = int(guard.total), int(guard.consecutive)
        self.nonfinite, self.spikes = int(guard.nonfinite), int(guard.spikes)

    def note_metric(self, value: float) -> bool:
        """Record the value if it is the best so far; return whether it is."""
        if math.isnan(value) or (self.best_metric is not None and value >= self.best_metric):
            return False
        self.best_metric, self.best_step = value, self.step
        return True

    def begin_validation(self, sets: Iterable[str]) -> Validation:
        """Schedules every set, or goes on where a validation of this step stands."""
        if self.validation is None:
            self.validation = Validation(list(sets))
        return self.validation

    def roll_back_to(self, earlier: "Progress") -> None:
        """Takes the counters of an earlier step; the data go on from where they are."""
        jump = {"from": self.step, "to": earlier.step, "samples": self.samples - earlier.samples}
        retained = {
            "samples": self.samples,
            "rollbacks": [*self.rollbacks, jump],
            "data": self.data,
        }
        for name, value in (vars(earlier) | retained).items():
            setattr(self, name, value)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `updates`, `epoch` and `stage` for the reader's sake."""
        derived = {"updates": self.updates, "epoch": self.epoch, "stage": self.stage}
        return dataclasses.asdict(self) | derived

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Progress":
        """Reads what any version wrote: unknown fields are dropped, missing ones get defaults."""
        known = {field.name for field in dataclasses.fields(cls)}
        progress = cls(**{k: v for k, v in values.items() if k in known})
        if isinstance(progress.validation, dict):
            progress.validation = Validation(**progress.validation)
        return progress
