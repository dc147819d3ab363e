"""docs/getting_started.md, typed as it stands: what it promises is there at the end."""

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
    """The command lines under a heading, but for the installation."""
    section = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    return [shlex.split(line)[1:] for line in block.splitlines() if line.startswith("jaxforge ")]


def jaxforge(*words, cwd, steps=4):
    short = [f"--train.max_steps={steps}"] if words[0] == "train" else []  # else it takes minutes
    done = subprocess.run(
        [PROGRAM, *words, *short], cwd=cwd, text=True, capture_output=True,
        timeout=PATIENCE, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A directory with the docs as one's own text."""
    here = tmp_path_factory.mktemp("walk")
    (here / "my_texts").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        (here / "my_texts" / page.name).write_text(page.read_text())
    return here


@pytest.mark.slow
def test_own_text_becomes_a_model_that_writes(texts):
    said = [jaxforge(*words, cwd=texts) for words in commands("From an empty machine")]
    assert "jaxforge train --config" in said[0]
    assert said[2].startswith("The")  # the prompt, as the model goes on from it
    assert (texts / "runs" / "mine" / "report.html").is_file()


@pytest.mark.slow
def test_run_of_kempnerforge_goes_on_and_back(texts):
    ours, old = texts / "runs" / "mine", texts / "old"
    jaxforge("export", str(ours), str(old / "checkpoints"), "--to", "dcp", cwd=texts)
    (old / "config.toml").write_text((ours / "config.toml").read_text())
    for words in commands("From a run of KempnerForge"):
        jaxforge(*words, cwd=texts, steps=6)
    assert (texts / "back" / "step_6").is_dir()
