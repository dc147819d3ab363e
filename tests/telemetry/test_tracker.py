"""Metrics of the tracker and of writers, with a fake clock."""

import logging
import math
import types

import jax
import numpy as np
import pytest

from jaxforge.state.progress import Progress
from jaxforge.state.train_state import Counts
from jaxforge.telemetry import measures
from jaxforge.telemetry.line_formats import Megatron, RunFacts
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.sinks import format_line
from jaxforge.telemetry.tracker import Tracker
from tests.telemetry.recording import RecordingSink, scalars


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(
        "jaxforge.telemetry.goodput.time", types.SimpleNamespace(perf_counter=clock)
    )
    return clock


@pytest.fixture
def messages(caplog, monkeypatch):
    logger = logging.getLogger("jaxforge")
    monkeypatch.setattr(logger, "propagate", False)  # as in a run
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def run(tracker, clock, steps, seconds=2.0, wait=0.5, losses=None):
    """Run steps that take `seconds` each, `wait` of them for data."""
    tracker.start_clock()
    for step in steps:
        with tracker.waiting_for_data():
            clock.now += wait
        tracker.end_step(step, scalars(step, losses[step - 1] if losses else 1.0))
        clock.now += (seconds(step) if callable(seconds) else seconds) - wait
    tracker.close()


def test_sink_receives_means_over_its_interval(clock):
    often, seldom = RecordingSink(), RecordingSink()
    tracker = Tracker(
        [MetricWriter("a", often, 2), MetricWriter("b", seldom, 5)],
        StepCost(tokens=100),
        Progress(),
        last_step=11,
    )
    # The clock is read when the metrics of a step arrive: here, after the launch of the next.
    run(tracker, clock, range(1, 12), seconds=lambda step: float(step))
    assert list(often.lines) == [1, 2, 4, 6, 8, 10, 11]
    assert list(seldom.lines) == [1, 5, 10, 11]
    assert often.lines[10]["train/step_time_sec"] == pytest.approx((9 + 10) / 2)
    assert seldom.lines[10]["train/step_time_sec"] == pytest.approx((6 + 7 + 8 + 9 + 10) / 5)
    assert seldom.lines[10]["train/tokens_per_sec"] == pytest.approx(100 / 8)
    assert often.closed
    assert seldom.closed


def test_megatron_line_counts_skipped_iterations_and_samples(clock):
    """Step 2 has no labels, 3 is left out with 6 sequences, the loss of 4 is NaN, 5 is a spike.

    Megatron updates without labels, passes over iterations to skip, and counts refused updates.
    """
    sink = RecordingSink()
    writers = [MetricWriter("a", sink, 6)]
    tracker = Tracker(writers, StepCost(100, 1), Progress(), 10**9, left_out={3: 6, 9: 7})
    skipped, losses = (0, 1, 2, 3, 4, 4, 4), {2: math.nan, 3: math.nan, 4: math.nan}
    for step, count in enumerate(skipped, 1):
        values = scalars(step, losses.get(step, 2.0), count)
        tracker.end_step(step, values | {"valid_tokens": np.int32(0 if step == 2 else 8)})
    line = sink.lines[6]
    assert line["interval/skipped_steps"] == 4
    assert (line["interval/left_out_steps"], line["interval/unlabeled_steps"]) == (1, 1)
    assert (line["interval/nan_steps"], line["train/left_out_samples"]) == (1, 6)
    absent = {"interval/left_out_steps", "interval/unlabeled_steps", "train/left_out_samples"}
    assert not absent & sink.lines[1].keys()
    megatron = Megatron(RunFacts(9, 100, 1, StepCost(100, 1)))
    text = megatron.train(6, line)
    assert "number of skipped iterations:   2 | number of nan iterations:   1 |" in text
    assert " consumed samples:            6 | skipped samples:            6 |" in text
    assert "skipped samples" not in megatron.train(1, sink.lines[1])


