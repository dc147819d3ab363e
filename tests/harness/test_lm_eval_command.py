"""`jaxforge lm_eval`, as far as it goes without lm_eval."""

import importlib.util
import json
import os

import jax
import pytest

from jaxforge.cli.running import run_main
from jaxforge.commands import lm_eval as command


@pytest.fixture
def options(monkeypatch):
    """Return the options that lm_eval's own command receives."""
    given = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "_run", given.extend)
    return given


def test_without_lm_eval_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_main(lambda: command.main(["runs/x", "--tasks", "lambada"])) == 2
    assert "pip install 'jaxforge[lm-eval]'" in capsys.readouterr().err


def test_settings_are_of_the_model_and_the_rest_is_lm_evals(options):
    arguments = ["--step", "7", "--distributed.tp=2", "--tasks", "a", "b", "--limit", "0.5"]
    more = ["--model_args", "add_bos_token=True,max_length=64", "--include_path", "tasks"]
    assert command.main(["runs/x", *arguments, *more]) == 0
    reported = dict(zip(options[::2], options[1::2], strict=True))
    assert reported.pop("--model") == "jaxforge"
    assert reported.pop("--batch_size") == "32"
    assert json.loads(reported.pop("--model_args")) == {
        "run": "runs/x", "step": 7, "add_bos_token": "True", "max_length": "64",
        "distributed.tp": "2",
    }  # fmt: skip
    assert reported == {"--tasks": "a,b", "--include_path": "tasks", "--limit": "0.5"}


def test_first_process_prints(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    command.limit_output_to_first_process()
    assert os.environ["LOCAL_RANK"] == "1"
