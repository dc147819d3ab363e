"""Commands of docs/getting_started.md, run unchanged, and their results."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import PATIENCE

ROOT = Path(__file__).parents[1]
PROGRAM = Path(sys.executable).with_name("jaxforge")
PAGE = (ROOT / "docs" / "getting_started.md").read_text()


def commands(heading):
    """Return the command lines under a heading, without the installation."""
    section = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    return [shlex.split(line)[1:] for line in block.splitlines() if line.startswith("jaxforge ")]


def jaxforge(*words, cwd, steps=4):
    short = [f"--train.max_steps={steps}"] if words[0] == "train" else []  # otherwise minutes
    done = subprocess.run(
        [PROGRAM, *words, *short], cwd=cwd, text=True, capture_output=True,
        timeout=PATIENCE, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a directory with the docs as text."""
    here = tmp_path_factory.mktemp("walk")
    (here / "my_texts").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        (here / "my_texts" / page.name).write_text(page.read_text())
    return here


@pytest.mark.slow
def test_text_to_model_walkthrough_generates(texts):
    outputs = [jaxforge(*words, cwd=texts) for words in commands("From an empty machine")]
    assert "jaxforge train --config" in outputs[0]
    assert outputs[2].startswith("The")  # the prompt and its continuation
    assert (texts / "runs" / "mine" / "report.html").is_file()


@pytest.mark.slow
def test_kempnerforge_run_resumes_and_exports(texts):
    run, old = texts / "runs" / "mine", texts / "old"
    jaxforge("convert", str(run), str(old / "checkpoints"), "--to", "dcp", cwd=texts)
    (old / "config.toml").write_text((run / "config.toml").read_text())
    for words in commands("From a run of KempnerForge"):
        jaxforge(*words, cwd=texts, steps=6)
    assert (texts / "back" / "step_6").is_dir()
