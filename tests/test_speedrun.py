"""The configs of the speed run, and its twin for CPUs from the text to the target."""

import json
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from jaxforge.commands import prepare
from jaxforge.config import rules
from jaxforge.config.reading.load import load_config
from jaxforge.model.transformer import build_model, parameter_count
from tests.processes.conftest import environment

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs" / "speedrun").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_page_states_size_and_target_of_each_config(path):
    config, page = load_config(path), (ROOT / "docs" / "speedrun.md").read_text()
    rules.check(config, int((re.search(r"_(\d+)$", path.stem) or "_1")[1]))
    (row,) = re.findall(rf"^\| `{path.stem}` \| (.*)$", page, re.MULTILINE)
    parameters = parameter_count(build_model(config, "cpu").abstract)
    assert f" {parameters / 1e6:.{0 if parameters > 1e7 else 1}f}M parameters |" in row
    assert re.search(rf"\| {config.early_stop.target:g}[ ,]", row)


@pytest.mark.slow
def test_twin_reaches_its_target_within_its_schedule(tmp_path):
    rule = re.search(r"^data/quickstart:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    _, flags = rule[1].replace("\\\n", " ").split("$(STDLIB) --output $@", 1)
    flags = flags.partition(") &&")[0]  # of the command substitution
    stdlib = sysconfig.get_path("stdlib")
    prepare.main([stdlib, f"--output={tmp_path / 'data'}", *shlex.split(flags)])
    paths = {
        "data.dataset_path": "data/train", "data.tokenizer_path": "data/tokenizer",
        "eval.dataset_path": "data/validation", "checkpoint.dir": "run",
    }  # fmt: skip
    settings = [f"--{key}={tmp_path / path}" for key, path in paths.items()]
    command = [sys.executable, "-m", "jaxforge.train", "--config=configs/speedrun/cpu.toml"]
    # In a process with one device: the batch of the config is that of a device.
    subprocess.run([*command, *settings], cwd=ROOT, env=environment(), check=True)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").open())
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    target = load_config(ROOT / "configs/speedrun/cpu.toml").early_stop.target
    assert losses[-1] <= target < min(losses[:-1])
