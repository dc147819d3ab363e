"""Tracker of metrics: reads them from the device one step late, and writes them to the sinks.

    host     launch n | launch n+1 | read the metrics of n, if some writer is due | launch n+2
    device    ......... step n ......... | ............. step n+1 ............. |

The host launches step n + 1 before it waits for the metrics of step n, so the device is never idle.
Nothing is copied from the device between two logged steps.
"""

import collections
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.storage.requests import Traffic, traffic
from jaxforge.telemetry.goodput import ActivityClock, goodput_metrics
from jaxforge.telemetry.measures import (
    Smoothed,
    StepCost,
    Sums,
    aux_metrics,
    collected,
    describe_epoch,
    epoch_summary,
    memory,
)
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.sinks import Metrics, Sample

log = logging.getLogger(__name__)


class _Launched(NamedTuple):
    """A launched step with its metrics on the device.

    Attributes:
        step: number of the step. A step that is launched after the guard has halted the run changes
            nothing, and does not get this number.
        metrics: the metrics to log.
        waited: seconds that this process had waited for data before the step.
        loss: loss of the step.
        skipped: count of skipped steps of the run after the step.
        labels: number of valid labels.
        ends_epoch: True if an epoch of the data ends with the batch of the step.
    """

    step: int
    metrics: dict[str, Array]
    waited: float
    loss: Float[Array, ""]
    skipped: Int[Array, ""]
    labels: Int[Array, ""] | int
    ends_epoch: bool


class HostTimes(NamedTuple):
    """Seconds of this process since it started.

    Attributes:
        clock: total time, without pauses.
        data_wait: waiting for batches.
        launch: from the arrival of a batch to the launch of its step.
    """

    clock: float
    data_wait: float
    launch: float


class _Mark(NamedTuple):
    """Counters at the end of an interval.

    Attributes:
        step: number of the step.
        samples: sequences drawn.
        seconds: clock of the tracker.
        waited: seconds spent waiting for data.
        sums: sums over the steps of the run.
        traffic: data read from buckets.
    """

    step: int
    samples: int
    seconds: float
    waited: float
    sums: Sums
    traffic: Traffic


