"""Runs of a sweep with fake trainers: finished, failed and stopped runs, and the results."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest

from jaxforge.commands import sweep as sweep
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.tools.sweep import run_sweep
from jaxforge.tools.sweep.run_sweep import results, table
from jaxforge.tools.sweep.runs import Runner, points
from tests.machine import wait_until

BASE = """
[model]
dim = 64
n_layers = 1
n_heads = 4
vocab_size = 256
[train]
max_steps = 8
seq_len = 16
[checkpoint]
dir = "{}"
"""
LINE = "{'step': 8, 'time': 1e9, 'train/loss': 2.0}"
LOGS = f"open(d + '/metrics.jsonl', 'w').write(json.dumps({LINE}) + '\\n')"
WAITS = "open(d + '/waits', 'w'); signal.sigwait({{{sig}}}); time.sleep(0.7); sys.exit({code})"


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.toml"
    path.write_text(BASE.format(tmp_path / "sweep"))
    return str(path)


def planned(base, *grid, code=LOGS, settings=()):
    """Plan a sweep whose processes run `code`, with the run directory as d."""
    runs = run_sweep.plan_runs(points(grid), base, settings, 1)
    before = "import json, os, signal, sys, time; d = sys.argv[1]; "
    before += "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT}); "
    return [
        item.__class__(
            item.point, item.directory, item.config,
            [sys.executable, "-c", before + code, str(item.directory)],
        )
        for item in runs
    ]  # fmt: skip


def run(runs):
    said = []
    return Runner(said.append).run(runs), said


def test_failed_run_is_reported_and_sweep_continues(base):
    fails = "print('no memory'); sys.exit(3) if '=2' in d else " + LOGS
    code, said = run(runs := planned(base, "train.seed=1,2,3", code=fails))
    assert code == 3
    assert [item.is_finished for item in runs] == [True, False, True]
    assert any("code 3" in line and line.endswith("no memory") for line in said)
    assert "not finished" in table(*results(runs))


def test_finished_runs_are_not_repeated(base):
    runs = planned(base, "train.seed=1,2")
    assert run(runs)[0] == 0
    code, said = run(planned(base, "train.seed=1,2,3", code="sys.exit('=3' not in d)"))
    assert code == 0
    assert said[:2] == ["[1/3] seed=1: already finished", "[2/3] seed=2: already finished"]


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_signal_stops_run_and_sweep(base, sig, code):
    runs = planned(base, "train.seed=1,2", code=WAITS.format(sig=sig.value, code=code))

    def stop():
        wait_until((runs[0].directory / "waits").exists)
        os.kill(os.getpid(), sig)

    threading.Thread(target=stop).start()
    returned, said = run(runs)
    assert returned == code
    (message,) = [line for line in said if line.startswith(sig.name)]
    assert "saves a checkpoint" in message
    assert ("second Ctrl-C" in message) == (sig is signal.SIGINT)
    assert not any("seed=2" in line for line in said)
    assert runs[0].state == "new"  # the fake trainer writes no config.toml


def test_directory_of_another_config_is_refused(base):
    (item,) = planned(base, "train.seed=1")
    item.directory.mkdir(parents=True)
    (item.directory / "config.toml").write_text(item.config.to_toml())
    planned(base, "train.seed=1", settings=["--checkpoint.interval=3"])  # does not affect results
    with pytest.raises(UserError, match=r"another config \(train.max_steps 8 -> 9\)"):
        planned(base, "train.seed=1", settings=["--train.max_steps=9"])


def test_all_configs_are_checked_before_the_first_run(base, capsys):
    arguments = ["--config", base, "--devices=1", "--grid", "model.dim=64,63", "--grid"]
    with pytest.raises(UserError, match=r"(?s)run:\ndim=64,lr=x: .*\ndim=63,lr=1: .*\n    --opt"):
        sweep.main([*arguments, "optimizer.lr=1,x"])
    with pytest.raises(UserError, match="no_decay_patterns"):
        sweep.main([*arguments[:3], '--optimizer.no_decay_patterns=["nothing"]'])
    assert sweep.main([*arguments[:3], "--grid", "model.dim=64,128", "--dry-run"]) == 0
    assert re.match(r"dim=64  \S+ parameters, 8 steps, new\ndim=128  ", capsys.readouterr().out)


def test_slurm_array_has_a_task_per_point(base, capsys, tmp_path):
    script = tmp_path / "sweep.sbatch"
    arguments = ["--config", base, "--grid", "train.seed=1,2,3", "--train.max_steps=4"]
    assert sweep.main([*arguments, "--slurm", str(script), "--devices=8"]) == 0
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "--array=0-2\n" in text
    assert "--gpus-per-node=8\n" in text
    command = re.search(r"srun python -m jaxforge sweep (.*) --point", text)[1].split()
    assert command == [*arguments, "--devices=8"]
    with pytest.raises(UserError, match="--devices N"):
        sweep.main([*arguments, "--slurm"])


def finished(item, losses, evaluated=None):
    item.directory.mkdir(parents=True)
    lines = [
        {"step": i, "time": 1e9 + i, "train/loss": x, "train/tokens": 16 * i}
        for i, x in enumerate(losses, 1)
    ]
    if evaluated is not None:
        values = {4: 9.0, 8: evaluated}
        lines += [{"step": i, "time": 1e9, "eval/loss": x} for i, x in values.items()]
    item.directory.joinpath("metrics.jsonl").write_text(
        "\n".join(map(json.dumps, lines)) + '\n{"st'
    )
    item.finish()


def test_points_are_sorted_by_evaluation_loss(base):
    runs = planned(base, "train.seed=1,2,3")
    for item, loss in zip(runs, (3.0, None, 2.0), strict=True):
        finished(item, [5.0, 4.0], loss) if loss else None
    metric, result = results(runs)
    assert metric == "eval/loss"
    assert [item.run.point.name for item in result] == ["seed=3", "seed=1", "seed=2"]
    assert [item.loss for item in result[:2]] == [2.0, 3.0]
    assert "not finished (new)" in table(metric, result)


def test_training_loss_is_the_mean_of_the_last_tenth(base):
    (item,) = planned(base, "train.seed=1")
    finished(item, [*[5.0] * 18, 3.0, 2.0])
    metric, (result,) = results([item])
    assert (metric, result.loss) == ("train/loss", 2.5)


def test_point_command_loads_its_settings(base):
    """Settings of a point take effect."""
    (item,) = run_sweep.plan_runs(points(["model.dim=128"]), base, ["--train.seed=3"], 1)
    again = load_config(base, item.command[item.command.index("--config") + 2 :])
    assert functools.reduce(getattr, ("model", "dim"), again) == 128
    assert (again.train.seed, again.checkpoint.dir) == (3, str(item.directory))
