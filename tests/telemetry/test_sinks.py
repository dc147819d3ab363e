"""Sinks of metrics, read back from their files."""

import contextlib
import errno
import importlib.util
import io
import json
import logging
from pathlib import Path

import pytest
import wandb
from rich.console import Console

from jaxforge.config.metrics import MetricsConfig
from jaxforge.errors import StorageError, UserError
from jaxforge.storage import safe_files
from jaxforge.telemetry.console import add_log_file, setup_logging
from jaxforge.telemetry.metric_writers import MetricWriter, check_libraries, open_writers
from jaxforge.telemetry.sinks import JsonlSink, Sample
from jaxforge.telemetry.writers import TensorBoardSink, WandbSink
from tests.conftest import tiny_config
from tests.telemetry.readers import events, wandb_history, wandb_records


def config_in(directory, **metrics):
    return tiny_config(metrics=metrics, checkpoint={"dir": str(directory)})


class Disk(io.FileIO):
    """A file on a disk with limited room: a write stores what fits, as the system does."""

    room = 10**9

    def write(self, data):
        if self.room <= self.tell():
            raise OSError(errno.ENOSPC, "full")
        return super().write(data[: self.room - self.tell()])


@pytest.fixture
def disk(monkeypatch):
    """A fake disk for the files of lines, whose room the test sets."""
    monkeypatch.setattr(Disk, "room", 10**9)
    monkeypatch.setattr(safe_files, "open_to_append", lambda path: Disk(path, "ab"))
    return Disk


