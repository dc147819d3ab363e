"""Where a run stands, as readable JSON beside the arrays of each checkpoint."""

import dataclasses
import math
import uuid
from typing import Any


@dataclasses.dataclass
class Progress:
    """The host's counters. One truth: everything that counts steps reads it here.

    Attributes:
        step: steps attempted, bad ones included.
        samples: sequences drawn from the data; the next batch starts there, on any mesh.
        tokens: tokens of applied updates, padding and masked ones included.
        skipped: steps whose update was not applied.
        best_metric: lowest value so far of `checkpoint.best_metric`.
        run_id: names the run through all its restarts; in W&B it is the id.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped: int = 0
    best_metric: float | None = None
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])

    def advance(self, samples: int, tokens: int) -> None:
        """Counts one attempted step that drew `samples` sequences of `tokens` tokens in all."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens

    def reconcile(self, step: int, skipped: int, samples: int, tokens: int) -> None:
        """Corrects the counts by the device's, which alone knows the bad steps.

        Args:
            step: steps attempted; fewer than counted here once the run has given up.
            skipped: bad steps of the whole run; their tokens were not learned from.
            samples: sequences of one step.
            tokens: tokens of one step.
        """
        ahead, newly_skipped = self.step - step, skipped - self.skipped
        self.step, self.skipped = step, skipped
        self.samples -= ahead * samples
        self.tokens -= (ahead + newly_skipped) * tokens

    def note_metric(self, value: float) -> bool:
        """Whether `value` is the best so far; if so it is kept."""
        if math.isnan(value) or (self.best_metric is not None and value >= self.best_metric):
            return False
        self.best_metric = value
        return True

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Progress":
        """Reads what any version wrote: unknown fields are dropped, missing ones get defaults."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known})
