"""A run in a notebook: the Stop button."""

import json
import subprocess
import sys

import pytest

from tests.conftest import tiny_config
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, environment

STOPPED = """
import os, signal, sys
sys.ps1 = "In : "  # as IPython's kernels have it
import jaxforge as jf

class Stop(jf.Callback):
    def on_step_end(self, context):
        if context.step == 3:
            os.kill(os.getpid(), signal.SIGINT)  # what a notebook's Stop is to its kernel

config = jf.load_config(None, sys.argv[1:])
print(jf.fit(config, callbacks=[Stop()]))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(jf.fit(config))
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
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "train/loss" in line]
    assert steps == [1, 2, 3, 4, 5]
