"""Functions of users between reading and tokenizing (`prepare --map`).

record ─► map 1 ─► map 2 ─► … ─► document
             └─ None: the record is dropped

A map takes a record, a dict with the text field, and returns a record or None. Maps run in the
process that reads, in the order of the command line. A map must depend on its record only, because
a resumed run calls it again for records that it has read before.
"""

import copy
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxforge.cli.suggestions import hint
from jaxforge.data.corpus.records import (
    CHANGED,
    DROPPED,
    UNCHANGED,
    Content,
    Outcomes,
    TextField,
)
from jaxforge.errors import UserError, reason_and_line

MapRecord = dict[str, Any]
"""A record as maps receive it: its fields, among them the text field."""


@dataclass(frozen=True)
class Map:
    """A function named on the command line, imported by the process that uses it.

    Attributes:
        spec: `module:function` or `path/to/file.py:function`.
    """

    spec: str

    @property
    def function(self) -> Callable[[MapRecord], Any]:
        """The function.

        Raises:
            UserError: it cannot be imported.
        """
        return _function(self.spec)

    @property
    def rule(self) -> str:
        """Name of the function in counts: its attribute `rule`, or its name."""
        function = self.function
        name = getattr(function, "rule", None) or getattr(function, "__name__", None)
        return str(name or type(function).__name__)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the source of the module, and of that which defines the function."""
        # The named module may import the function: a change of either source counts.
        named = _module(self.spec.rpartition(":")[0])
        defining = inspect.getmodule(self.function) or named
        sources = "".join(map(_source, dict.fromkeys((named, defining))))
        return hashlib.sha256(sources.encode()).hexdigest()

    def call(self, record: MapRecord, where: str) -> Any:  # noqa: ANN401  # of a user's function
        """Return the function's result.

        Raises:
            UserError: the function raises.
        """
        try:
            return self.function(record)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{where}: --map {self.spec} raised {reason_and_line(error)}; correct the "
                "function, or let it return None for records to drop"
            ) from error


def load_maps(specs: Sequence[str]) -> tuple[Map, ...]:
    """Return the maps of a command line.

    Raises:
        UserError: a function cannot be imported, or two have the same name in counts.
    """
    maps = tuple(map(Map, specs))
    # The manifest counts by name, which two maps must not share.
    rules = [each.rule for each in maps]
    for each in maps:
        if rules.count(each.rule) > 1:
            raise UserError(
                f'--map {each.spec}: another --map counts as "{each.rule}", too; give one of the '
                "functions an attribute rule with another name"
            )
    return maps


@dataclass(frozen=True)
class Mapped(Content):
    """Content of records after maps.

    Attributes:
        content: selects the document of a mapped record.
        maps: the functions, in order.
    """

    has_maps = True

    content: Content
    maps: tuple[Map, ...]

    @property
    def identity(self) -> tuple[str, ...]:
        """Strings of the content, and each function's name and source."""
        functions = ((each.spec, each.fingerprint) for each in self.maps)
        return (*self.content.identity, *(text for pair in functions for text in pair))

    def columns(self, there: Sequence[str] | None, where: str) -> list[str]:
        """Return all columns: a map may read any of them."""
        # Only for its error: a missing text column is reported before a map runs.
        self.content.columns(there, where)
        return list(there or [])

    @property
    def text_field(self) -> str:
        """The field of the content."""
        return self.content.text_field

    def source(self, record: Mapping[str, Any]) -> str:
        """Return the name of the record's source."""
        return self.content.source(record)

    def document(self, record: Mapping[str, Any]) -> str:
        """Return the document of a mapped record."""
        return self.content.document(record)

    def apply(
        self, record: Mapping[str, Any], where: str
    ) -> tuple[Mapping[str, Any] | None, Outcomes]:
        """Return the mapped record, or None if it was dropped, and the outcome of each map."""
        if isinstance(self.content, TextField):
            self.content.document(record)  # so that no map meets a record without text
        outcomes: list[int] = []
        for each in self.maps:
            record, outcome = _mapped(each, record, where)
            outcomes.append(outcome)
            if outcome == DROPPED:
                return None, tuple(outcomes)
        return record, tuple(outcomes)


def _mapped(each: Map, record: Mapping[str, Any], where: str) -> tuple[MapRecord, int]:
    """Return the result of a map, and whether it dropped, changed or left the record."""
    # A map may change the record, or a list in it, in place and return the same object.
    before = _snapshot(record)
    # A plain dict also for a row of a table, and never the object of the reader.
    result = each.call(dict(record), where)
    if result is None:
        return {}, DROPPED
    if not isinstance(result, dict):
        raise UserError(
            f"{where}: --map {each.spec} returned {result!r:.60}; it must return the record (a "
            "dict), or None to drop it"
        )
    return result, UNCHANGED if result == before else CHANGED


def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # compiled
        return f"{module.__name__} {getattr(module, '__version__', '')}"


def _snapshot(record: Mapping[str, Any]) -> MapRecord:
    """Copy a record, and the values that a map can change in place."""
    return {
        key: copy.deepcopy(value) if isinstance(value, list | dict) else value
        for key, value in record.items()
    }


@functools.cache
def _function(spec: str) -> Callable[[MapRecord], Any]:
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise UserError(
            f"--map {spec}: expected MODULE:FUNCTION or FILE.py:FUNCTION, such as "
            "my_rules.py:keep_english"
        )
    module = _module(location)
    function = getattr(module, name, None)
    if not callable(function):
        names = [other for other, value in vars(module).items() if inspect.isfunction(value)]
        functions = f"; it has {', '.join(names)}" if names else ""
        raise UserError(
            f"--map {spec}: {location} has no function {name}{hint(name, names) or functions}"
        )
    return function


@functools.cache
def _module(location: str) -> ModuleType:
    try:
        if not location.endswith(".py"):
            return importlib.import_module(location)
        path = Path(location)
        if not path.is_file():
            raise UserError(f"--map {location}: no such file")
        # Files of the same name in two directories need two entries of `sys.modules`.
        name = f"jaxforge_map_{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    except UserError:
        raise
    except ModuleNotFoundError as error:
        # Otherwise the named module exists, and a module that it imports does not.
        if f"{location}.".startswith(f"{error.name}."):
            raise UserError(
                f'--map {location}: module "{location}" does not exist; name its file '
                "(path/to/file.py:function), or put its directory into PYTHONPATH"
            ) from error
        raise UserError(f"--map {location}: {error}; install it with pip") from error
    except Exception as error:
        raise UserError(f"--map {location} cannot be imported: {reason_and_line(error)}") from error
