"""Metrics on their way from the device to the sinks, one step late.

The host launches step n + 1 before it reads the metrics of step n, and reads them only where they
are due somewhere: between two logged steps nothing is copied from the device.
"""

import collections
import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.telemetry.measures import Smoothed, StepCost, Sums, aux_metrics, collected, memory
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.sinks import Metrics, Sample

log = logging.getLogger(__name__)


class _Launched(NamedTuple):
    """A step that was launched, with its metrics on the device.

    Attributes:
        step: its number, if it takes place: none does after the step that ends a run.
        metrics: what is logged of it.
        waited: seconds that this process had waited for data by then.
        loss: its loss.
        skipped: the run's count of skipped steps after it.
        labels: how many of its labels count.
    """

    step: int
    metrics: dict[str, Array]
    waited: float
    loss: Float[Array, ""]
    skipped: Int[Array, ""]
    labels: Int[Array, ""] | int


class HostTimes(NamedTuple):
    """Seconds of this process since it started: what a host does on its own is in the last two.

    Attributes:
        clock: of the run; pauses do not count.
        data_wait: spent waiting for batches.
        launch: spent between a batch's arrival and the launch of its step.
    """

    clock: float
    data_wait: float
    launch: float


class _Mark(NamedTuple):
    """A moment of the run: its step, sequences drawn, its clock, seconds spent waiting for data."""

    step: int
    samples: int
    seconds: float
    waited: float
    sums: Sums