def test_full_disk_delays_lines(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    writer = MetricWriter("metrics.jsonl", JsonlSink(path, 0), 1, catches_up=True)

    def steps():
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    disk.room = 100
    for step in range(1, 7):
        writer.write(step, {"train/loss": 1.0})
    assert steps() == [1]  # no partial line follows
    writer.rewind(4)
    disk.room = 10**9
    writer.write(5, {"train/loss": 2.0})
    assert steps() == [1, 2, 3, 4, 5]
    disk.room = path.stat().st_size
    writer.write(6, {"train/loss": 3.0})
    assert steps() == [1, 2, 3, 4, 5]
    disk.room = 10**9
    assert writer.close()
    assert steps() == [1, 2, 3, 4, 5, 6]


def test_lost_lines_are_counted_at_the_end(tmp_path, disk, messages):
    """Metrics of steps 2 to 6 and three samples of step 6 are lost."""
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    writer = MetricWriter("metrics.jsonl", sink, 1, catches_up=True)
    disk.room = 100
    for step in range(1, 7):
        writer.write(step, {"train/loss": 1.0})
    disk.room = 0
    writer.write_samples(6, [Sample("Once", " upon")] * 3)
    assert not writer.close()
    (error,) = (r.getMessage() for r in messages.records if r.levelname == "ERROR")
    assert "metrics.jsonl lacks the last 5 lines (steps 2 to 6): full" in error
    assert "samples.jsonl lacks the last 3 lines (steps 6 to 6): full" in error


def line(step):
    return json.dumps({"step": step, "train/loss": 1.0}).encode() + b"\n"


DAMAGED = [
    b"\xff\xfe\n", b"\0" * 9 + b"\n", b"{}\n", b"[1]\n", b"\n", b'{"step": "7"}\n',
    b'{"step": true}\n', b"[" * 10**5 + b"\n", b'{"step": 1' + b"0" * 5000 + b"}\n",
]  # fmt: skip


@pytest.mark.parametrize("start", [0, 3])
def test_damaged_lines_are_moved_and_sound_lines_stay(tmp_path, messages, start):
    """The run resumes from step 6, and had reached step 8 when a line was torn."""
    path = tmp_path / "metrics.jsonl"
    lines = [line(step) for step in range(1, 9)]
    path.write_bytes(b"".join([*lines[:start], *DAMAGED, *lines[start:], line(9)[:-5]]))
    writer = MetricWriter("metrics.jsonl", JsonlSink(path, 6), 1, catches_up=True)
    assert path.read_bytes() == b"".join(lines[:6])
    aside = tmp_path / "metrics.damaged.jsonl"
    assert aside.read_bytes() == b"".join(DAMAGED) + line(9)[:-5] + b"\n"
    numbers = ", ".join(str(start + n) for n in range(1, 6))
    assert f"had 10 damaged lines ({numbers}, ...): moved to {aside.name}" in messages.text
    writer.write(7, {"train/loss": 2.0})
    assert writer.close()
    assert [json.loads(splitline)["step"] for splitline in path.read_text().splitlines()] == [
        *range(1, 8)
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [aside.name, path.name]


def test_line_with_nan_is_sound(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = b'{"step": 1, "train/loss": NaN}\n{"step": 2, "train/loss": Infinity}\n'
    path.write_bytes(text)
    JsonlSink(path, 6)
    assert path.read_bytes() == text


@pytest.mark.parametrize("repeats", [False, True])
def test_evaluation_that_a_resumed_run_repeats_is_dropped(tmp_path, repeats):
    path = tmp_path / "metrics.jsonl"
    evaluations = [b'{"step": %d, "eval/loss": 2.0}\n' % step for step in (1, 2)]
    lines = [line(1), evaluations[0], line(2), evaluations[1], line(3)]
    path.write_bytes(b"".join(lines))
    JsonlSink(path, 2, repeats_evaluation=repeats)
    assert path.read_bytes() == b"".join(lines[:3] if repeats else lines[:4])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (line(1) + line(2)[:-1], line(1) + line(2)),  # only the end of the last line is missing
        (line(1) + line(3)[:-1], line(1)),
        (line(1) + line(3) + line(2), line(1) + line(2)),
        (b"", b""),
    ],
)
def test_valid_lines_up_to_step_remain(tmp_path, before, after):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    JsonlSink(path, 2)
    assert path.read_bytes() == after
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_unreadable_metrics_raise_before_first_step(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"metrics.jsonl cannot be opened: .*Is a dir"):
        open_writers(Console(file=io.StringIO()), config_in(tmp_path), "id", 3)


def test_log_on_full_disk_warns_once(tmp_path, capfd):
    log = logging.getLogger("jaxforge")
    setup_logging(Console(file=io.StringIO()))
    add_log_file(tmp_path)
    handler = log.handlers[-1]
    whole = handler.stream
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as handler.stream:
        log.info("one")
        log.info("two")
    stderr = capfd.readouterr().err
    assert stderr.count("cannot write log messages to ") == 1
    assert "Traceback" not in stderr
    assert "two" in stderr
    handler.stream = whole
    log.info("three")
    assert "three" in (tmp_path / "logs" / "process_0.log").read_text()


def test_tensorboard_drops_repeated_steps_on_resume(tmp_path):
    first = TensorBoardSink(tmp_path, 0)
    first.write(10, {"train/loss": 3.0, "train/lr": 0.5})
    first.write(15, {"train/loss": 2.5})  # read while the file is open, as after a kill
    written = events(tmp_path)
    first.close(0)
    assert [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in written[2:]] == [
        (10, {"train/loss": 3.0, "train/lr": 0.5}),
        (15, {"train/loss": 2.5}),
    ]
    second = TensorBoardSink(tmp_path / "resumed", 10)
    second.write(15, {"train/loss": 2.4})
    second.close(0)
    version, start, again = events(tmp_path / "resumed")
    assert version.file_version == "brain.Event:2"  # required by TensorBoard for the next record
    assert (start.step, start.session_log.status) == (11, start.session_log.START)
    assert again.step == 15


def test_tensorboard_has_config(tmp_path):
    config = config_in(tmp_path, writers={"name": "tensorboard"})
    TensorBoardSink(tmp_path / "0", 10, config).close(0)
    values = [value for event in events(tmp_path / "0") for value in event.summary.value]
    (text,) = (v for v in values if v.metadata.plugin_data.plugin_name == "text")
    assert text.tag == "config/text_summary"
    lines = text.tensor.string_val[0].decode().splitlines()
    assert "    [optimizer]" in lines
    assert "    lr = 0.003" in lines


@pytest.fixture
def wandb_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield monkeypatch
    wandb.teardown()  # resets what W&B read from the environment


def test_wandb_resumes_same_run_with_exit_state(tmp_path, wandb_environment):
    wandb_environment.setenv("WANDB_MODE", "offline")
    writer = {"name": "wandb", "project": "ours", "run_name": "long"}
    config = config_in(tmp_path, writers=writer)
    for start, exit_code in (
        (0, 75),
        (10, 0),
    ):  # separate directories: W&B names files by the second
        sink = WandbSink(tmp_path / str(start), config, "abc123")
        sink.write(start + 5, {"train/loss": 3.0 - start / 10})
        sink.write(start + 5, {"eval/loss": 4.0})
        sink.write_samples(start + 5, [Sample("Once", " upon")])
        sink.close(exit_code)
    wandb.teardown()  # `finish` returns before the file is complete
    runs = sorted(tmp_path.glob("*/wandb/offline-run-*"))
    records = [wandb_records(run) for run in runs]
    about = [record.run for both in records for record in both if record.HasField("run")]
    assert [(r.run_id, r.project, r.display_name) for r in about] == [
        ("abc123", "ours", "long")
    ] * 2
    assert '"dim":64' in {u.key: u.value_json for u in about[0].config.update}["model"]
    assert [
        {step: {k: row[k] for k in ("train/loss", "eval/loss")} for step, row in history.items()}
        for history in map(wandb_history, records)
    ] == [{5: {"train/loss": 3.0, "eval/loss": 4.0}}, {15: {"train/loss": 2.0, "eval/loss": 4.0}}]
    assert [ends(both) for both in records] == [[75], [0]]
    (table, *_) = tmp_path.glob("0/wandb/offline-run-*/files/media/table/samples_5_*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["prompt", "text"], "data": [["Once", " upon"]],
    }  # fmt: skip


def ends(records):
    return [record.exit.exit_code for record in records if record.HasField("exit")]


def test_wandb_without_setup_raises_before_run(tmp_path, wandb_environment):
    wandb_environment.setenv("WANDB_MODE", "online")
    with pytest.raises(UserError, match=r"wandb in metrics.writers: .*WANDB_MODE=offline"):
        WandbSink(tmp_path, config_in(tmp_path, writers={"name": "wandb"}), "abc")


@pytest.mark.parametrize(
    ("key", "library"),
    [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow"),
     ("trackio", "trackio")],
)  # fmt: skip
def test_missing_library_names_its_extra(monkeypatch, key, library):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else 1)
    check_libraries(MetricsConfig())
    with pytest.raises(UserError, match=rf"needs {library}: pip install 'jaxforge\[{key}\]'"):
        check_libraries(MetricsConfig.model_validate({"writers": {"name": key}}))


