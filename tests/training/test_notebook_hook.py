"""Runs in a notebook: the plot, and the Stop button."""

import json
import math
import subprocess
import sys
import types
import xml.etree.ElementTree as ElementTree

import pytest

from jaxforge.exit_codes import Exit
from jaxforge.tools import notebook
from jaxforge.tools.notebook import LivePlot, curve_svg
from tests.conftest import tiny_config
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, environment


class Shown(list):
    """A fake of IPython's display and of its handle."""

    def __call__(self, data, raw, display_id):
        assert raw
        assert display_id
        self.append(data)
        return self

    def update(self, data, raw):
        assert raw
        self.append(data)


@pytest.fixture
def shown(monkeypatch):
    shown = Shown()
    monkeypatch.setattr(notebook.importlib.util, "find_spec", lambda name: name == "IPython")
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    display = types.SimpleNamespace(display=shown)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


@pytest.fixture
def now(monkeypatch):
    clock = types.SimpleNamespace(seconds=100.0)
    time = types.SimpleNamespace(monotonic=lambda: clock.seconds)
    monkeypatch.setattr(notebook, "time", time)
    return clock


def step(hook, now, number, loss, seconds=0.5):
    now.seconds += seconds
    hook.on_step_end(types.SimpleNamespace(step=number, loss=loss))


def test_plot_is_redrawn_once_per_second(shown, now):
    hook = LivePlot()
    hook.on_train_begin(tiny_config(train={"max_steps": 1000}))
    for number in range(1, 12):
        step(hook, now, number, 4.0 - number / 10)
    assert len(shown) == 1 + 6  # steps 1, 3, 5 ... 11
    assert shown[-1]["text/plain"] == ("running, step 11 of 1,000 (1%), loss 2.9000, 8:15 left")
    assert '<progress style="width:640px" max="1000" value="11">' in shown[-1]["text/html"]
    hook.on_eval_end({"eval/loss": 3.5}, 11)
    assert "evaluation 3.5000" in shown[-1]["text/plain"]
    hook.on_train_end(11, 0, Exit.INTERRUPT)
    assert shown[-1]["text/plain"].startswith("interrupt, step 11 of 1,000 (1%), loss 2.9000, eval")
    assert "left" not in shown[-1]["text/plain"]
    hook.on_train_end(11, 0, None)
    assert shown[-1]["text/plain"].startswith("failed, step 11")


def test_hook_prints_line_without_notebook(monkeypatch, now, capsys):
    monkeypatch.setattr(notebook.importlib.util, "find_spec", lambda name: None)
    hook = LivePlot()
    hook.on_train_begin(tiny_config())
    step(hook, now, 1, 4.0)
    hook.on_train_end(20, 0, Exit.COMPLETED)
    assert capsys.readouterr().out == "completed, step 20 of 20 (100%), loss 4.0000\n"


def test_long_curve_is_thinned(shown, now):
    hook = LivePlot()
    hook.on_train_begin(tiny_config(train={"max_steps": 5000}))
    for number in range(1, 2001):
        step(hook, now, number, 1.0 + 1 / number, seconds=1.0)
    curve = shown[-1]["text/html"].partition('points="')[2].partition('"')[0].split()
    assert 200 <= len(curve) <= 400


def points_of(svg, tag):
    return [item.attrib for item in ElementTree.fromstring(svg).iter(tag)]


def test_curve_covers_all_steps_without_nan():
    assert curve_svg([(1, 3.0)], [], 100) == ""
    svg = curve_svg([(0, 5.0), (50, math.nan), (100, 1.0)], [(100, 3.0)], 100)
    trained, evaluated = points_of(svg, "polyline")
    assert trained["points"] == "48.0,4.0 640.0,198.0"
    assert evaluated["points"] == "640.0,101.0"
    assert [dot["cy"] for dot in points_of(svg, "circle")] == ["101.0"]


STOPPED = """
import os, signal, sys
sys.ps1 = "In : "  # as IPython's kernels have it
import jaxforge as jf
from jaxforge.tools.notebook import LivePlot

class Stop(jf.Callback):
    def on_step_end(self, context):
        if context.step == 3:
            os.kill(os.getpid(), signal.SIGINT)  # what a notebook's Stop is to its kernel

config = jf.load_config(None, sys.argv[1:])
print(jf.fit(config, callbacks=[Stop(), LivePlot()]))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(jf.fit(config, callbacks=[LivePlot()]))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_stop_ends_run_and_keeps_kernel(tmp_path):
    settings = [f"--{section}.{key}={value}"
                for section, keys in tiny_config().model_dump(exclude_defaults=True).items()
                for key, value in keys.items()]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, *settings, "--train.max_steps=5",
         f"--checkpoint.dir={tmp_path / 'run'}"],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    output = [
        line for line in done.stdout.splitlines() if line.startswith(("Exit", "True", "False"))
    ]
    assert output == ["Exit.INTERRUPT", "True", "Exit.COMPLETED"]
    assert "interrupt, step 3 of 5 (60%)" in done.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "train/loss" in line]
    assert steps == [1, 2, 3, 4, 5]