def test_epoch_summary_covers_steps_since_last_epoch(clock, messages):
    """An epoch has 10 sequences; steps have 4, so epochs end with steps 3, 5, 8 and 10."""
    messages.set_level(logging.INFO, "jaxforge")
    sink, progress = RecordingSink(), Progress(sequences_per_epoch=10)
    tracker = Tracker([MetricWriter("a", sink, 7)], StepCost(100), progress, 10**9)
    tracker.start_clock()
    summaries = {}
    for step in range(1, 12):
        progress.advance(4, 4)
        sink.lines.pop(step - 1, None)
        values = scalars(step, float(step), skipped=int(step >= 4))
        tracker.end_step(step, values | {"counts": Counts.of(Progress(samples=4 * step))})
        clock.now += 2.0
        if "epoch/number" in sink.lines.get(step - 1, {}):
            summaries[step - 1] = sink.lines[step - 1]
    losses = {3: (1 + 2 + 3) / 3, 5: 5.0, 8: (6 + 7 + 8) / 3, 10: (9 + 10) / 2}
    assert {step: line["epoch/loss"] for step, line in summaries.items()} == losses
    numbers = [(line["epoch/number"], line["epoch/steps"]) for line in summaries.values()]
    assert numbers == [(1, 3), (2, 2), (3, 3), (4, 2)]
    assert [line["epoch/skipped_steps"] for line in summaries.values()] == [0, 1, 0, 0]
    # The clock is read one step late, at the launch of the next step.
    assert [line["epoch/time_sec"] for line in summaries.values()] == [6.0, 4.0, 6.0, 4.0]
    assert messages.messages[0] == (
        "epoch 1 ended at step 3: mean loss 2.0000, 3 steps, 0 skipped, 6.0 s"
    )


def test_epoch_is_fraction_of_passes_over_data(clock):
    sink, progress = RecordingSink(), Progress(sequences_per_epoch=10)
    tracker = Tracker([MetricWriter("a", sink, 1)], StepCost(100), progress, 10**9)
    tracker.end_step(1, scalars(1) | {"counts": Counts.of(Progress(samples=4))})
    tracker.flush()
    assert sink.lines[1]["train/epoch"] == 0.4
    assert "train/epoch" not in logged_without_epochs(clock)


def logged_without_epochs(clock):
    """Return a line of a run whose data have no epochs."""
    sink = RecordingSink()
    run(Tracker([MetricWriter("a", sink, 1)], StepCost(100), Progress(), 10**9), clock, [1])
    return sink.lines[1]


def test_data_wait_counts_and_pauses_do_not(clock):
    sink = RecordingSink()
    tracker = Tracker([MetricWriter("a", sink, 4)], StepCost(100), Progress(4, 4), 10**9)
    tracker.start_clock()
    for step, wait in ((5, 0.1), (6, 0.1), (7, 0.1), (8, 0.5), (9, 7.0)):
        with tracker.waiting_for_data():
            clock.now += wait
        tracker.end_step(step, scalars(step))
        if step == 6:
            with tracker.paused():
                clock.now += 100.0
    assert sink.lines[8]["train/data_wait_sec"] == pytest.approx(0.2)  # without step 9
    assert sink.lines[8]["train/step_time_sec"] < 7


def test_smoothed_loss_covers_every_step(clock):
    rng = np.random.default_rng(0)
    losses = list(rng.normal(size=40) + 5)
    losses[6] = math.nan  # a skipped step
    expected = None
    for loss in losses:
        if math.isfinite(loss):
            expected = loss if expected is None else 0.1 * loss + 0.9 * expected
    for interval in (1, 7, 40):
        sink = RecordingSink()
        tracker = Tracker([MetricWriter("a", sink, interval)], StepCost(100), Progress(), 40)
        run(tracker, clock, range(1, 41), losses=losses)
        assert sink.lines[40]["smoothed/loss"] == pytest.approx(expected, rel=1e-6)
        assert sink.lines[40]["smoothed/step_time"] == pytest.approx(2.0, rel=0.05)


def test_smoothed_speed_uses_interval_mean():
    smoothed = measures.Smoothed()
    smoothed.update([1.0], 1, {"train/tokens_per_sec": 10.0, "train/step_time_sec": 3.0})
    got = smoothed.update([1.0] * 3, 3, {"train/tokens_per_sec": 20.0, "train/step_time_sec": 1.0})
    expected = 10.0
    for _ in range(3):
        expected = 0.1 * 20 + 0.9 * expected
    assert got["smoothed/tokens_per_sec"] == pytest.approx(expected)
    assert "smoothed/mfu" not in got


