"""Trust in runs: which runs may import the modules of their `[plugins]`.

To import a module is to run its code. A config that the user names to train is the user's own. The
config of a run may be a stranger's: its plugins are imported only where the user has said
`--trust-plugins`, or has trained this run on this machine with these plugins. `train` notes that in
`$XDG_STATE_HOME/jaxforge/trusted`, outside of the run and readable by this user alone.
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
        hooks: of `plugins.hooks`.
    """

    modules: tuple[str, ...]
    hooks: tuple[str, ...]

    def all_modules(self) -> list[str]:
        """Return every module that an import of these plugins executes."""
        return [*self.modules, *(hook.rpartition(".")[0] for hook in self.hooks)]


Decision = Callable[[PluginNames], bool]
"""True if the plugins of a config may be imported."""

_ALL = "*"
_granted: set[str] = set()


def own(names: PluginNames) -> bool:
    """Decide for a config that the user has written or named: its plugins are imported."""
    return True


def never(names: PluginNames) -> bool:
    """Decide for a config that is only shown or compared: nothing is imported."""
    return False


def of_run(run: str | os.PathLike) -> Decision:
    """Return the decision on the plugins of a run.

    Args:
        run: its directory, on this machine or in a bucket.
    """
    path = _resolved(run)

    def is_trusted(names: PluginNames) -> bool:
        if _ALL in _granted or path in _granted:
            return True
        record = _record(path, names)
        if record is None:
            return False
        sys.path += [folder for folder in record if folder not in sys.path]
        return True

    return is_trusted


def if_told(run: str | os.PathLike) -> Decision:
    """Return the decision on a run that is compared: only `--trust-plugins` imports its plugins."""
    return lambda names: is_granted(run)


def grant(run: str | os.PathLike) -> None:
    """Trust the plugins of a run for as long as this process lasts."""
    _granted.add(_resolved(run))


def grant_all(is_granted: bool) -> None:
    """Set whether this process trusts the plugins of every run: `--trust-plugins`."""
    (_granted.add if is_granted else _granted.discard)(_ALL)


def is_granted(run: str | os.PathLike) -> bool:
    """Return whether this process was told to trust the plugins of a run."""
    return bool({_ALL, _resolved(run)} & _granted)


def note(run: str | os.PathLike, names: PluginNames) -> None:
    """Record that this user trains a run with plugins, which have been imported.

    Raises:
        OSError: the record cannot be written.
    """
    if not names.all_modules():
        return
    path, directory = _resolved(run), _directory()
    safe_files.private_directory(directory)
    record = {"run": path, "plugins": names._asdict(), "path": _roots(names.all_modules())}
    safe_files.replace_text(directory / _file(path, names), json.dumps(record) + "\n")


def use_working_directory() -> None:
    """Let the user's own modules be found in the working directory, after all other places."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _directory() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "jaxforge" / "trusted"


def _resolved(run: str | os.PathLike) -> str:
    return os.fspath(run) if urls.in_bucket(run) else os.path.realpath(run)


def _file(path: str, names: PluginNames) -> str:
    return hashlib.sha256(json.dumps([path, *names]).encode()).hexdigest() + ".json"


def _record(path: str, names: PluginNames) -> list[str] | None:
    """The directories in which the plugins were found when this user trained the run."""
    directory = _directory()
    record = directory / _file(path, names)
    if not safe_files.is_private(directory) or not record.is_file():
        return None
    return json.loads(record.read_text())["path"]


def _roots(modules: Sequence[str]) -> list[str]:
    """The directories that have to be on `sys.path` for modules that have been imported."""
    folders = []
    for name in {module.partition(".")[0] for module in modules}:
        module = sys.modules[name]
        paths = [*getattr(module, "__path__", ()), *filter(None, [module.__file__])]
        folders += [os.path.dirname(os.path.abspath(path)) for path in paths[:1]]
    return sorted(set(folders))