def test_sink_interval_defaults_to_log_interval(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxforge.telemetry.metric_writers.WandbSink", lambda *arguments: None)
    for keys, expected in (({}, 6), ({"interval": 4}, 4)):
        trackers = [{"name": name, **keys} for name in ("tensorboard", "wandb")]
        config = config_in(tmp_path, log_interval=6, writers=trackers)
        writers = open_writers(Console(file=io.StringIO()), config, "id", 0)
        due = [next(step for step in range(1, 13) if writer.due(step)) for writer in writers]
        for writer in writers:
            writer.close()
        assert due == [6, 6, expected, expected]


def test_unwritable_directory_raises_user_error(tmp_path):
    (tmp_path / "file").touch()
    config = config_in(tmp_path, writers={"name": "tensorboard", "location": "file/inside"})
    with pytest.raises(UserError, match=r"tensorboard in metrics.writers: .*file/inside: Not a d"):
        open_writers(Console(file=io.StringIO()), config, "id", 0)


def test_unreachable_service_is_disabled(tmp_path, monkeypatch):
    def no_network(*arguments):
        raise TimeoutError("no answer")

    monkeypatch.setattr("jaxforge.telemetry.metric_writers.WandbSink", no_network)
    config = config_in(tmp_path, writers={"name": "wandb"})
    *working, silent = open_writers(Console(file=io.StringIO()), config, "id", 0)
    assert len(working) == 2
    silent.write(1, {"train/loss": 1.0})
    assert silent.due(10)