class Tracker:
    """Chooses the steps to log, times them, and writes their metrics.

    Args:
        writers: where metrics go; the same on every process.
        cost: what an update takes.
        progress: where the run stands; bad steps in a row are noted there as metrics arrive.
        last_step: `train.max_steps`.
        datasets: names of a mixture's.
        extras: `metrics.collect`; logged in addition.
        left_out: `train.iterations_to_skip`.
    """

    def __init__(
        self,
        writers: Sequence[MetricWriter],
        cost: StepCost,
        progress: Progress,
        last_step: int,
        datasets: Sequence[str] = (),
        extras: Sequence[str] = (),
        left_out: Collection[int] = (),
    ) -> None:
        self._datasets, self._extras, self._left_out = datasets, extras, frozenset(left_out)
        self._writers, self._cost, self._progress = writers, cost, progress
        self._last_step = last_step
        self._logged: Metrics = {}
        self._latest: _Launched | None = None
        # Those since the last fetch. Beyond a thousand they would cost more to read than they add
        # to a mean.
        self._launched: collections.deque[_Launched] = collections.deque(maxlen=_MOST)
        self._has_warned_of_labels = False
        self._smoothed, self._sums = Smoothed(), Sums(skipped=progress.skipped)
        self._paused = self._waited = self._launching = 0.0
        self._has_batch = time.perf_counter()
        self.start_clock()

    def start_clock(self) -> None:
        """Starts timing here: set-up and compilation are not steps."""
        at = self._progress
        self._warned = at.nonfinite, at.spikes
        self._fetched = _Mark(at.step, at.samples, self._clock(), self._waited, self._sums)
        self._written = [self._fetched] * len(self._writers)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time spent inside is the step's, and counts as `train/data_wait_sec`."""
        start = time.perf_counter()
        yield
        self._has_batch = time.perf_counter()
        self._waited += self._has_batch - start

    def end_step(self, step: int, metrics: dict[str, Array]) -> None:
        """Takes a step that has been launched; logs the one before it, where that was due."""
        self._launching += time.perf_counter() - self._has_batch
        self.flush()
        of_datasets = _OF_DATASETS if self._datasets else ()
        besides = [name for name in (*_AUX, "loss_scale") if name in metrics]
        names = (*_FETCHED, *of_datasets, *self._extras, *besides)
        fetched = {name: metrics[name] for name in names}
        labels = metrics.get("valid_tokens", 1)
        losses = metrics["loss"], metrics["skipped"], labels
        self._latest = _Launched(step, fetched, self._waited, *losses)
        self._launched.append(self._latest)

    def flush(self) -> None:
        """Logs the latest step now where it is due, waiting for the device."""
        if self._latest is None:
            return
        if due := self._due(self._latest.step):
            self._log_latest(self._latest, due)
        elif self._latest.step % _MOST == 0:  # the step that ended the run is still among them
            self._progress.consecutive_bad = int(self._latest.metrics["consecutive"])

    def take_logged(self) -> Metrics:
        """The metrics of the last step that was logged, once; empty where none was since."""
        logged, self._logged = self._logged, {}
        return logged

    def log_latest(self) -> None:
        """Logs the metrics of the latest step everywhere, due or not."""
        if self._latest is not None:
            self._log_latest(self._latest, range(len(self._writers)))

    def rewind(self) -> None:
        """Goes on from an earlier step: what was logged of later ones gives way to what comes."""
        self._latest = None
        self._sums = self._sums._replace(skipped=self._progress.skipped)
        self._launched.clear()
        for writer in self._writers:
            writer.rewind(self._progress.step)
        self.start_clock()

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes to every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Writes what the model wrote to every writer."""
        for writer in self._writers:
            writer.write_samples(step, samples)

    def host_times(self) -> HostTimes:
        """Return the time that this host has spent so far."""
        return HostTimes(self._clock(), self._waited, self._launching)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count as step time: evaluation, checkpoints, traces.

        It begins when every step that was launched has ended.
        """
        self.flush()
        if self._latest is not None:
            jax.block_until_ready(self._latest.metrics)  # this wait is still the step's
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def close(self, exit_code: int = 0) -> bool:
        """Log what is due and close the writers, which learn how the run ends.

        Returns:
            False if metrics are lost; later writers then learn of `Exit.STORAGE`.
        """
        self.flush()
        is_whole = True
        for writer in self._writers:
            is_whole &= writer.close(exit_code if is_whole or exit_code else Exit.STORAGE.code)
        return is_whole

    def _due(self, step: int) -> Sequence[int]:
        """The writers to which `step` goes: all take the first and the last."""
        everywhere = step in (1, self._last_step)
        return [i for i, writer in enumerate(self._writers) if everywhere or writer.due(step)]

    def _log_latest(self, latest: _Launched, writers: Sequence[int]) -> None:
        launched = list(self._launched)
        each = [(launch.loss, launch.skipped, launch.labels) for launch in launched]
        values, fetched = jax.device_get((latest.metrics, each))
        self._latest = None
        self._launched.clear()
        self._progress.consecutive_bad = int(values["consecutive"])
        step = int(values["step"])  # where the state stands still, behind the one launched
        took_place = len(launched) - (latest.step - step)
        if step == self._fetched.step or took_place < 1:
            return
        if step < latest.step:
            latest = launched[took_place - 1]
            values = jax.device_get(latest.metrics)
        losses = [float(loss) for loss, *_ in fetched[:took_place]]
        skipped, labels = ([int(launch[i]) for launch in fetched[:took_place]] for i in (1, 2))
        left_out = sum(launch.step in self._left_out for launch in launched[:took_place])
        self._sums = self._sums._replace(left_out=self._sums.left_out + left_out)
        self._sums = self._sums.plus(losses, skipped, labels)
        self._warn(step, int(values["nonfinite"]), int(values["spikes"]))
        self._warn_of_labels(step, labels.count(0))
        samples = int(values["counts"].samples)
        since = self._fetched
        now = _Mark(step, samples, self._clock(), latest.waited, self._sums)
        self._fetched = now
        speed = self._speed(since, now)
        metrics = {
            "train/loss": losses[-1],
            "train/grad_norm": float(values["grad_norm"]),
            "train/lr": float(values["lr"]),
            "train/samples": float(samples),
            "train/tokens": float(int(values["counts"].tokens)),
            "train/valid_tokens": float(int(values["counts"].valid_tokens)),
            "train/skipped_steps": float(values["skipped"]),
            "train/nonfinite_steps": float(values["nonfinite"]),
            "train/spike_steps": float(values["spikes"]),
            **_padding(values),
            **_loss_scale(values),
            **self._by_dataset(values),
            **collected({name: values[name] for name in self._extras}),
            **aux_metrics(values),
            **self._smoothed.update(losses, _steps(since, now), speed),
            **memory(jax.local_devices()),
        }
        self._logged = metrics
        for i in writers:
            self._writers[i].write(step, metrics | self._interval(self._written[i], now))
            self._written[i] = now

    def _warn(self, step: int, nonfinite: int, spikes: int) -> None:
        """Tells of bad steps since it last did, whatever is done about them."""
        more_nonfinite, more_spikes = nonfinite - self._warned[0], spikes - self._warned[1]
        if more_nonfinite > 0 or more_spikes > 0:
            log.warning(
                "up to step %d: %d step(s) whose loss or gradient norm was not finite, %d spike(s)",
                step, more_nonfinite, more_spikes,
            )  # fmt: skip
        self._warned = nonfinite, spikes

    def _warn_of_labels(self, step: int, without: int) -> None:
        """Warn once that there are steps without any label."""
        if without and not self._has_warned_of_labels:
            self._has_warned_of_labels = True
            log.warning(
                "up to step %d: %d step(s) without any label that counts. Nothing is learned from "
                "such a step, and its loss is null. Look at the masks of the data; prompts longer "
                "than train.seq_len leave no label, too (data.overlong)",
                step, without,
            )  # fmt: skip

    def _interval(self, since: _Mark, now: _Mark) -> Metrics:
        """Means over the steps between two marks: each writer has those of its own interval."""
        speed = self._speed(since, now)
        wait = (now.waited - since.waited) / _steps(since, now)
        return {**speed, "train/data_wait_sec": wait, **now.sums.since(since.sums)}

    def _speed(self, since: _Mark, now: _Mark) -> Metrics:
        steps = _steps(since, now)
        return self._cost.speed(
            max((now.seconds - since.seconds) / steps, 1e-9), (now.samples - since.samples) / steps
        )

    def _by_dataset(self, values: dict[str, Any]) -> Metrics:
        """Return the mean loss and token count of each dataset in the step."""
        metrics: Metrics = {}
        for i, name in enumerate(self._datasets):
            nats, tokens = (float(values[of_all][i]) for of_all in _OF_DATASETS)
            metrics[f"data/{name}/tokens"] = tokens
            if tokens:
                metrics[f"loss/{name}"] = nats / tokens
        return metrics

    def _clock(self) -> float:
        return time.perf_counter() - self._paused


_MOST = 1000  # steps between two looks at the device
_FETCHED = ("grad_norm", "lr", "step", "counts", "skipped", "consecutive", "nonfinite", "spikes")
_OF_DATASETS = ("dataset_nll", "dataset_tokens")
_AUX = ("losses", "side")


def _padding(values: dict[str, Any]) -> Metrics:
    """Tokens so far that are padding, where some are."""
    padding = int(values["counts"].padding)
    return {"train/padding_tokens": float(padding)} if padding else {}


def _loss_scale(values: dict[str, Any]) -> Metrics:
    """Return the loss scale of the next step, if the loss is scaled."""
    return {"train/loss_scale": float(values["loss_scale"])} if "loss_scale" in values else {}


def _steps(since: _Mark, now: _Mark) -> int:
    return max(1, now.step - since.step)
