"""Callbacks in a config, and errors about them."""

import pytest

from jaxforge.config import load_config
from jaxforge.errors import UserError
from jaxforge.training.callbacks.callback import Callback, named_callback, named_callbacks

MODULE = """
import jaxforge as jf

class Watch(jf.Callback):
    pass

other = 1
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_watching.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("key", ["callbacks", "hooks"])  # the latter in configs of earlier runs
def test_callbacks_are_constructed_from_toml(tmp_path, key):
    path = tmp_path / "run.toml"
    path.write_text(f'[plugins]\n{key} = ["my_watching.Watch"]')
    (callback,) = named_callbacks(load_config(path))
    assert isinstance(callback, Callback)
    assert type(callback).__name__ == "Watch"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Watch", 'callbacks: "Watch" has no module; write my_module.Watch'),
        ("my_watchin.Watch", 'callbacks: module "my_watchin" does not exist'),
        ("my_watching.Wach", "callbacks: my_watching has no Wach"),
    ],
)
def test_missing_callback_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        load_config(None, [f"--plugins.callbacks={name}"])


def test_class_of_another_kind_is_refused():
    (name,) = load_config(None, ["--plugins.callbacks=my_watching.other"]).plugins.callbacks
    with pytest.raises(UserError, match=r"my_watching\.other is not a subclass of .*Callback"):
        named_callback(name)
