"""Contents of progress.txt with a fake clock, and reading of the file."""

import datetime
import types

import pytest

from jaxforge.errors import StorageError
from jaxforge.model.flops import causal_flops_per_token
from jaxforge.state.progress import Progress
from jaxforge.telemetry import progress_log
from jaxforge.telemetry.progress_log import ProgressLog, start_time_and_flops
from jaxforge.training.callbacks.progress_txt import ProgressTxt
from tests.conftest import tiny_config

NOON = datetime.datetime(2026, 8, 22, 12, 0, 0)


class Clock(datetime.datetime):
    seconds = 0.0

    @classmethod
    def now(cls):
        return NOON + datetime.timedelta(seconds=cls.seconds)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    Clock.seconds = 0.0
    monkeypatch.setattr(progress_log, "datetime", types.SimpleNamespace(datetime=Clock))
    monkeypatch.setattr(
        progress_log, "time", types.SimpleNamespace(monotonic=lambda: 7.0 + Clock.seconds)
    )
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return Clock


@pytest.fixture
def path(tmp_path):
    return tmp_path / "progress.txt"


def test_lines_match_megatron(path, clock):
    progress = ProgressLog(path, 8, flops=0.0)
    clock.seconds = 100.0
    progress.append_checkpoint("Saved checkpoint", 200, flops=4e16, tokens=12_345_678_901)
    progress.append_checkpoint("Saving async checkpoint", 201, 4e16, 12_345_678_901)
    progress.append("Saved async checkpoint", "Iteration: 201")
    measured = (
        "Job throughput: 50.0 MODEL_TFLOP/s/GPU\tCumulative throughput: 50.0 MODEL_TFLOP/s/GPU\t"
        "Floating-point operations: 4.00e+16\tTokens (in billions): 12.35\n"
    )
    later = "2026-08-22 12:01:40\tJob ID: 4711\t# GPUs: 8"
    assert path.read_text() == (
        "2026-08-22 12:00:00\tJob ID: 4711\t# GPUs: 8\tStarting job\n"
        f"{later}\tSaved checkpoint\tIteration: 200\t{measured}"
        f"{later}\tSaving async checkpoint\tIteration: 201\t{measured}"
        f"{later}\tSaved async checkpoint\tIteration: 201\n"
    )


def throughputs(path):
    """Return job and cumulative throughput of the last line."""
    fields = path.read_text().splitlines()[-1].split("\t")
    return [float(field.split(": ")[1].split()[0]) for field in fields[5:7]]


def test_job_and_cumulative_throughput_have_different_starts(path, clock):
    first = ProgressLog(path, 8, flops=0.0)
    clock.seconds = 100.0
    first.append_checkpoint("Saved checkpoint", 10, 4e16, 0)
    clock.seconds = 500.0  # 400 seconds in the queue
    second = ProgressLog(path, 8, flops=4e16)
    clock.seconds = 1000.0
    second.append_checkpoint("Saved checkpoint", 60, 2.4e17, 0)
    assert throughputs(path) == [50.0, 30.0]  # 2e17 / 500 s / 8, and 2.4e17 / 1000 s / 8


def test_other_device_count_restarts_cumulative_throughput(path, clock):
    ProgressLog(path, 8, flops=0.0).append_checkpoint("Saved checkpoint", 10, 1.23456e20, 0)
    clock.seconds = 3600.0
    half = ProgressLog(path, 4, flops=1.23456e20)
    clock.seconds = 3700.0
    half.append_checkpoint("Saved checkpoint", 20, 1.23456e20 + 2e16, 0)
    assert throughputs(path) == [50.0, 50.0]  # the rounded 1.23e20 of the file would give 1190
    clock.seconds = 4000.0
    ProgressLog(path, 8, flops=1.23456e20 + 2e16)
    assert start_time_and_flops(path, 8) == (NOON + datetime.timedelta(seconds=4000), 1.23e20)


def test_tokens_are_exact(path, clock, tmp_path):
    tokens = 15_000_000_000_001
    config = tiny_config(checkpoint={"dir": str(tmp_path)})
    per_token = causal_flops_per_token(config.model, config.train.seq_len)
    log = ProgressTxt(config, Progress(tokens=tokens))
    assert log._flops == pytest.approx(tokens * per_token, rel=1e-15)


def line(day, hour, job, devices, *fields):
    return "\t".join(
        (f"2026-08-{day:02} {hour:02}:00:00", f"Job ID: {job}", f"# GPUs: {devices}", *fields)
    ) + "\n"  # fmt: skip


MEASURED = (
    "Job throughput: 0.0 TFLOP/s/GPU", "Cumulative throughput: 1.0 TFLOP/s/GPU",
    "Floating-point operations: {}", "Tokens (in billions): 0.01",
)  # fmt: skip
LINES = (
    line(1, 0, "", 4, "Starting job")
    + line(1, 1, "", 4, "Saved checkpoint", "Iteration: 5", *MEASURED).format("1.00e+15")
    + line(2, 0, 1, 8, "Starting job")
    + line(2, 1, 1, 8, "Saving async checkpoint", "Iteration: 7", *MEASURED).format("2.00e+15")
)
DURABLE = line(2, 2, 1, 8, "Saved async checkpoint", "Iteration: 7")
FOUR_AGAIN = line(3, 0, 2, 4, "Starting job")
EIGHT_AGAIN = line(4, 0, 3, 8, "Starting job")