class Tracker:
    """Selects the steps to log, measures their time, and writes their metrics.

    Args:
        writers: the writers of metrics; the same on every process.
        cost: tokens and FLOPs of an update.
        progress: the counters of the run; `consecutive_bad` is updated when metrics are read.
        last_step: `train.max_steps`.
        datasets: names of the datasets of a mixture.
        extras: `metrics.collect`: additional metrics to log.
        left_out: sequences of each update of `train.iterations_to_skip`, by its number.
        clock: the clock of this process, from which all times are taken.
        read: reads metrics from the devices (`Program.read_metrics`); dicts by their names.
    """

    def __init__(
        self,
        writers: Sequence[MetricWriter],
        cost: StepCost,
        progress: Progress,
        last_step: int,
        datasets: Sequence[str] = (),
        extras: Sequence[str] = (),
        left_out: Mapping[int, int] | None = None,
        clock: ActivityClock | None = None,
        read: Callable[[Any], Any] = jax.device_get,
    ) -> None:
        self.read = read
        self._activities = clock or ActivityClock()
        self._datasets, self._extras, self._left_out = datasets, extras, left_out or {}
        self._writers, self._cost, self._progress = writers, cost, progress
        self._last_step = last_step
        self._logged: Metrics = {}
        self._latest: _Launched | None = None
        # Steps since the last fetch, at most a thousand: reading more would cost more than it adds
        # to a mean.
        self._launched: collections.deque[_Launched] = collections.deque(maxlen=MOST)
        self._has_warned_of_labels = False
        self._smoothed, self._sums = Smoothed(), Sums(skipped=progress.skipped)
        self._first_traffic = self._traffic = traffic()
        self._launching = 0.0
        self._begin_interval()
        self._has_batch = self._fetched.seconds

    def start_clock(self) -> None:
        """Start timing here, so that setup and compilation do not count as step time."""
        self._activities.begin_steps(self._progress.step)
        self._begin_interval()

    def _begin_interval(self) -> None:
        progress = self._progress
        # Counts of earlier starts have been reported already.
        self._warned = progress.nonfinite, progress.spikes
        self._fetched = _Mark(
            progress.step,
            progress.samples,
            self._activities.unpaused(),
            self._activities.waited(),
            self._sums,
            self._traffic,
        )
        # One mark per writer, since each has its own interval.
        self._written = [self._fetched] * len(self._writers)
        self._attention_logit: tuple[int, float] | None = None
        self._epoch_start, self._epoch = self._fetched, self._epochs(progress.samples)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time of the block as `train/data_wait_sec` of the step."""
        with self._activities.during("data_wait"):
            yield
        self._has_batch = self._activities.unpaused()

    def note_attention_logit(self, step: int, logit: float) -> None:
        """Record the largest attention logit of a step, for the next line of each writer."""
        self._attention_logit = step, logit

    def end_step(self, step: int, metrics: dict[str, Array]) -> None:
        """Record a step that has been launched; log the previous step if it is due.

        Args:
            step: number of the step.
            metrics: metrics of the step, on the device.
        """
        # Step n is read only now, after step n + 1 was launched: the device never waits for the
        # host.
        self._launching += self._activities.unpaused() - self._has_batch
        self.flush()
        by_dataset = _OF_DATASETS if self._datasets else ()
        optional = [name for name in (*_AUX, "loss_scale") if name in metrics]
        names = (*_FETCHED, *by_dataset, *self._extras, *optional)
        fetched = {name: metrics[name] for name in names}
        # A step without this count has labels in every row.
        labels = metrics.get("valid_tokens", 1)
        losses = metrics["loss"], metrics["skipped"], labels
        previous, self._epoch = self._epoch, self._epochs(self._progress.samples)
        ends_epoch = self._epoch > previous
        self._latest = _Launched(step, fetched, self._activities.waited(), *losses, ends_epoch)
        self._launched.append(self._latest)
        self._activities.launched(step)

    def flush(self) -> None:
        """Wait for the latest step and log it, if it is due.

        All writers take the first and the last step. An epoch is summarised at its last step.
        """
        if self._latest is None:
            return
        step = self._latest.step
        # `due` depends on the step alone, so all processes read the device at the same steps.
        is_due_everywhere = step in (1, self._last_step)
        due = [i for i, writer in enumerate(self._writers) if is_due_everywhere or writer.due(step)]
        if due or self._latest.ends_epoch:
            self._log_latest(self._latest, due)
        elif step % MOST == 0:  # a step that halted the run must still be among the recorded ones
            bad = self.read({"consecutive": self._latest.metrics["consecutive"]})
            self._progress.consecutive_bad = int(bad["consecutive"])

    def take_logged(self) -> Metrics:
        """Return the metrics of the last logged step once; empty if none was logged since."""
        logged, self._logged = self._logged, {}
        return logged

    def log_latest(self) -> None:
        """Log the metrics of the latest step with every writer, even if none is due."""
        if self._latest is not None:
            self._log_latest(self._latest, range(len(self._writers)))

    def rewind(self) -> None:
        """Continue from an earlier step after a rollback; sinks drop the metrics of later steps."""
        self._latest = None
        # Losses of undone steps stay in the sums: only differences of later marks are logged.
        self._sums = self._sums._replace(skipped=self._progress.skipped)
        self._launched.clear()
        for writer in self._writers:
            writer.rewind(self._progress.step)
        self._traffic = traffic()
        self.start_clock()

    def log(self, step: int, metrics: Metrics) -> None:
        """Write metrics with every writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write samples of the model with every writer."""
        for writer in self._writers:
            writer.write_samples(step, samples)

    def host_times(self) -> HostTimes:
        """Return the time that this host has spent so far."""
        return HostTimes(self._activities.unpaused(), self._activities.waited(), self._launching)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from step times: evaluation, checkpoints, traces.

        The block starts when all launched steps have finished.
        """
        self.flush()
        if self._latest is not None:
            jax.block_until_ready(self._latest.metrics)  # this wait is still step time
        with self._activities.during("other"):
            yield

    def close(self, exit_code: int = 0) -> bool:
        """Log the latest step if it is due, and close the writers.

        Args:
            exit_code: exit code of the run, for sinks that store it.

        Returns:
            False if metrics are lost; the remaining writers then get the code of `Exit.STORAGE`.
        """
        self.flush()
        # All writers are closed, also after a loss, whose exit code later ones get.
        is_complete = True
        for writer in self._writers:
            code = exit_code if is_complete or exit_code else Exit.STORAGE.code
            is_complete &= writer.close(code)
        return is_complete

    def _log_latest(self, latest: _Launched, writers: Sequence[int]) -> None:
        launched = list(self._launched)
        # One transfer for all steps since the last read.
        each = {"loss": [launch.loss for launch in launched]}
        values, fetched = self.read((latest.metrics, each))
        self._latest = None
        self._launched.clear()
        self._progress.consecutive_bad = int(values["consecutive"])
        # After too many bad steps the device no longer counts steps (`step.guard`), while the host
        # still launches some: those behind the last counted step did not change anything.
        step = int(values["step"])
        counted = len(launched) - (latest.step - step)
        if step == self._fetched.step or counted < 1:
            return
        # The guard has halted the run: log the last step that counted.
        if step < latest.step:
            latest = launched[counted - 1]
            values = self.read(latest.metrics)
        losses = [float(loss) for loss in fetched["loss"][:counted]]
        skipped, labels = [self._sums.skipped] * len(losses), [1] * len(losses)
        # Read only if they may differ from these: a step without labels is skipped, too.
        if int(values["skipped"]) != self._sums.skipped or not all(map(math.isfinite, losses)):
            counts = {
                "skipped": [launch.skipped for launch in launched[:counted]],
                "valid_tokens": [launch.labels for launch in launched[:counted]],
            }
            skipped, labels = ([int(x) for x in column] for column in self.read(counts).values())
        is_left_out = [launch.step in self._left_out for launch in launched[:counted]]
        self._sums = self._sums.plus(losses, skipped, labels, is_left_out)
        self._warn(step, int(values["nonfinite"]), int(values["spikes"]))
        self._warn_of_labels(step, labels.count(0))
        samples, since = int(values["counts"].samples), self._fetched
        # `latest.waited` was noted at the launch: later waits belong to later steps.
        now = self._fetched = _Mark(
            step, samples, self._activities.unpaused(), latest.waited, self._sums, traffic()
        )  # fmt: skip
        metrics = self._step_metrics(values, losses, since, now)
        if writers:
            self._logged = metrics
        for i in writers:
            self._writers[i].write(step, metrics | self._interval_metrics(self._written[i], now))
            self._written[i] = now
        self._summarise_epoch(now)

    def _step_metrics(
        self, values: dict[str, Any], losses: list[float], since: _Mark, now: _Mark
    ) -> Metrics:
        """Return the metrics that are the same for all writers, and advance the smoothed ones.

        Args:
            values: metrics of the step, read from the device.
            losses: losses of the steps since the last read.
            since: the last read.
            now: this read.
        """
        speed, padding = self._speed(since, now), int(values["counts"].padding)
        return {
            "train/loss": losses[-1],
            "train/grad_norm": float(values["grad_norm"]),
            "train/lr": float(values["lr"]),
            "train/samples": float(now.samples),
            "train/tokens": float(int(values["counts"].tokens)),
            "train/valid_tokens": float(int(values["counts"].valid_tokens)),
            "train/skipped_steps": float(values["skipped"]),
            "train/nonfinite_steps": float(values["nonfinite"]),
            "train/spike_steps": float(values["spikes"]),
            **self._epoch_and_left_out(now.step, now.samples),
            **({"train/padding_tokens": float(padding)} if padding else {}),
            **({"train/loss_scale": float(values["loss_scale"])} if "loss_scale" in values else {}),
            **self._by_dataset(values),
            **collected({name: values[name] for name in self._extras}),
            **aux_metrics(values),
            **self._smoothed.update(losses, _steps(since, now), speed),
            **memory(jax.local_devices()),
            **goodput_metrics(self._activities.run()),
        }

    def _interval_metrics(self, since: _Mark, now: _Mark) -> Metrics:
        """Return the means over the interval of a writer."""
        # Each writer has its own interval, and means are over that interval.
        wait = (now.waited - since.waited) / _steps(since, now)
        metrics = self._speed(since, now) | {"train/data_wait_sec": wait}
        metrics |= self._attention_logit_since(since, now) | now.sums.since(since.sums)
        # Runs that read no bucket lack these metrics.
        if now.traffic.reads > self._first_traffic.reads:
            metrics |= now.traffic.since(since.traffic)
        return metrics

    def _attention_logit_since(self, since: _Mark, now: _Mark) -> Metrics:
        """Return the latest measurement of the interval, if there is one."""
        step, logit = self._attention_logit or (0, 0.0)
        return {"train/max_attention_logit": logit} if since.step < step <= now.step else {}

    def _epochs(self, samples: int) -> int:
        """Return the number of complete epochs; 0 if the data have no epochs."""
        length = self._progress.sequences_per_epoch
        return samples // length if length else 0

    def _summarise_epoch(self, now: _Mark) -> None:
        """Log a summary if an epoch has ended since the last one."""
        since, epoch = self._epoch_start, self._epochs(now.samples)
        if epoch <= self._epochs(since.samples):
            return
        self._epoch_start = now
        summary = epoch_summary(
            epoch, _steps(since, now), now.seconds - since.seconds, now.sums.since(since.sums)
        )
        log.info("%s", describe_epoch(now.step, summary))
        self.log(now.step, summary)

    def _epoch_and_left_out(self, step: int, samples: int) -> Metrics:
        """Return passes over the data, and sequences of left-out updates, if known and not 0."""
        length = self._progress.sequences_per_epoch
        epoch = {"train/epoch": samples / length} if length else {}
        left_out = sum(n for number, n in self._left_out.items() if number <= step)
        return epoch | ({"train/left_out_samples": float(left_out)} if left_out else {})

    def _warn(self, step: int, nonfinite: int, spikes: int) -> None:
        """Warn of bad steps since the last warning, whether or not their updates are applied."""
        more_nonfinite, more_spikes = nonfinite - self._warned[0], spikes - self._warned[1]
        if more_nonfinite > 0 or more_spikes > 0:
            log.warning(
                "up to step %d: %d step(s) whose loss or gradient norm was not finite, %d spike(s)",
                step, more_nonfinite, more_spikes,
            )  # fmt: skip
        self._warned = nonfinite, spikes

    def _warn_of_labels(self, step: int, without: int) -> None:
        """Warn once that there are steps without valid labels."""
        if without and not self._has_warned_of_labels:
            self._has_warned_of_labels = True
            log.warning(
                "up to step %d: %d step(s) without valid labels. Such a step learns nothing, and "
                "its loss is null. Check the loss masks of the data. Prompts longer than "
                "train.seq_len leave no label either (data.overlong)",
                step, without,
            )  # fmt: skip

    def _speed(self, since: _Mark, now: _Mark) -> Metrics:
        steps = _steps(since, now)
        # Never 0: the clock may not advance within a short step.
        seconds = max((now.seconds - since.seconds) / steps, 1e-9)
        return self._cost.speed(seconds, (now.samples - since.samples) / steps)

    def _by_dataset(self, values: dict[str, Any]) -> Metrics:
        """Return the mean loss and token count of each dataset in the step."""
        metrics: Metrics = {}
        for i, name in enumerate(self._datasets):
            nats, tokens = (float(values[key][i]) for key in _OF_DATASETS)
            metrics[f"data/{name}/tokens"] = tokens
            if tokens:
                metrics[f"loss/{name}"] = nats / tokens
        return metrics


MOST = 1000  # most steps between two reads from the device
_FETCHED = ("grad_norm", "lr", "step", "counts", "skipped", "consecutive", "nonfinite", "spikes")
_OF_DATASETS = ("dataset_nll", "dataset_tokens")
_AUX = ("losses", "side", "logits")


def _steps(since: _Mark, now: _Mark) -> int:
    return max(1, now.step - since.step)
