"""Configs in YAML and JSON, which are refused with their settings in TOML."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from jaxforge.config.job import short_toml
from jaxforge.config.reading import yaml_file
from jaxforge.config.reading.foreign_names import advice, key_of, note_of
from jaxforge.config.reading.lines import Path as KeyPath
from jaxforge.config.reading.schema import all_keys, dotted, has_keys, nearest_keys
from jaxforge.errors import UserError

_MOST = 60  # settings in a message


def refusal(path: Path, text: str) -> UserError:
    """Return the error for a config that is not TOML, with its settings in TOML.

    Args:
        path: the file.
        text: its content.
    """
    try:
        document = yaml_file.parse(text, path)
    except UserError:
        document = None
    tables: dict[str, dict[str, str]] = {}
    unknown: list[str] = []
    settings = _settings(document, ()) if isinstance(document, Mapping) else ()
    for name, value in islice(settings, _MOST):
        table, _, key = (_known_key(name) or "").rpartition(".")
        if table:
            tables.setdefault(table, {})[key] = short_toml(_number(value))
        else:
            unknown.append(f"# {dotted(name)}{advice(name) or ' has no key of the same meaning'}")
    lines = [f"[{table}]\n{_assignments(pairs)}" for table, pairs in tables.items()]
    about = "; in TOML, its settings are:" if lines else "; see docs/configs.md"
    return UserError("\n".join((f"{path}: a config is a TOML file{about}", *lines, *unknown)))


def _assignments(pairs: Mapping[str, str]) -> str:
    return "\n".join(f"{key} = {value}" for key, value in pairs.items())


def _settings(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    """Yield the path and value of each setting that is not null."""
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from _settings(child, (*path, str(name)))
    elif value is not None:
        yield path, value


def _known_key(path: KeyPath) -> str | None:
    """Return the key of jaxforge for a setting, if it is certain."""
    keys = all_keys()
    if (key := dotted(path)) in keys or (key := key_of(path) or ""):
        return key
    name = str(path[-1]).lower()
    same = [key for key in nearest_keys(path) if key.rpartition(".")[2] == name]
    is_certain = len(same) == 1 and not has_keys(keys[same[0]]) and not note_of(path)
    return same[0] if is_certain else None


def _number(value: object) -> object:
    """Return the number of text such as "1e-4", which YAML 1.1 does not read as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
