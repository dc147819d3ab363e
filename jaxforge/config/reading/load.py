"""Loading of a config from defaults, a TOML file and the command line, in this order."""

import codecs
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.job import JobConfig
from jaxforge.config.reading import kempnerforge, toml
from jaxforge.config.reading.explain import Sources
from jaxforge.config.reading.inert import inert
from jaxforge.config.reading.lines import Path as KeyPath
from jaxforge.config.reading.lines import key_lines
from jaxforge.config.reading.overrides import parse_overrides
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.errors import UserError
from jaxforge.storage import trust, urls
from jaxforge.storage.trust import Decision


def load_unresolved(
    path: str | Path | None, overrides: Sequence[str] = (), trusts: Decision = trust.own
) -> UnresolvedConfig:
    """Load a config whose durations the run resolves later.

    Args:
        path: A TOML file, or None for the defaults.
        overrides: Settings such as "--train.lr=3e-4"; the last setting of a key applies.
        trusts: Decides whether plugins of the file are imported. Plugins in `overrides` always are.

    Raises:
        UserError: If the file cannot be read, or a value in it or in `overrides` is invalid. The
            message has a line per problem, with its location and remedy.
    """
    text = "" if path is None else _read(urls.path(path, "--config"))
    document = toml.parse(text, str(path))
    return _unresolved(document, overrides, str(path or ""), text, trusts)


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), trusts: Decision = trust.own
) -> JobConfig:
    """Load a config and resolve its durations without devices and data.

    Args:
        path: A TOML file, or None for the defaults.
        overrides: Settings such as "--train.lr=3e-4"; the last setting of a key applies.
        trusts: Decides whether plugins of the file are imported. Plugins in `overrides` always are.

    Raises:
        UserError: As `load_unresolved`, and if a duration depends on devices or data.
    """
    return load_unresolved(path, overrides, trusts).resolve()


def load_config_of_run(path: Path, run: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Load a config of a run, for commands that use the run without training it.

    The file may be untrusted. Its plugins are imported only if the run is trusted, and settings
    with side effects are removed (`inert`).

    Args:
        path: The TOML file.
        run: The run directory.
        overrides: The user's settings, which override the file.

    Raises:
        UserError: As `load_config`.
    """
    text = _read(path)
    values = inert(toml.parse(text, str(path)), str(run))
    return _unresolved(values, overrides, str(path), text, trust.of_run(run)).resolve()


def make_config(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    source: str = "",
    trusts: Decision = trust.own,
) -> JobConfig:
    """Combine defaults, tables and settings, and validate the result.

    Args:
        values: Section -> key -> value, as a TOML file would give them.
        overrides: Settings such as "--train.lr=3e-4"; the last setting of a key applies.
        source: Source of the tables, for messages.
        trusts: Decides whether plugins of the tables are imported. Plugins in `overrides` always
            are.

    Raises:
        UserError: If a value is invalid.
    """
    return _unresolved(copy.deepcopy(values), overrides, source, "", trusts).resolve()


def _unresolved(
    values: dict[Any, Any], overrides: Sequence[str], source: str, text: str, trusts: Decision
) -> UnresolvedConfig:
    values, lines = kempnerforge.rewrite(values, key_lines(text), source)
    settings = parse_overrides(overrides)
    for setting in settings:
        _assign(values, setting.path, setting.value)
    return UnresolvedConfig(values, Sources(source, lines, settings), trusts)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(4 * toml.SIZE + 1)  # at most 4 bytes per character
        # Windows editors write a BOM and CRLF.
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise UserError(f"no config file at {path}{path_hint(path)}") from None
    except IsADirectoryError:
        raise UserError(f"no config file at {path}: it is a directory") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {_encoding_problem(error)}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _encoding_problem(error: UnicodeDecodeError) -> str:
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is UTF-16; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
    return f"not UTF-8 at byte {error.start}"


def _assign(values: dict[Any, Any], path: KeyPath, value: object) -> None:
    """Set the value at `path`, creating the tables above it."""
    *tables, name = path
    for table in tables:
        if not isinstance(values.get(table), dict):
            values[table] = {}
        values = values[table]
    values[name] = value
