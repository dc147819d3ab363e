"""From text files to a sample: prepare, train, generate, as commands."""

import subprocess
import sys

import pytest

from tests.processes.conftest import ROOT, Run, environment


def command(module, *arguments, code=0):
    result = subprocess.run(
        [sys.executable, "-m", f"jaxforge.{module}", *map(str, arguments)],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trained on one sentence over and over, until it knows it by heart."""
    path = tmp_path_factory.mktemp("generate")
    for i in range(40):
        (path / f"{i:02}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 8)
    command("prepare", *sorted(path.glob("*.txt")), "--output", path / "data")
    run = Run(path, "run")
    run.finish(
        f"--data.dataset_path={path / 'data' / 'train'}", "--model.vocab_size=257",
        "--train.max_steps=120", "--checkpoint.interval=60", "--metrics.log_interval=60",
    )  # fmt: skip
    return run


def test_one_prompt_is_continued(run):
    text = command("generate", run.directory, "--prompt", "the quick", "--max-tokens", 30,
                   "--temperature", 0)  # fmt: skip
    assert text == "the quick brown fox jumps over the lazy\n"


def test_several_prompts_of_an_older_checkpoint(run):
    text = command("generate", run.directory / "checkpoints" / "step_60", "--prompt", "jumps over",
                   "--prompt", "the", "--max-tokens", 5, "--temperature", 0)  # fmt: skip
    first, second = text.split("--- 2\n")
    assert first.startswith("--- 1\njumps over")
    assert second.startswith("the")


def test_the_seed_decides(run):
    def draw(seed):
        return command("generate", run.directory, "--prompt", "the ", "--max-tokens", 20,
                       "--temperature", 3, "--seed", seed)  # fmt: skip

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x" * 60], "exceed model.max_seq_len = 64"),
        (["--top-p", "0"], "--top-p: expected above 0, at most 1"),
        (["--max-tokens", "0"], "--max-tokens: expected 1 or more"),
    ],
)
def test_mistakes_are_explained(run, arguments, message):
    assert message in command("generate", run.directory, *arguments, code=2)


def test_a_directory_without_a_checkpoint(tmp_path):
    assert "no checkpoint at" in command("generate", tmp_path, code=2)
