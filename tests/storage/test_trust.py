"""Import of the plugins of runs, and its search path."""

import shutil
import subprocess
import sys

import pytest

from jaxforge.commands import evaluate, generate, train
from jaxforge.commands import report as report_command
from jaxforge.config.train import LOSSES
from jaxforge.errors import UserError
from jaxforge.inference.run import Run
from jaxforge.runs import run_directory
from jaxforge.storage import trust
from tests.helpers import change_stored_config, cli
from tests.processes.conftest import environment

PLANTED = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"
REGISTERS = """
from jaxforge.config.train import LOSSES
from jaxforge.step.losses import LOSSES as ours, register_loss


@register_loss("plain_sum")
def plain_sum(config, model):
    return ours["cross_entropy"](config, model)
"""
NAMES = trust.PluginNames(("own_losses",), ())

pytestmark = pytest.mark.usefixtures("one_device", "own_names")


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Restore modules, paths and grants after each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(trust, "_granted", set())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("own_losses", "planted"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a run of two steps with an evaluation set and a tokenizer."""
    run = tmp_path_factory.mktemp("trust") / "run"
    settings = ["--train.max_steps=2", "--data.tokenizer_path=byte", "--metrics.log_interval=1"]
    assert train.main(["--config=configs/debug.toml", f"--checkpoint.dir={run}", *settings]) == 0
    return run


@pytest.fixture
def stranger(finished, tmp_path, monkeypatch):
    """Return the run as received from another user, with its plugin next to the config."""
    run = tmp_path / "stranger"
    shutil.copytree(finished, run)
    config = (run / "config.toml").read_text()
    config = config.replace("modules = []", 'modules = ["planted"]')
    config = config.replace("callbacks = []", 'callbacks = ["planted.Callback"]')
    (run / "config.toml").write_text(config)
    assert config.count("planted") == 2
    change_stored_config(run, "plugins", modules=["planted"], callbacks=["planted.Callback"])
    (run / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(run)
    return run


def name_unregistered(run, section, key, name):
    path = run / "config.toml"
    lines = path.read_text().split("\n")
    start = lines.index(f"[{section}]")
    at = next(i for i in range(start, len(lines)) if lines[i].startswith(f"{key} = "))
    lines[at] = f'{key} = "{name}"'
    path.write_text("\n".join(lines))


def test_inspecting_run_imports_no_plugins(stranger, tmp_path, capsys):
    for section, key in (("optimizer", "name"), ("train", "loss_fn"), ("model", "model_type")):
        name_unregistered(stranger, section, key, "theirs")
    config, run = str(stranger / "config.toml"), str(stranger)
    assert report_command.main([run]) == 0
    assert cli(["inspect", run]) == 0
    assert cli(["verify", run, run]) == 0
    capsys.readouterr()
    assert train.main(["--config", config, "--dry-run", f"--checkpoint.dir={tmp_path / 'n'}"]) == 0
    said = capsys.readouterr().out
    assert 'optimizer.name = "theirs"' in said
    assert "--trust-plugins imports planted" in said
    assert run_directory.shown_config(stranger).optimizer.name == "theirs"
    assert not (stranger / "executed").exists()


def test_using_run_imports_plugins_only_if_granted(stranger, capsys):
    run, settings = str(stranger), ["--max-tokens=2", "--prompt=a"]
    assert generate.main([run, *settings]) == 0  # without the plugin
    assert not (stranger / "executed").exists()
    name_unregistered(stranger, "model", "model_type", "theirs")
    for command in (evaluate.main, generate.main):
        with pytest.raises(UserError) as caught:
            command([run])
        assert 'model.model_type = "theirs"' in str(caught.value)
        assert "--plugins.modules=MODULE" in str(caught.value)
        assert "--trust-plugins" in str(caught.value)
    with pytest.raises(UserError, match="theirs"):
        Run(run).generate("a")
    assert not (stranger / "executed").exists()
    with pytest.raises(UserError, match="callbacks: planted has no Callback"):
        generate.main([run, "--trust-plugins"])
    assert (stranger / "executed").exists()
    with pytest.raises(UserError, match="callbacks: planted has no Callback"):
        Run(run, trust_plugins=True).generate("a")


def test_training_records_trust_for_run_path(tmp_path):
    code, run = tmp_path / "code", tmp_path / "run"
    code.mkdir()
    (code / "own_losses.py").write_text(REGISTERS)
    sys.path.append(str(code))
    own = ["--plugins.modules=own_losses", "--train.loss_fn=plain_sum", "--train.max_steps=1"]
    assert train.main(["--config=configs/debug.toml", f"--checkpoint.dir={run}", *own]) == 0
    del sys.modules["own_losses"], LOSSES._builders["plain_sum"]
    sys.path.remove(str(code))
    run_directory.read_config(run)  # from the path at training time
    assert "own_losses" in sys.modules
    del sys.modules["own_losses"], LOSSES._builders["plain_sum"]
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    assert run_directory.read_config(moved).train.loss_fn == "plain_sum"
    assert "own_losses" not in sys.modules
    path = run / "config.toml"
    path.write_text(path.read_text().replace('["own_losses"]', '["own_losses", "planted"]'))
    run_directory.read_config(run)
    assert "own_losses" not in sys.modules


def is_trusted(run):
    return trust.of_run(run)(NAMES)


def test_trust_requires_private_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "own_losses", sys)
    monkeypatch.setattr(sys, "__file__", str(tmp_path / "own_losses.py"), raising=False)
    trust.note(tmp_path / "run", NAMES)
    retained = tmp_path / "jaxforge" / "trusted"
    assert (tmp_path / "run").exists() is False
    assert retained.stat().st_mode & 0o777 == 0o700
    assert is_trusted(tmp_path / "run")
    assert str(tmp_path) in sys.path
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert is_trusted(tmp_path / "link")
    assert not is_trusted(tmp_path / "other")
    retained.chmod(0o770)
    assert not is_trusted(tmp_path / "run")
    retained.chmod(0o700)
    retained.rename(tmp_path / "elsewhere")
    retained.symlink_to(tmp_path / "elsewhere")
    assert not is_trusted(tmp_path / "run")
    with pytest.raises(OSError, match="a private directory of this user"):
        trust.note(tmp_path / "run", NAMES)


def test_settings_with_side_effects_are_removed(stranger, tmp_path):
    changed = {
        ("train", "compilation_cache_dir"): str(tmp_path / "cache"),
        ("train", "executable"): str(tmp_path / "step.zip"),
        ("checkpoint", "dir"): str(tmp_path / "elsewhere"),
        ("profiling", "trace_dir"): str(tmp_path / "traces"),
        ("data", "cache_dir"): str(tmp_path / "blocks"),
    }
    path = stranger / "config.toml"
    path.write_text(path.read_text().replace(" is not set", ' = ""').replace("# comp", "comp"))
    text = path.read_text().replace('# executable = ""', 'executable = ""')
    path.write_text(
        text.replace(
            "writers = []", f'writers = [{{name = "tensorboard", location = "{tmp_path}/tb"}}]'
        )
    )
    for (section, key), value in changed.items():
        name_unregistered(stranger, section, key, value)
    config = run_directory.read_config(stranger)
    assert (config.train.compilation_cache_dir, config.train.executable) == (None, None)
    assert config.checkpoint.dir == str(stranger)
    assert not config.metrics.writers
    assert str(tmp_path / "tb") not in config.to_toml()
    assert str(tmp_path / "traces") not in config.to_toml()
    assert config.data.cache_dir == ""
    shutil.copy(path, stranger / "configs" / "from_step_0.toml")
    assert run_directory.config_of_step(stranger, 1) == config  # as in replay and capsules
    mine = ["--train.compilation_cache_dir=/mine"]
    assert run_directory.read_config(stranger, mine).train.compilation_cache_dir == "/mine"


@pytest.mark.processes
@pytest.mark.parametrize(
    "command", ["jaxforge report .", "jaxforge inspect .", "jaxforge.plan --help", "jaxforge"]
)
def test_commands_do_not_import_from_working_directory(command, stranger):
    for name in ("signal", "typing", "argparse", "numpy", "pydantic", "tensorboardX"):
        (stranger / f"{name}.py").write_text(PLANTED)
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=stranger, env=environment(1), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (2 if command == "jaxforge" else 0), done.stderr
    assert not (stranger / "executed").exists()


@pytest.mark.processes
def test_train_imports_from_working_directory(tmp_path):
    (tmp_path / "own_losses.py").write_text(REGISTERS)
    (tmp_path / "numpy.py").write_text(PLANTED)  # libraries have priority
    (tmp_path / "c.toml").write_text('[plugins]\nmodules = ["own_losses"]\n[train]\nmax_steps = 0')
    done = subprocess.run(
        [sys.executable, "-m", "jaxforge.train", "--config=c.toml"],
        cwd=tmp_path, env=environment(1), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "own_losses" not in done.stderr
    assert "train.max_steps = 0" in done.stderr
    assert not (tmp_path / "executed").exists()
