"""`[plugins]`: user code that registers names for the other sections."""

import importlib
import sys
from collections.abc import Iterator
from typing import Self

from pydantic import ValidationInfo, model_validator

from jaxforge.config.section import Section
from jaxforge.errors import UserError, reason_and_line
from jaxforge.storage import trust

_KEYS = ("modules", "callbacks")


class PluginsConfig(Section):
    """User modules, imported before the other sections are read."""

    modules: tuple[str, ...] = ()
    """Importable modules that register losses, optimizers and other components."""

    callbacks: tuple[str, ...] = ()
    """Classes such as my_module.MyCallback, constructed without arguments."""

    @property
    def names(self) -> trust.PluginNames:
        """Names of all plugins, for trust decisions."""
        return trust.PluginNames(self.modules, self.callbacks)

    @model_validator(mode="after")
    def _import(self, info: ValidationInfo) -> Self:
        """Import all plugins, or only those on the command line, depending on the context.

        `reading.unresolved` passes the validation context. If plugins are not imported, other
        sections may contain unregistered names (`Registry`).
        """
        context = {} if info.context is None else info.context
        trusts = context.get("trusts", trust.always)
        named = _KEYS if trusts(self.names) else context.get("on_command_line", ())
        left_out = [key for key in _KEYS if key not in named and getattr(self, key)]
        context["may_be_unknown"] = trusts is trust.never or bool(left_out)
        if problems := list(self._import_problems(named)):
            raise ValueError("\n".join(problems))
        return self

    def _import_problems(self, keys: tuple[str, ...]) -> Iterator[str]:
        """Import the modules; yield those that do not exist, fail, or register a name twice."""
        for name in self.modules if "modules" in keys else ():
            yield from _import_problems("modules", name)
        for callback in self.callbacks if "callbacks" in keys else ():
            module, _, name = callback.rpartition(".")
            if not module:
                yield f'callbacks: "{callback}" has no module; write my_module.{callback}'
            elif problems := list(_import_problems("callbacks", module)):
                yield from problems
            elif not hasattr(sys.modules[module], name):
                yield f"callbacks: {module} has no {name}"


def _import_problems(key: str, name: str) -> Iterator[str]:
    try:
        importlib.import_module(name)
    except UserError as error:
        yield f"{key}: {name}: {error}"
    except (Exception, SystemExit) as error:
        if _is_missing(name, error):
            yield f'{key}: module "{name}" does not exist; is its directory in PYTHONPATH?'
        else:
            yield f"{key}: {name} cannot be imported: {reason_and_line(error)}"


def _is_missing(name: str, error: BaseException) -> bool:
    """Return whether the module itself, or its package, is missing, not an import inside it."""
    return isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