@pytest.mark.parametrize(
    ("text", "devices", "day", "flops"),
    [
        (LINES, 8, 2, 1e15),
        (LINES + DURABLE + EIGHT_AGAIN, 8, 2, 1e15),  # the first of them
        (LINES + FOUR_AGAIN, 4, 3, 1e15),  # the asynchronous save never finished
        (LINES + DURABLE + FOUR_AGAIN, 4, 3, 2e15),
        (LINES + DURABLE + FOUR_AGAIN + EIGHT_AGAIN, 8, 4, 2e15),
    ],
)
def test_first_job_has_same_device_count(path, text, devices, day, flops):
    path.write_text(text)
    assert start_time_and_flops(path, devices) == (datetime.datetime(2026, 8, day), flops)


@pytest.mark.parametrize(
    "bad",
    [
        "", "torn", "a\tb\tc\td", "2026-08-02 00:00:00\tJob ID: 1\t# GPUs: x\tStarting job",
        "2026-08-02 00:00:00\tJob ID: 1\t# GPUs: 8\tSaved checkpoint",
        "2026-08-02 00:00:00\tJob ID: 1\t# GPUs: 8\tSaved checkpoint\tIteration: 7\tJob thr",
    ],
)  # fmt: skip
def test_invalid_lines_are_ignored_with_warning(path, messages, bad):
    path.write_text(FOUR_AGAIN + bad + "\n" + EIGHT_AGAIN)
    assert start_time_and_flops(path, 8) == (datetime.datetime(2026, 8, 4), 0.0)
    assert messages.messages == [f"{path}:2 is not a line of a progress log: ignored"]


def test_file_without_matching_job_raises(path):
    path.write_text(LINES)
    with pytest.raises(ValueError, match='has no "Starting job" on 16 devices'):
        start_time_and_flops(path, 16)


def test_unwritable_line_does_not_stop_run(tmp_path, messages, clock):
    progress = ProgressLog(tmp_path, 8, flops=0.0)  # a directory
    clock.seconds = 1.0
    progress.append_checkpoint("Saved checkpoint", 1, 1e15, 1)
    assert ": Is a directory. The run continues" in messages.text
    with pytest.raises(StorageError, match="lacks the last 2 lines: Is a directory"):
        progress.close()
    tmp_path.rmdir()
    progress.append("Saved checkpoint")  # the disk works again
    progress.close()
    assert len(tmp_path.read_text().splitlines()) == 3


def test_clock_set_back_does_not_fail(path, clock):
    progress = ProgressLog(path, 8, flops=0.0)
    clock.seconds = -100.0
    progress.append_checkpoint("Saved checkpoint", 1, 1e15, 1)
    assert throughputs(path) == [0.0, 0.0]


def test_asynchronous_checkpoint_has_line_when_durable(path, tmp_path, clock):
    config = tiny_config(checkpoint={"dir": str(tmp_path)})
    progress = Progress(tokens=1000)
    callback = ProgressTxt(config, progress)
    clock.seconds = 0.001
    for step in (1, 2, 3):
        progress.tokens += 10**6
        callback.on_checkpoint_save(step, tmp_path / f"step_{step}")
        if step != 2:  # the save of step 2 fails
            (tmp_path / f"step_{step}").mkdir()
    callback.on_eval_end({}, 3)
    callback.on_train_end(3, 0, None)
    events = [line.split("\t")[3:5] for line in path.read_text().splitlines()]
    assert events == [
        ["Starting job"],
        ["Saving async checkpoint", "Iteration: 1"],
        ["Saved async checkpoint", "Iteration: 1"],
        ["Saving async checkpoint", "Iteration: 2"],
        ["Saving async checkpoint", "Iteration: 3"],
        ["Saved async checkpoint", "Iteration: 3"],
    ]
    flops = 3 * 10**6 * causal_flops_per_token(config.model, config.train.seq_len)
    saving = next(line for line in path.read_text().splitlines() if "Iteration: 3" in line)
    assert f"Job throughput: {flops / 0.001 / 8e12:.1f} MODEL_TFLOP/s/GPU" in saving
    assert flops / 0.001 / 8e12 > 0.1


def test_synchronous_checkpoint_has_one_line(path, tmp_path):
    config = tiny_config(checkpoint={"dir": str(tmp_path), "async_mode": "disabled"})
    callback = ProgressTxt(config, Progress())
    callback.on_checkpoint_save(1, tmp_path / "step_1")
    callback.on_train_end(1, 0, None)
    assert [line.split("\t")[3] for line in path.read_text().splitlines()] == [
        "Starting job", "Saved checkpoint",
    ]  # fmt: skip
