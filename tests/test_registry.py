"""Names that keys may have: ours, yours, and what is said of others."""

import sys

import pytest

from jaxforge.config import load_config
from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.config.reading.schema import REGISTRIES, all_keys
from jaxforge.data.sources import register_dataset
from jaxforge.errors import UserError
from jaxforge.model.mixer import register_mixer
from jaxforge.model.transformer import Model, register_model
from jaxforge.optim.optimizer import register_optimizer
from jaxforge.optim.schedule import register_scheduler
from jaxforge.registry import Registry
from jaxforge.step.losses import register_loss
from jaxforge.training.eval_functions import register_eval_function

KEYS = {
    "model.model_type": register_model,
    "model.mixer_pattern": register_mixer,
    "train.loss_fn": register_loss,
    "optimizer.name": register_optimizer,
    "scheduler.name": register_scheduler,
    "data.dataset_type": register_dataset,
    "eval.functions": register_eval_function,
}


def value_of(config, key):
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def builder(*args):
    """Is never called here."""


def test_every_name_of_ours_has_a_builder():
    assert {registry.key for registry in REGISTRIES} == KEYS.keys()
    for registry in REGISTRIES:
        assert all(callable(registry[name]) for name in registry.names())


def test_name_that_is_taken_is_refused():
    registry = Registry("optimizer.name", "adamw")
    registry.register("adamw")(builder)
    with pytest.raises(UserError) as caught:
        registry.register("adamw")(lambda: None)
    assert str(caught.value) == (
        f'optimizer.name = "adamw" is registered already, by {__name__}: choose another name'
    )
    assert registry["adamw"] is builder


def test_names_of_ours_cannot_be_taken():
    with pytest.raises(UserError, match=r'"adamw" is registered already, by jaxforge\.optim'):
        register_optimizer("adamw")(builder)


def test_unregistered_name_gets_a_suggestion():
    registry = Registry("optimizer.name", "adamw", "lion")
    for name in ("adamw", "lion"):
        registry.register(name)(builder)
    with pytest.raises(UserError) as caught:
        registry["adam"]
    assert str(caught.value) == (
        'optimizer.name = "adam": expected one of adamw, lion; did you mean "adamw"?; for a name '
        "of your own, name the module that registers it (--plugins.modules=MODULE), or give "
        "--trust-plugins if you trust the module that the run names"
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.usefixtures("own_names")
def test_config_takes_registered_names_and_suggests_them(key, tmp_path):
    section, name = key.split(".")
    is_list = key in ("eval.functions", "model.mixer_pattern")
    path, item = tmp_path / "x.toml", f"{key}[0]" if is_list else key
    path.write_text(f"[{section}]\n{name} = " + ('["my_ownn"]' if is_list else '"my_ownn"'))
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert "my_own," not in str(caught.value)
    KEYS[key]("my_own")(type("Own", (Model,), {}) if key == "model.model_type" else builder)
    with pytest.raises(UserError) as caught:  # the schema is read anew, though it is kept
        load_config(path)
    node = all_keys()[key]
    known = (node["items"] if is_list else node)["enum"]
    assert known[-1] == "my_own"
    family = ", or optax.<name>" if key == "optimizer.name" else ""
    assert str(caught.value) == (
        f'{path}:2: {item} = "my_ownn": expected one of {", ".join(known)}{family}; did you mean '
        '"my_own"?'
    )
    config = load_config(path, [f"--{key}=my_own"])
    assert value_of(config, key) == (("my_own",) if is_list else "my_own")
    path.write_text(config.to_toml())
    assert load_config(path) == config


@pytest.fixture
def plugin(tmp_path, monkeypatch, own_names):
    """Writes a module where `import` finds it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(text, name="my_plugin"):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


REGISTERS = """
from jaxforge.optim.optimizer import register_optimizer
@register_optimizer("mine")
def mine(config, schedule, axes): ...
"""


def test_plugins_are_imported_before_the_other_sections_are_read(plugin, tmp_path):
    plugin(REGISTERS)
    # The order of the file does not matter.
    (tmp_path / "x.toml").write_text('[optimizer]\nname = "mine"\n[plugins]\nmodules = "my_plugin"')
    config = load_config("x.toml")
    assert (config.optimizer.name, config.plugins.modules) == ("mine", ("my_plugin",))
    assert OPTIMIZERS["mine"].__module__ == "my_plugin"
    assert load_config("x.toml") == config  # a module is imported once
    (tmp_path / "resolved.toml").write_text(config.to_toml())
    assert load_config("resolved.toml") == config


def test_plugins_of_the_command_line(plugin):
    config = load_config(None, [f"--plugins.modules={plugin(REGISTERS)}", "--optimizer.name=mine"])
    assert config.optimizer.name == "mine"


def test_plugin_that_is_not_there_is_named_with_its_line(plugin, tmp_path):
    (tmp_path / "x.toml").write_text('[train]\nseed = 1\n[plugins]\nmodules = ["no.such"]')
    with pytest.raises(UserError) as caught:
        load_config("x.toml")
    assert str(caught.value) == (
        'x.toml:3: [plugins] modules: module "no.such" does not exist; is its directory in '
        "PYTHONPATH?"
    )
    with pytest.raises(UserError, match=r'modules=nope: \[plugins\] modules: module "nope" does'):
        load_config(None, ["--plugins.modules=nope"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('mine')", r"ValueError: mine \(.*my_plugin.py:1\)"),
        ("\nimport missing_of_its_own", r"No module named 'missing_of_its_own' \(.*plugin.py:2\)"),
        ("\nraise SystemExit(0)", r"SystemExit: 0 \(.*my_plugin.py:2\)"),
        ("\n1 +", r"SyntaxError: invalid syntax \(.*my_plugin.py:2\)"),
        ("x = 1\n  y = 2", r"IndentationError: unexpected indent \(.*my_plugin.py:2\)"),
    ],
)
def test_plugin_that_fails_is_named_with_what_it_raised_and_where(plugin, text, said):
    with pytest.raises(UserError, match=rf"modules: my_plugin cannot be imported: .*{said}"):
        load_config(None, [f"--plugins.modules={plugin(text)}"])


def test_plugin_that_takes_a_name_of_ours_is_told_so(plugin):
    plugin(REGISTERS.replace('"mine"', '"lion"'))
    with pytest.raises(UserError, match=r'modules: my_plugin: optimizer.name = "lion" is regis'):
        load_config(None, ["--plugins.modules=my_plugin"])
