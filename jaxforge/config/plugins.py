"""`[plugins]`: code of yours that registers what the other sections name."""

import importlib
import sys
import traceback
from collections.abc import Iterator
from typing import Self

from pydantic import ValidationInfo, model_validator

from jaxforge.config.section import Section
from jaxforge.errors import UserError
from jaxforge.storage import trust


class PluginsConfig(Section):
    """Modules of yours; they are imported before the other sections are read."""

    modules: tuple[str, ...] = ()
    """Modules that register losses, optimizers and the like, as `import` would find them."""

    hooks: tuple[str, ...] = ()
    """Hooks of yours, each a class as my_module.MyHook; made without arguments."""

    @property
    def names(self) -> trust.PluginNames:
        """All that is named here, for decisions about trust."""
        return trust.PluginNames(self.modules, self.hooks)

    @model_validator(mode="after")
    def _import(self, info: ValidationInfo) -> Self:
        """Import all, or what the command line names, as the context of the validation says.

        The context is that of `reading.unresolved`. Where something is left out, other sections may
        have names that nothing here registers (`Registry`).
        """
        context = {} if info.context is None else info.context
        trusts = context.get("trusts", trust.own)
        named = ("modules", "hooks") if trusts(self.names) else context.get("on_command_line", ())
        left_out = [key for key in ("modules", "hooks") if key not in named and getattr(self, key)]
        context["may_be_unknown"] = trusts is trust.never or bool(left_out)
        if problems := list(self._import_problems(named)):
            raise ValueError("\n".join(problems))
        return self

    def _import_problems(self, keys: tuple[str, ...]) -> Iterator[str]:
        """Import the modules; yield those that do not exist, fail, or register a name twice."""
        for name in self.modules if "modules" in keys else ():
            yield from _import_problems("modules", name)
        for hook in self.hooks if "hooks" in keys else ():
            module, _, name = hook.rpartition(".")
            if not module:
                yield f'hooks: "{hook}" names no module; write my_module.{hook}'
            elif problems := list(_import_problems("hooks", module)):
                yield from problems
            elif not hasattr(sys.modules[module], name):
                yield f"hooks: {module} has no {name}"


def _import_problems(key: str, name: str) -> Iterator[str]:
    try:
        importlib.import_module(name)
    except UserError as error:
        yield f"{key}: {name}: {error}"
    except (Exception, SystemExit) as error:
        if _is_missing(name, error):
            yield f'{key}: there is no module "{name}"; is its directory in PYTHONPATH?'
        else:
            yield f"{key}: {name} cannot be imported: {_described(error)}"


def _described(error: BaseException) -> str:
    """Describe an exception and its innermost location."""
    *_, innermost = traceback.extract_tb(error.__traceback__)
    said = traceback.format_exception_only(error)[-1].strip()
    return f"{said} ({innermost.filename}:{innermost.lineno})"


def _is_missing(name: str, error: BaseException) -> bool:
    """Return whether the module itself, or its package, is missing, not an import inside it."""
    return isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