def test_dataset_loss_requires_tokens():
    sink = RecordingSink()
    names = ["web", "a/b", "none"]
    tracker = Tracker(
        [MetricWriter("a", sink, 1)], StepCost(100), Progress(), 10**9, datasets=names
    )
    sums = {"dataset_nll": np.float32([6, 10, 0]), "dataset_tokens": np.int32([3, 4, 0])}
    tracker.end_step(1, scalars(1) | sums)
    tracker.close()
    logged = {k: v for k, v in sink.lines[1].items() if k.startswith(("loss/", "data/"))}
    assert logged == {
        "loss/web": 2.0, "data/web/tokens": 3.0, "loss/a/b": 2.5, "data/a/b/tokens": 4.0,
        "data/none/tokens": 0.0,
    }  # fmt: skip


def test_sink_receives_mean_loss_of_its_interval(clock):
    often, seldom = RecordingSink(), RecordingSink()
    tracker = Tracker(
        [MetricWriter("a", often, 2), MetricWriter("b", seldom, 4)],
        StepCost(100),
        Progress(),
        8,
    )
    run(tracker, clock, range(1, 9), losses=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert [line["interval/loss"] for line in often.lines.values()] == [1.0, 2.0, 3.5, 5.5, 7.5]
    assert [line["interval/loss"] for line in seldom.lines.values()] == [1.0, 3.0, 6.5]


def test_resumed_run_averages_steps_since_resume(clock):
    """MindSpeed divides losses since the resume by all steps since the first."""
    sink = RecordingSink()
    tracker = Tracker(
        [MetricWriter("a", sink, 2)], StepCost(100), Progress(10, 10, skipped=3), 10**9
    )
    clock.now += 50.0  # restoring and compiling
    tracker.start_clock()
    for step, loss in ((11, 5.0), (12, 7.0)):
        clock.now += 2.0
        tracker.end_step(step, scalars(step, loss, skipped=3))
    tracker.close()
    line = sink.lines[12]
    assert (line["interval/loss"], line["interval/skipped_steps"]) == (6.0, 0.0)
    assert line["train/step_time_sec"] == pytest.approx(2.0)
    assert line["train/loss"] == 7.0


def test_host_time_is_data_wait_and_launch(clock):
    tracker = Tracker([], StepCost(100), Progress(), 10)
    before = tracker.host_times()
    for step in (1, 2):
        with tracker.waiting_for_data():
            clock.now += 0.5
        clock.now += 0.25
        tracker.end_step(step, scalars(step))
        clock.now += 4.0
        with tracker.paused():
            clock.now += 100.0
    after = tracker.host_times()
    assert [a - b for a, b in zip(after, before, strict=True)] == pytest.approx([9.5, 1.0, 0.5])


def test_tokens_come_from_device_counts(clock):
    sink = RecordingSink()
    tracker = Tracker([MetricWriter("a", sink, 1)], StepCost(100), Progress(10, 10), 10**9)
    tracker.end_step(11, scalars(11, tokens=1000))
    tracker.end_step(12, scalars(12, tokens=5 * 2**30 + 7))
    tracker.close()
    assert [sink.lines[step]["train/tokens"] for step in (11, 12)] == [1000, 5 * 2**30 + 7]
    assert [sink.lines[step]["train/samples"] for step in (11, 12)] == [11, 12]


def test_failing_sink_stops_neither_run_nor_sinks(clock, messages):
    broken, whole = RecordingSink(fails={1, 2, 4, 5, 6, 7}), RecordingSink()
    writers = [MetricWriter("broken", broken, 1), MetricWriter("whole", whole, 1)]
    run(Tracker(writers, StepCost(100), Progress(), 8), clock, range(1, 9))
    assert list(whole.lines) == list(range(1, 9))
    assert list(broken.lines) == [3]  # retried after failures, disabled after three in a row
    assert broken.closed
    reasons = [record.getMessage() for record in messages.records]
    assert len(reasons) == 3
    assert reasons[0].startswith("broken failed: OSError: [Errno 28] No space left")
    assert reasons[2].startswith("broken is disabled until the next start: it failed 3 times")


def test_bad_steps_are_warned_of_once(clock, messages):
    """Steps before a resume are not counted; steps counted by a save are."""
    progress = Progress(10, 10, nonfinite=3, spikes=1)
    tracker = Tracker([MetricWriter("a", RecordingSink(), 1)], StepCost(100), progress, 10**9)
    tracker.end_step(11, scalars(11) | {"nonfinite": 3, "spikes": 1})
    tracker.flush()
    assert not messages.records
    tracker.end_step(12, scalars(12) | {"nonfinite": 4, "spikes": 1})
    progress.nonfinite = 4  # as `Progress.sync_from_device` does
    tracker.flush()
    (record,) = messages.records
    assert "step 12: 1 step(s) whose loss or gradient norm was not finite, 0 spike(s)" in (
        record.getMessage()
    )


def test_sink_failing_to_close_does_not_fail_run(messages):
    class Stuck(RecordingSink):
        def close(self, exit_code):
            raise RuntimeError("no network")

    after = RecordingSink()
    Tracker(
        [MetricWriter("x", Stuck(), 1), MetricWriter("y", after, 1)], StepCost(1), Progress(), 1
    ).close()
    assert after.closed
    assert "x could not be closed: RuntimeError: no network" in messages.text


def test_process_without_sinks_reads_same_steps():
    """Otherwise it would notice a halt later than process 0."""
    progress = Progress()
    tracker = Tracker([MetricWriter("a", None, 3)], StepCost(100), progress, 10**9)
    seen = []
    for step in range(1, 8):
        tracker.end_step(step, scalars(step) | {"consecutive": step})
        seen.append(progress.consecutive_bad)
    assert seen == [0, 1, 1, 3, 3, 3, 6]


def test_mfu_requires_peak():
    steps = StepCost(tokens=1000, flops=4e9, causal_flops=3e9, n_devices=2, peak_tflops=8.0)
    speed = steps.speed(0.5, 1)
    assert speed == {
        "train/tokens_per_sec": 2000,
        "train/step_time_sec": 0.5,
        "train/tflops_per_device": 3.0,
        "train/mfu": 0.5,
        "train/mfu_causal": 0.375,
    }
    unknown = StepCost(tokens=1000, flops=4e9, causal_flops=3e9, n_devices=2).speed(0.5, 1)
    assert unknown.keys() == speed.keys() - {"train/mfu", "train/mfu_causal"}


def test_memory_is_largest_over_devices_or_missing():
    assert measures.memory(jax.devices()) == {}  # CPUs have no statistics

    def device(used, peak, **more):
        stats = {"bytes_in_use": used * 2**30, "peak_bytes_in_use": peak * 2**30,
                 "bytes_limit": 80 * 2**30, **more}  # fmt: skip
        return types.SimpleNamespace(memory_stats=lambda: stats)

    assert measures.memory([device(10, 40), device(20, 30)]) == {
        "gpu/allocated_gb": 20, "gpu/peak_gb": 40, "gpu/total_gb": 80, "gpu/mem_utilization": 0.5,
    }  # fmt: skip
    assert measures.memory([device(1, 2, pool_bytes=60 * 2**30)])["gpu/reserved_gb"] == 60


def test_line_matches_kempnerforge():
    metrics = {
        "train/step_time_sec": 3.134, "gpu/peak_gb": 80.71, "gpu/total_gb": 140.4,
        "train/mfu": 0.5449, "train/tokens_per_sec": 10471.4, "train/grad_norm": 1.2345,
        "train/lr": 3e-4, "train/loss": 5.02131,
    }  # fmt: skip
    line = format_line(10, metrics)
    assert line == (
        "[step 10] loss=5.0213 | lr=3.00e-04 | grad_norm=1.234 | tok/s=10,471 | mfu=54.5% | "
        "mem=80.7/140GB | step_time=3.13s"
    )
    del metrics["gpu/peak_gb"], metrics["train/mfu"]
    assert format_line(10, metrics).endswith("tok/s=10,471 | step_time=3.13s")
    fast = metrics | {"train/step_time_sec": 0.00421}
    assert format_line(10, fast).endswith("tok/s=10,471 | step_time=0.0042s")
    assert format_line(10, {"eval/loss": 2.0, "eval/wiki/perplexity": 7.389}) == (
        "[step 10] eval_loss=2.0000 | eval_wiki_perplexity=7.39"
    )
    tasks = {
        "piqa/acc": 0.5,
        "piqa/acc_stderr": 0.01,
        "core/copa/acc": 0.6,
        "gsm8k/flexible/x": 1.0,
    }
    tasks = {f"eval/tasks/{name}": value for name, value in tasks.items()}
    assert format_line(10, tasks) == (
        "[step 10] piqa/acc=0.5000±0.0100 | core/copa/acc=0.6000 | gsm8k/flexible/x=1.0000"
    )
    assert format_line(10, tasks | {"eval/tasks/core": 0.2, "eval/tasks/core_stderr": 0.003}) == (
        "[step 10] piqa/acc=0.5000±0.0100 | gsm8k/flexible/x=1.0000 | core=0.2000±0.0030"
    )
