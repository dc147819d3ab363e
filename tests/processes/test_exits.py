"""Signals, exit codes, and what stands in the run directory afterwards."""

import json
import re
import signal
import subprocess
import time

import pytest

from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, environment

pytestmark = pytest.mark.usefixtures("one_device")


def test_signal_saves_and_the_run_goes_on_from_there(new_run):
    """Two starts of one run, each ended by another signal; the second goes on."""
    run, undisturbed = new_run(), new_run("undisturbed")
    overrides, stopped = ["--checkpoint.interval=100000", "--train.max_steps=100000"], 0
    for sig, code in [(signal.SIGINT, 130), (signal.SIGTERM, 75)]:
        process = run.start(*overrides)
        run.wait_for_step(stopped + 20, process)
        process.send_signal(sig)
        output = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == code, output
        before, (*_, stopped) = stopped, run.steps()
        assert stopped >= before + 20
        assert f"stopped at step {stopped} of 100000; run the same command to resume" in output
    undisturbed.finish_here(overrides[0], f"--train.max_steps={stopped}")
    assert run.losses() == undisturbed.losses()


def test_second_signal_ends_it_at_once(new_run):
    run = new_run()
    process = run.start("--train.max_steps=100000")
    run.wait_for_step(5, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=PATIENCE)
    assert process.returncode in (-signal.SIGINT, 130)


def test_finished_run_explains_itself_is_left_as_it_is_and_goes_on(new_run, capsys):
    """Three starts: steps 1 to 30, none, and two more after a line of the metrics was torn."""
    run = new_run()
    run.finish_here("--metrics.log_interval=8")
    output = "".join(capsys.readouterr())
    assert "Training complete: 30 steps, 7,680 tokens" in output
    assert "train step compiled in" in output
    assert re.search(r"\[step 30\] loss=\d\.\d{4} \| lr=", output)
    assert list(run.losses()) == [1, 8, 16, 24, 30]  # the interval's, the first and the last
    assert sorted(p.name for p in run.directory.iterdir()) == [
        "checkpoints", "config.toml", "configs", "logs", "metrics.jsonl", "schedule_summary.txt",
        "starts.jsonl",
    ]  # fmt: skip
    assert "log_interval = 8" in (run.directory / "config.toml").read_text()
    assert "Training complete" in (run.directory / "logs" / "process_0.log").read_text()
    before = run.lines()
    assert "nothing to train" not in output
    run.finish_here("--metrics.log_interval=8")
    output = "".join(capsys.readouterr())
    assert "the run has reached step 30 of train.max_steps = 30" in output
    assert "set another checkpoint.dir to start a new run" in output
    assert run.lines() == before
    assert run.steps() == [20, 25, 30]
    path = run.directory / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    torn = json.dumps({"step": 31, "train/loss": 1.0}).encode()[:-5]
    path.write_bytes(b"".join([first, b"\xff\xfe\n", *others, torn]))
    capsys.readouterr()
    run.finish_here("--train.max_steps=32", "--optimizer.fused=true")
    output = "".join(capsys.readouterr())
    assert output.count("optimizer.fused has no effect: XLA fuses") == 1
    assert "changed since this run last started: " in output
    assert "train.max_steps 30 -> 32" in output
    assert list(run.losses()) == [1, 8, 16, 24, 30, 31, 32]
    assert "moved to metrics.damaged.jsonl" in output
    assert path.with_name("metrics.damaged.jsonl").read_bytes() == b"\xff\xfe\n" + torn + b"\n"


def test_giving_up_has_its_own_code_and_keeps_the_last_good_checkpoint(new_run, capsys):
    run = new_run()
    blow_up = [
        "--model.logits_scaling=1.2e-38",  # logits above 4 overflow
        "--model.init_std=1",
        "--scheduler.name=none",
        "--train.nan_consecutive_max=4",
    ]
    run.finish_here(*blow_up, "--checkpoint.interval=1", "--metrics.log_interval=7", code=65)
    output = "".join(capsys.readouterr())
    assert "gave up at step" in output
    assert "4 steps in a row" in output
    last = [line for line in run.lines() if "train/loss" in line][-1]
    assert last["train/grad_norm"] is None  # NaN is no JSON
    assert last["train/skipped_steps"] >= 4
    gave_up = int(re.search(r"gave up at step (\d+)", output)[1])
    assert max(run.steps()) < gave_up


def test_metrics_have_the_names_and_evaluations(new_run, tmp_path, capsys):
    import numpy as np

    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "a.npy", (np.arange(33 * 50) % 256).astype(np.uint16))
    run = new_run()
    run.finish_here(
        f"--data.dataset_path={data}", "--eval.enabled=true", f"--eval.dataset_path={data}",
        "--eval.interval=10", "--train.max_steps=20", "--checkpoint.interval=7",
        "--checkpoint.keep_best_n=1",
    )  # fmt: skip
    train = next(x for x in run.lines() if x["step"] == 12 and "train/loss" in x)
    assert {"step", "time", "train/loss", "train/grad_norm", "train/lr", "train/tokens_per_sec",
            "train/step_time_sec", "train/skipped_steps", "train/valid_tokens",
            "train/nonfinite_steps", "train/spike_steps", "train/tokens", "train/samples",
            "train/epoch",
            "train/data_wait_sec", "train/tflops_per_device", "smoothed/loss",
            "smoothed/tokens_per_sec", "smoothed/step_time", "interval/loss",
            "interval/skipped_steps", "interval/nan_steps"} == {
                name for name in train if not name.startswith("goodput/")
            }  # fmt: skip
    assert {"goodput/ratio", "goodput/step_sec", "goodput/evaluation_sec"} <= train.keys()
    evaluations = {x["step"]: x["eval/loss"] for x in run.lines() if "eval/loss" in x}
    assert list(evaluations) == [10, 20]
    assert evaluations[20] < evaluations[10] < 5.6
    assert "eval_loss=" in "".join(capsys.readouterr())
    assert 10 not in run.steps() or 20 in run.steps()  # a new best is saved, off the interval
    assert 20 in run.steps()


def test_checkpoint_that_cannot_be_written_ends_the_run_and_spares_the_others(new_run):
    """A file size limit stands in for a full disk: the larger model's arrays do not fit."""
    run = new_run()
    run.finish_here("--train.max_steps=5")
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2)"
    limited = (
        f"{limit}; sys.argv = sys.argv[1:]; runpy.run_module('jaxforge.train', None, '__main__')"
    )
    command = run.command("--train.max_steps=10")
    command[1:3] = ["-c", limited, "train"]
    result = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True)
    assert result.returncode == 74, result.stderr
    assert "error: a checkpoint could not be written to" in result.stderr
    assert "File too large" in result.stderr
    assert "Traceback" not in result.stderr  # of threads that had more to write
    assert run.steps() == [5]
    run.finish_here("--train.max_steps=10")
    assert list(run.losses()) == list(range(1, 11))
