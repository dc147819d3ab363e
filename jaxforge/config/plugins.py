"""`[plugins]`: code of yours that registers what the other sections name."""

import importlib
from collections.abc import Iterator

from jaxforge.config.section import Section
from jaxforge.errors import UserError


class PluginsConfig(Section):
    """Modules of yours; they are imported before the other sections are read."""

    modules: tuple[str, ...] = ()
    """Modules that register losses, optimizers and the like, as `import` would find them."""

    def problems(self) -> Iterator[str]:
        """Imports the modules; yields those that are not there, or register a name twice.

        Raises:
            ImportError: one of them fails while it is imported.
        """
        for name in self.modules:
            try:
                importlib.import_module(name)
            except UserError as error:
                yield f"modules: {name}: {error}"
            except Exception as error:
                if not _is_missing(name, error):
                    # A ValueError would be taken for a broken rule, and its traceback lost.
                    raise ImportError(f"plugins.modules: {name} cannot be imported") from error
                yield f'modules: there is no module "{name}"; is its directory in PYTHONPATH?'


def _is_missing(name: str, error: Exception) -> bool:
    """Whether it is this module, or its package, that is not there: no import of its own."""
    return isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
