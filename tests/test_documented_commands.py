"""Every command line of the documentation, run as it stands in a directory with what it speaks of.

What does not run here is in `ELSEWHERE` with the reason, and nothing else.
"""

import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxforge.cli.running import run_main
from jaxforge.commands import COMMANDS
from tests import scene
from tests.documentation import commands, words_of

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    r"make ": "sets up an environment, then trains the quickstart or runs tests",
    r"pip install ": "changes the environment",
    r".*lm_eval ": "needs lm_eval, and tasks from the Hub: `make test-lm-eval`",
    r"srun .*llama_7b_gpu_64.toml": "needs 64 GPUs",
    r"jaxforge train --config 124m.toml$": "needs a GPU, for a day",
    r".*--train.executable=step.zip": "needs the slice that it was compiled for",
    r".*--topology v5e:16x16": "compiles a 7B step for 256 chips: benchmarks/scaling.py",
    r"jaxforge prepare (s3|hf)://": "needs a bucket or the Hub: storage/test_remote_corpora.py",
    r"python benchmarks/gpu_aot.py": "needs the compilers for GPUs, and an hour",
    r"python benchmarks/[gt]pu.py": "needs a device; in miniature it takes an hour on CPUs",
}  # fmt: skip
"""Patterns of lines that no test runs, and why."""
COMPILERS = {"v": "libtpu", "h": "jax_cuda13_plugin"}
"""What a plan imports for a topology, by its first letter."""
META = {
    "averaging": {"RUN": "runs/mine", "RUN@400": "runs/mine@400", "DIR": "made"},
    "data": {"INPUT": "my_texts", "PATH": "chat_tokenizer", "DIR": "made"},
    "lora": {"RUN": "runs/adapted", "MERGED": "made", "ADAPTER": "made"},
    "preference_and_distillation": {"PATH": "chat_tokenizer", "DIR": "made"},
    "torch_compat": {
        "SRC": "old/checkpoints", "DST": "made", "RUN": "my_run", "PATH": "my_run",
        "A": "new", "B": "my_run", "MODULE:FACTORY": "mymodel:build",
        "ADAPTED": "runs/adapted",
    },
}  # fmt: skip
"""What stands for the words in capitals, by page."""
DIRECTORIES = {"/data/": "data/", "/tmp/": "tmp/"}
"""Where such directories are here."""
OUTPUTS = re.compile(r"--(?:output|activations|capsule|checkpoint\.dir)[= ](\S+)")
DESTINATION = re.compile(r"convert \S+ (\S+)")


def is_elsewhere(line):
    return any(re.match(pattern, line) for pattern in ELSEWHERE)


DOCUMENTED = [
    (item.id.partition(":")[0], item.values[0].partition(" #")[0].strip())
    for item in commands()
    if not item.values[0].startswith("$ ")  # what it answers is shown as well: below
]


def test_unrun_commands_are_still_documented():
    for pattern in ELSEWHERE:
        assert any(re.match(pattern, line) for _, line in DOCUMENTED), pattern


def here_of(line, page):
    """The words of a documented line, with the places of the scene."""
    for there, here in DIRECTORIES.items():
        line = line.replace(there, here)
    return [META.get(page, {}).get(word, word) for word in words_of(line)]


class Terminal(io.StringIO):
    """Terminal with typed input."""

    def isatty(self):
        return True


@pytest.fixture(scope="module")
def built_scene(tmp_path_factory):
    """The scene, and the place that it was made in: configs have that in their paths."""
    location = tmp_path_factory.mktemp("scene")
    scene.make(location)
    return location.rename(f"{location}_kept"), location


@pytest.fixture
def here(built_scene, monkeypatch):
    """The scene, to be in; a command's own processes find `python`, and this checkout."""
    retained, location = built_scene
    shutil.copytree(retained, location, symlinks=True)
    monkeypatch.chdir(location)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path[1:]]))
    monkeypatch.setattr(sys, "stdin", Terminal("Hello\n"))
    monkeypatch.syspath_prepend(location)
    yield location
    sys.modules.pop("mymodel", None)
    shutil.rmtree(location)


def made_by(words):
    """Yield the paths that a command line creates."""
    line = " ".join(words)
    yield from (Path(name) for name in [*OUTPUTS.findall(line), *DESTINATION.findall(line)])
    if config := re.search(r"train --config (\S+)(?!.*(dry-run|checkpoint.dir))", line):
        run = Path(tomllib.loads(Path(config[1]).read_text())["checkpoint"]["dir"])
        if not Path(config[1]).resolve().is_relative_to(run.resolve()):  # else it goes on
            yield run


def code_of(words, monkeypatch):
    """The exit code of a command line, in this process."""
    if words[0] == "python":
        return subprocess.run([sys.executable, *words[1:]], check=False).returncode
    _, name, *options = words
    # These choose JAX's platform before its import.
    if name == "prove" or (name == "plan" and "--topology" in options):
        return subprocess.run(
            [sys.executable, "-m", "jaxforge", *words[1:]], check=False
        ).returncode
    monkeypatch.setattr(sys, "argv", ["jaxforge", *options])
    module = COMMANDS[name].module
    try:
        return run_main(lambda: importlib.import_module(module).main(options))
    except SystemExit as end:
        return end.code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "line"), [item for item in DOCUMENTED if not is_elsewhere(item[1])]
)
def test_documented_command_does_what_it_says(page, line, here, monkeypatch, capsys):
    match = re.search(r"plan .*--topology ([vh])", line)
    if match and importlib.util.find_spec(COMPILERS[match[1]]) is None:
        pytest.skip(f"needs {COMPILERS[match[1]]} to compile")
    if "--torch " in line:
        pytest.importorskip("transformers")
        pytest.importorskip("torch")
    words = here_of(line, page)
    results = list(made_by(words))
    for path in results:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert not code_of(words, monkeypatch), capsys.readouterr()
    assert all(path.exists() for path in results), results


WRONG = """[model]
dim = 64
n_layers = 2
n_heads = 4
vocab_size = 256
max_seq_len = 64




[train]
batchsize = 8

[scheduler]
name = "cosin"
"""


def test_front_page_shows_what_two_mistakes_are_answered_with(tmp_path, monkeypatch, capsys):
    (line, answer) = re.search(
        r"^\$ (jaxforge train .*)\n(error: (?:.+\n)+?)```", (ROOT / "README.md").read_text(), re.M
    ).groups()
    (tmp_path / "run.toml").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    assert code_of(shlex.split(line), monkeypatch) == 2
    assert capsys.readouterr().err == answer
