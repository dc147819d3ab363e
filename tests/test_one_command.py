"""`jaxforge COMMAND`, the entry point of all commands."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxforge
from jaxforge.commands import COMMANDS, doctor
from jaxforge.commands.dispatch import main
from jaxforge.errors import UserError
from tests.machine import PATIENCE

ROOT = Path(__file__).parents[1]
PROGRAM = Path(sys.executable).with_name("jaxforge")


def test_help_lists_all_commands(capsys):
    assert main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "  " in line[2:]]
    assert listed == list(COMMANDS)
    assert main([]) == 2


def test_commands_have_entries():
    for item in COMMANDS.values():
        assert callable(importlib.import_module(item.module).entry)


def test_few_commands():
    assert len(COMMANDS) <= 17


def test_unknown_command_gets_a_suggestion():
    with pytest.raises(UserError, match=r"unknown command trian; did you mean train\?"):
        main(["trian"])
    with pytest.raises(
        UserError, match="unknown command xyzzy; `jaxforge --help` lists the commands"
    ):
        main(["xyzzy"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_prepares_without_a_next_command(tmp_path):
    """`make train` goes on by itself, with another config."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(40):
        text = "".join(f"def f{i}(x):\n    return x + {i * n}\n" for i in range(200))
        (texts / f"m{n}.py").write_text(text)
    environment = Path(sys.prefix)
    command = ["make", "-f", ROOT / "Makefile", f"VENV={environment}", f"STDLIB={texts}",
               "-o", environment / ".run", "data/quickstart"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "unigram entropy" in done.stdout
    assert "Next" not in done.stdout + done.stderr
    texts.rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "data")
    failed = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=PATIENCE)
    assert failed.returncode == 2, failed.stdout


@pytest.mark.parametrize("word", ["version", "--version", "-V"])
def test_version_matches_package(word, capsys):
    assert main([word]) == 0
    assert capsys.readouterr().out == f"jaxforge {jaxforge.__version__}\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxforge.nothing  # noqa: B018


def test_program_behaves_like_module(tmp_path):
    def output(*arguments, code):
        done = subprocess.run(
            [PROGRAM, *arguments], text=True, capture_output=True, timeout=PATIENCE, cwd=tmp_path
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "no run directory at" in output("report", "none", code=2)
    assert "none: no checkpoint there" in output("inspect", "none", code=2)
    assert output("generate", "--help", code=0).startswith("usage: jaxforge generate RUN")
    assert output("verify", "--help", code=0).startswith("usage: jaxforge verify ")


@pytest.mark.parametrize("module", ["train", "evaluate", "generate", "prepare", "plan"])
def test_modules_of_commands_are_entry_points(module):
    command = [sys.executable, "-m", f"jaxforge.{module}", "--help"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)
    assert done.stdout.startswith(f"usage: jaxforge {module} ")


def test_doctor_finds_no_problems(capsys):
    assert doctor.main([]) == 0
    output = capsys.readouterr().out
    assert f"jax {importlib.metadata.version('jax')}" in " ".join(output.split())
    assert "a sum of squares right on cpu" in " ".join(output.split())
    assert "no problems found" in output


def test_doctor_reports_gpus_unknown_to_jax(monkeypatch, capsys):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(doctor, "gpu_memories", lambda: [8e10] * 8)
    assert doctor.main([]) == 1
    assert "problem: 8 GPU(s) exist, but JAX finds none: pip install 'jaxforge[cuda]'" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"train"}))
def test_help_imports_no_config(command):
    """Its tables take a third of a second to declare, before the first line of a help."""
    code = (
        f"import sys; sys.argv = ['jaxforge', {command!r}, '--help']\n"
        "from jaxforge.commands.dispatch import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('pydantic', 'jax', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, timeout=PATIENCE, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
