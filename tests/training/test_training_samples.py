"""Samples during training: sinks, intervals, and no effect on the run."""

import json

import numpy as np
import pytest

from jaxforge.config.reading.load import load_config
from jaxforge.data.corpus.tokenizer import ByteTokenizer
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.telemetry.line_formats import LINE_FORMATS
from jaxforge.telemetry.sinks import JsonlSink, Sample, format_sample
from jaxforge.telemetry.writers import TensorBoardSink
from jaxforge.training import launch
from jaxforge.training.callbacks.samples import Sampler
from jaxforge.training.summary import schedule_summary
from tests.conftest import tiny_config
from tests.telemetry.readers import events

pytestmark = pytest.mark.usefixtures("one_device")

LATE = Sample("Once", " upon")


def config(path, name, steps=6, sample=2, **section):
    data = path / "data"
    if not data.exists():
        data.mkdir()
        text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 200, np.uint8)
        np.save(data / "a.npy", text.astype(np.uint16))
    return tiny_config(
        model={"vocab_size": 264},
        train={"max_steps": steps, "batch_size": 8, **section},
        data={"dataset_path": str(data), "tokenizer_path": "byte", "num_workers": 1},
        eval={"sample_interval": sample, "sample_prompts": ["", "the quick"], "sample_tokens": 5},
        checkpoint={"dir": str(path / name), "interval": 100},
    )


def logged(path, name):
    lines = map(json.loads, (path / name / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def samples(path, name):
    lines = map(json.loads, (path / name / "samples.jsonl").read_text().splitlines())
    return [(line["step"], line["prompt"], line["text"]) for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that samples, a run that does not, and a stopped run that samples."""
    path = tmp_path_factory.mktemp("samples")
    assert launch.fit(config(path, "whole")) is Exit.COMPLETED
    assert launch.fit(config(path, "silent", sample=0)) is Exit.COMPLETED
    assert launch.fit(config(path, "stopped", exit_interval=3)) is Exit.INTERVAL
    later = [{"step": step, "prompt": "of a step that is run again"} for step in (4, 6)]
    with (path / "stopped" / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in later)
        file.write('{"step": 6, "pro')  # as a kill leaves it
    assert launch.fit(config(path, "stopped")) is Exit.COMPLETED
    return path


def test_every_prompt_is_sampled_at_interval(runs):
    of = [(step, prompt) for step, prompt, _ in samples(runs, "whole")]
    assert of == [(step, prompt) for step in (2, 4, 6) for prompt in ("", "the quick")]
    assert len({text for *_, text in samples(runs, "whole")}) == 6


def test_sampling_does_not_change_losses(runs):
    assert logged(runs, "whole") == logged(runs, "silent")
    assert not (runs / "silent" / "samples.jsonl").exists()


def test_resumed_run_writes_same_samples(runs):
    assert samples(runs, "stopped") == samples(runs, "whole")


def test_summary_lists_samples(runs):
    text = (runs / "whole" / "schedule_summary.txt").read_text()
    assert "samples\n  every 2 updates, 2 of at most 5 tokens each\n" in text
    assert "samples\n  none\n" in schedule_summary(config(runs, "x", sample=0), 1)


def test_sample_interval_may_be_share_of_run():
    config = load_config(None, ["--train.max_steps=200", "--eval.sample_interval=10%"])
    due = [step for step in range(1, 201) if config.eval.is_sample_due(step)]
    assert due == list(range(20, 201, 20))


@pytest.mark.parametrize(
    ("tokenizer", "changed", "message"),
    [
        (None, {}, r"eval.sample_interval = 2 needs a tokenizer. Set data.tokenizer_path, or"),
        (ByteTokenizer(), {"sample_tokens": 60},
         r"eval.sample_prompts\[1\]: a prompt of 9 tokens and eval.sample_tokens = 60 exceed "
         r"model.max_seq_len = 64"),
    ],
)  # fmt: skip
def test_unsampleable_config_raises_before_run(tokenizer, changed, message, tmp_path):
    job = config(tmp_path, "run")
    job = job.model_copy(update={"eval": job.eval.model_copy(update=changed)})
    with pytest.raises(UserError, match=message):
        Sampler(job, None, None, tokenizer)


def test_empty_prompts_raise():
    with pytest.raises(UserError, match=r"sample_prompts = \[\] is empty"):
        load_config(None, ["--eval.sample_interval=5", "--eval.sample_prompts=[]"])


def test_rewind_removes_later_samples(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    for step in (5, 10):
        sink.write_samples(step, [LATE])
    sink.rewind(5)
    sink.write_samples(6, [LATE])
    sink.close(0)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 6]
    assert list(json.loads(lines[0])) == ["step", "prompt", "text", "time"]


def test_console_shows_samples():
    assert format_sample(5, LATE) == '[step 5] sample: "Once" ... " upon"'
    cut = format_sample(5, Sample("", "two\nlines" + 200 * "x"))
    assert cut.startswith('[step 5] sample: "two\\nlinesx')
    assert len(cut) == 160
    lines = {name: make(None).sample(5, LATE) for name, make in LINE_FORMATS.items()
             if name not in ("torchtitan",)}  # fmt: skip
    assert json.loads(lines.pop("json"))["text"] == " upon"
    assert set(lines.values()) == {format_sample(5, LATE)}


def test_tensorboard_shows_samples_verbatim(tmp_path):
    sink = TensorBoardSink(tmp_path, 0)
    sink.write_samples(5, [LATE, Sample("", "# no\ntitle")])
    sink.close(0)
    texts = {
        value.tag: (event.step, value.tensor.string_val[0].decode())
        for event in events(tmp_path)
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    }
    assert texts == {
        "samples/0/text_summary": (5, "    Once upon\n"),
        "samples/1/text_summary": (5, "    # no\n    title\n"),
    }
