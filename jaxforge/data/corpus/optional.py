"""Libraries that only some inputs need: the extra `data`."""

from importlib import import_module
from types import ModuleType

from jaxforge.errors import UserError


def library(name: str, purpose: str) -> ModuleType:
    """Imports `name`.

    Args:
        name: such as "pyarrow.parquet".
        purpose: what needs it, such as "reading Parquet".

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(
            f"{purpose} needs {package}: pip install 'jaxforge[data]' ({error})"
        ) from error
