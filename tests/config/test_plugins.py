"""Hooks in a config, and errors about them."""

import pytest

from jaxforge.config import load_config
from jaxforge.errors import UserError
from jaxforge.training.hooks import Hook, named_hook

MODULE = """
from jaxforge.training.hooks import Hook

class Watch(Hook):
    pass

other = 1
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "my_watching.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def test_hooks_are_constructed_from_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[plugins]\nhooks = ["my_watching.Watch"]')
    (name,) = load_config(path).plugins.hooks
    hook = named_hook(name)
    assert isinstance(hook, Hook)
    assert type(hook).__name__ == "Watch"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Watch", 'hooks: "Watch" has no module; write my_module.Watch'),
        ("my_watchin.Watch", 'hooks: module "my_watchin" does not exist'),
        ("my_watching.Wach", "hooks: my_watching has no Wach"),
    ],
)
def test_missing_hook_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        load_config(None, [f"--plugins.hooks={name}"])


def test_non_hook_is_refused():
    (name,) = load_config(None, ["--plugins.hooks=my_watching.other"]).plugins.hooks
    with pytest.raises(UserError, match=r"my_watching\.other is not a subclass of .*Hook"):
        named_hook(name)
