"""Phases of training: which mixture and which factor on the learning rate each update has.

A phase is in force from the update on that is launched when `start_step` steps have been attempted.
All here is a function of that number of steps; of the run's past, only the mixtures are facts: at
which position of the data each began (`Phases.recorded`). Steps are not positions: a rollback takes
steps back while the data move on, and batches may grow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxforge.config.data import DataConfig
from jaxforge.data.mixture import Segment, proportions


@dataclass(frozen=True)
class Phases:
    """The phases of a run, the time before the first being number 0.

    Attributes:
        starts: first step of each but number 0, increasing.
        lr_scales: factor on the learning rate in each.
        mixtures: proportions of the datasets in each, by name; empty without `data.datasets`.
        lag: updates by which the factors, and they alone, come late.
    """

    starts: tuple[int, ...]
    lr_scales: tuple[float, ...]
    mixtures: tuple[dict[str, float], ...]
    lag: int

    @classmethod
    def of(cls, data: DataConfig) -> "Phases":
        """The phases of `[data]`."""
        phases, as_torch = data.all_phases, data.order == "torch"
        weights = [data.weights(phase) for phase in (None, *phases)]
        return cls(
            starts=tuple(phase.start_step for phase in phases),
            lr_scales=(1.0, *(phase.lr_scale for phase in phases)),
            mixtures=tuple(
                proportions(of_phase, data.mix_temperature, as_torch=as_torch)
                for of_phase in weights
            ),
            lag=int(data.phase_lr_lag),
        )

    def index(self, step: int) -> int:
        """Number of the phase in force when `step` steps have been attempted."""
        return sum(step >= start for start in self.starts)

    def lr_scale(self, step: int) -> float:
        """Factor on the learning rate of the update launched after `step` steps."""
        return self.lr_scales[self.index(step - self.lag)]

    def recorded(self, history: Sequence[Segment], step: int, samples: int) -> list[Segment]:
        """The mixtures that a run has had, with the one now in force as the last.

        To be kept with the run's progress. So a changed config, or a rollback, is a change of
        mixture like any other: what was drawn before counts as it was drawn.

        Args:
            history: what this gave earlier; lists from JSON will do.
            step: steps attempted.
            samples: sequences drawn from the data.
        """
        begun = [Segment(*fields) for fields in history]
        begun = [
            fields for fields in begun if fields.start < samples
        ]  # the others have drawn nothing
        return _followed(begun, samples, self.mixtures[self.index(step)])

    def segments(
        self,
        history: Sequence[Segment],
        step: int,
        samples: int,
        samples_at: Callable[[int], int],
    ) -> list[Segment]:
        """Return the mixtures of a run, past and future, for `data.loader.training_batches`.

        Args:
            history: as of `recorded`.
            step: steps attempted.
            samples: sequences drawn from the data.
            samples_at: position at which the update begins that is launched after this many steps.
        """
        known, now = self.recorded(history, step, samples), self.index(step)
        for start, mixture in zip(self.starts[now:], self.mixtures[now + 1 :], strict=True):
            known = _followed(known, samples_at(start), mixture)
        return known


def _followed(segments: list[Segment], start: int, mixture: dict[str, float]) -> list[Segment]:
    """Segments and one more, if there are datasets and the mixture changes.

    Not otherwise: a segment that goes on is not the same as one that begins anew.
    """
    if not mixture or (segments and segments[-1].proportions == mixture):
        return segments
    return [*segments, Segment(start, mixture)]
