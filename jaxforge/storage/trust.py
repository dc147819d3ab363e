"""Trust decisions: the runs that may import the modules of their `[plugins]`.

Importing a module runs its code. A config that the user trains is the user's own. The config of a
run may be untrusted: its plugins are imported only with `--trust-plugins`, or if the user has
trained this run on this machine with these plugins. `train` records that in
`$XDG_STATE_HOME/jaxforge/trusted`, outside of the run and readable only by this user.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxforge.storage import safe_files, urls


class PluginNames(NamedTuple):
    """Names in `[plugins]` of a config.

    Attributes:
        modules: of `plugins.modules`.
        callbacks: of `plugins.callbacks`.
    """

    modules: tuple[str, ...]
    callbacks: tuple[str, ...]

    def all_modules(self) -> list[str]:
        """Return every module that an import of these plugins executes."""
        return [*self.modules, *(callback.rpartition(".")[0] for callback in self.callbacks)]


Decision = Callable[[PluginNames], bool]
"""Returns whether the plugins of a config may be imported."""

_ALL = "*"
_granted: set[str] = set()


def always(names: PluginNames) -> bool:
    """Return True: the decision for configs of the user, whose plugins are imported."""
    return True


def never(names: PluginNames) -> bool:
    """Return False: the decision for configs that are only shown or compared."""
    return False


def of_run(run: str | os.PathLike) -> Decision:
    """Return the decision on the plugins of a run.

    Args:
        run: the run directory, local or in a bucket.
    """
    path = _absolute(run)

    def is_trusted(names: PluginNames) -> bool:
        if _ALL in _granted or path in _granted:
            return True
        # The record names the plugins, so that a run with other plugins is another decision.
        record = _record(path, names)
        if record is None:
            return False
        sys.path += [folder for folder in record if folder not in sys.path]
        return True

    return is_trusted


def if_granted(run: str | os.PathLike) -> Decision:
    """Return the decision for a run in a comparison, which imports plugins only if granted."""
    return lambda names: is_granted(run)


def grant(run: str | os.PathLike) -> None:
    """Trust the plugins of a run in this process."""
    _granted.add(_absolute(run))


def grant_all(is_granted: bool) -> None:
    """Set whether this process trusts the plugins of every run: `--trust-plugins`."""
    (_granted.add if is_granted else _granted.discard)(_ALL)


def is_granted(run: str | os.PathLike) -> bool:
    """Return whether the user granted trust to the plugins of a run in this process."""
    return bool({_ALL, _absolute(run)} & _granted)


def note(run: str | os.PathLike, names: PluginNames) -> None:
    """Record that this user trains a run with plugins that have been imported.

    Raises:
        OSError: the record cannot be written.
    """
    if not names.all_modules():
        return
    path, directory = _absolute(run), _directory()
    safe_files.private_directory(directory)
    record = {"run": path, "plugins": names._asdict(), "path": _import_paths(names.all_modules())}
    safe_files.replace_text(directory / _record_name(path, names), json.dumps(record) + "\n")


def use_working_directory() -> None:
    """Append the working directory to `sys.path`, for modules of the user."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _directory() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "jaxforge" / "trusted"


def _absolute(run: str | os.PathLike) -> str:
    return os.fspath(run) if urls.in_bucket(run) else os.path.realpath(run)


def _record_name(path: str, names: PluginNames) -> str:
    return hashlib.sha256(json.dumps([path, *names]).encode()).hexdigest() + ".json"


def _record(path: str, names: PluginNames) -> list[str] | None:
    """Return the import paths of the plugins from when this user trained the run, or None."""
    directory = _directory()
    record = directory / _record_name(path, names)
    if not safe_files.is_private(directory) or not record.is_file():
        return None
    return json.loads(record.read_text())["path"]


def _import_paths(modules: Sequence[str]) -> list[str]:
    """Return the `sys.path` entries required by imported modules."""
    folders = []
    for name in {module.partition(".")[0] for module in modules}:
        module = sys.modules[name]
        paths = [*getattr(module, "__path__", ()), *filter(None, [module.__file__])]
        folders += [os.path.dirname(os.path.abspath(path)) for path in paths[:1]]
    return sorted(set(folders))
