"""Preparation as a Slurm array: planned, shared out, committed."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from jaxforge.commands import prepare
from jaxforge.errors import UserError
from jaxforge.storage import locks
from tests.data.corpus.interruptions import snapshot
from tests.machine import PATIENCE

RECIPE = Path(__file__).parents[3] / "examples" / "launch" / "slurm_prepare.sbatch"


@pytest.fixture
def corpus(tmp_path):
    directory = tmp_path / "my corpus"
    directory.mkdir()
    for i in range(9):
        records = [{"text": f"file {i} record {j}"} for j in range(20)]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{i}.jsonl").write_text(text)
    return directory


def run(corpus, output, *more):
    words = (corpus, "--output", output, "--unit-bytes", 1300, *more)
    return prepare.main([*map(str, words)])


@pytest.fixture
def reference(corpus, tmp_path):
    run(corpus, tmp_path / "reference", "--workers", "1")
    return snapshot(tmp_path / "reference")


def test_shares_in_any_order_match_a_single_run(corpus, tmp_path, reference, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "out"
    run(corpus, output, "--slurm", "3")
    shown = capsys.readouterr().out
    assert "5 units are planned for 3 tasks" in shown
    assert "bash prepare_out.sbatch" in shown
    subprocess.run(["bash", "-n", "prepare_out.sbatch"], check=True)
    for share in ("2/3", "0/3"):
        run(corpus, output, "--share", share, "--workers", "1")
    assert "share 0 of 3: 2 of 5 units are finished" in capsys.readouterr().out
    assert not output.exists()
    assert len(list(tmp_path.glob(".out.partial/parts/*.json"))) == 3
    run(corpus, output, "--workers", "1")  # prepares what share 1 has left
    assert snapshot(output) == reference
    monkeypatch.undo()


def test_line_break_in_output_is_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a\ntouch TOUCHED #", "a\rb", "a\x85b"):
        with pytest.raises(UserError, match="without control characters"):
            run(corpus, tmp_path / name, "--slurm", "2")
    assert not list(tmp_path.glob("*.sbatch"))
    assert not list(tmp_path.glob(".*partial"))


def test_job_name_is_a_word(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(corpus, tmp_path / "my out; x", "--slurm", "2")
    assert (
        "\n#SBATCH --job-name=prepare-my_out__x\n" in Path("prepare_my out; x.sbatch").read_text()
    )


def test_share_needs_the_plan_of_the_array(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"nothing is planned for .*out, or it is complete"):
        run(corpus, tmp_path / "out", "--share", "0/2")
    run(corpus, tmp_path / "out", "--slurm", "2")
    with pytest.raises(UserError, match=r"was planned otherwise: --format was npy, and is bin"):
        run(corpus, tmp_path / "out", "--share", "0/2", "--format", "bin")


def test_commit_waits_for_running_shares(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(corpus, tmp_path / "out", "--slurm", "2")
    lock = tmp_path / ".out.partial" / "share_1.lock"
    with locks.hold(lock), pytest.raises(UserError, match="is preparing a share of the output"):
        run(corpus, tmp_path / "out")


@pytest.mark.parametrize("share", ["2/2", "1", "a/3", "-1/3"])
def test_wrong_shares_are_usage_errors(corpus, tmp_path, share):
    with pytest.raises(UserError, match="is not a share: give K/N with K below N"):
        run(corpus, tmp_path / "out", f"--share={share}")


SBATCH = """#!/bin/bash
# Runs the script as Slurm does: once for each index of --array, or once.
while [[ $1 == --* ]]; do
  case $1 in --array=*) last=${1#--array=0-} ;; esac
  echo "$1" >> options
  shift
done
export SLURM_JOB_ID=17 SLURM_CPUS_PER_TASK=1
if [ -n "$last" ]; then
  for SLURM_ARRAY_TASK_ID in $(seq 0 "$last"); do
    export SLURM_ARRAY_TASK_ID
    bash "$@" > "task$SLURM_ARRAY_TASK_ID.log" 2>&1
  done
  echo "17;cluster"
else
  bash "$@"
fi
"""


@pytest.mark.processes
def test_script_runs_the_array_and_then_commits(corpus, tmp_path, reference, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(SBATCH)
    (tools / "srun").write_text('#!/bin/bash\nexec "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    run(corpus, Path("out"), "--slurm=2")
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    env.pop("SLURM_JOB_ID", None)
    command = ["bash", "prepare_out.sbatch", "--partition=cpu"]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert shown.returncode == 0, shown
    assert "documents        180" in shown.stdout
    assert "share 1 of 2: 2 of 5 units are finished" in (tmp_path / "task1.log").read_text()
    options = (tmp_path / "options").read_text().split()
    assert options.count("--partition=cpu") == 2
    assert "--dependency=afterany:17" in options
    assert snapshot(tmp_path / "out") == reference


def test_recipe_is_what_the_command_writes(tmp_path, monkeypatch):
    """The interpreter and the working directory are those of the reader."""
    from jaxforge.tools.starting.slurm_array import script

    command = (
        "s3://bucket/text --glob *.parquet --output s3://bucket/tokens "
        "--tokenizer meta-llama/Llama-3.1-8B --validation-fraction 0.001 --slurm 100"
    )
    args, _ = prepare._parse(shlex.split(command))
    monkeypatch.setattr("sys.executable", "python")
    written = script(args, "prepare_tokens.sbatch", Path("/path/to/work"))
    assert RECIPE.read_text() == written
