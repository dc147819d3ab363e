"""Phases of training: the mixture and the learning rate factor of each update.

    steps attempted    0 ............. start_step[0] ........... start_step[1] ....
    phase              0               1                         2

A phase starts with the update that is launched after `start_step` attempted steps, and depends only
on this number. The mixtures of the past are stored with the run instead, as data positions at
which each began (`Phases.recorded`): steps do not determine positions, because a rollback repeats
steps with later data, and batches may grow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxforge.config.data import DataConfig
from jaxforge.data.mixture import proportions
from jaxforge.data.segments import Segment


@dataclass(frozen=True)
class Phases:
    """The phases of a run. Number 0 is the time before the first configured phase.

    Attributes:
        starts: first step of each phase from number 1 on, increasing.
        lr_scales: factor on the learning rate in each phase.
        mixtures: proportions of the datasets in each phase, by name; empty without
            `data.datasets`.
        lag: number of updates by which the factors, but not the mixtures, are delayed.
        limits: `Segment.limits` of all mixtures.
    """

    starts: tuple[int, ...]
    lr_scales: tuple[float, ...]
    mixtures: tuple[dict[str, float], ...]
    lag: int
    limits: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, data: DataConfig, limits: Mapping[str, int] | None = None) -> "Phases":
        """Return the phases of `[data]`.

        Args:
            data: `[data]`.
            limits: `segments.limits_of` the data.
        """
        phases, as_torch = data.phases, data.order == "torch"
        weights = [data.weights(phase) for phase in (None, *phases)]
        return cls(
            starts=tuple(phase.start_step for phase in phases),
            lr_scales=(1.0, *(phase.lr_scale for phase in phases)),
            mixtures=tuple(
                proportions(phase_weights, data.mix_temperature, as_torch=as_torch)
                for phase_weights in weights
            ),
            lag=int(data.phase_lr_lag),
            limits=limits or {},
        )

    def index(self, step: int) -> int:
        """Return the number of the phase after `step` attempted steps."""
        return sum(step >= start for start in self.starts)

    def lr_scale(self, step: int) -> float:
        """Return the learning rate factor of the update that is launched after `step` steps."""
        return self.lr_scales[self.index(step - self.lag)]

    def recorded(self, history: Sequence[Segment], step: int, samples: int) -> list[Segment]:
        """Return the mixtures of a run so far; the last is the current mixture.

        The result is stored in the progress of the run. Thus a changed config or a rollback is a
        change of mixture like any other, and the past counts as it was drawn.

        Args:
            history: earlier result of this method; may be lists from JSON.
            step: steps attempted.
            samples: sequences drawn from the data.
        """
        segments = (Segment(*fields) for fields in history)
        begun = [segment for segment in segments if segment.start < samples]  # others drew nothing
        return self._with_segment(begun, samples, self.mixtures[self.index(step)])

    def segments(
        self,
        history: Sequence[Segment],
        step: int,
        samples: int,
        samples_at: Callable[[int], int],
    ) -> list[Segment]:
        """Return the mixtures of a run, past and future, for `data.loader.training_batches`.

        Args:
            history: earlier result of `recorded`.
            step: steps attempted.
            samples: sequences drawn from the data.
            samples_at: returns the data position of the update that is launched after a number
                of attempted steps.
        """
        known, now = self.recorded(history, step, samples), self.index(step)
        for start, mixture in zip(self.starts[now:], self.mixtures[now + 1 :], strict=True):
            known = self._with_segment(known, samples_at(start), mixture)
        return known

    def _with_segment(
        self, segments: list[Segment], start: int, mixture: dict[str, float]
    ) -> list[Segment]:
        """Return the segments with a new one appended, if the mixture or its limits change.

        An unchanged mixture must not start a new segment, which would draw other sequences.
        """
        if not mixture or (segments and segments[-1][1:] == (mixture, self.limits)):
            return segments
        return [*segments, Segment(start, mixture, self.limits)]
