"""Import of optional libraries (the extra `data`)."""

from importlib import import_module
from types import ModuleType

from jaxforge.errors import UserError


def library(name: str, purpose: str, extra: str = "data") -> ModuleType:
    """Import an optional library.

    Args:
        name: module name, such as "pyarrow.parquet".
        purpose: use of the library in the error message, such as "reading Parquet".
        extra: the extra of jaxforge that has the library.

    Raises:
        UserError: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(
            f"{purpose} needs {package}: pip install 'jaxforge[{extra}]' ({error})"
        ) from error
