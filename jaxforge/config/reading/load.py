"""Loading of a config from defaults, a TOML file and the command line, in this order."""

import ast
import copy
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.config.reading import forms, kempnerforge, toml
from jaxforge.config.reading.explain import Setting, Sources
from jaxforge.config.reading.kempnerforge import STORED_AS, renamed, without_retired_defaults
from jaxforge.config.reading.schema import Node, expected, is_table, node_at
from jaxforge.config.reading.toml import Path as KeyPath
from jaxforge.config.reading.toml import key_lines, read_text
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.section import Flag, flagged
from jaxforge.errors import UserError
from jaxforge.storage import trust, urls
from jaxforge.storage.trust import Decision


def load_unresolved(
    path: str | Path | None, overrides: Sequence[str] = (), trusts: Decision = trust.always
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
    file = None if path is None else urls.path(path, "--config")
    text = "" if file is None else read_text(file)
    if file is not None and file.suffix.lower() in (".yaml", ".yml", ".json"):
        from jaxforge.config.reading.other_formats import refusal  # few need YAML

        raise refusal(file, text)
    document = toml.parse(text, str(path))
    return _unresolved(document, overrides, str(path or ""), text, trusts)


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), trusts: Decision = trust.always
) -> JobConfig:
    """Load a config as `load_unresolved`, and resolve its durations without devices and data.

    Raises:
        UserError: As `load_unresolved`, and if a duration depends on devices or data.
    """
    return load_unresolved(path, overrides, trusts).resolve()


def load_config_of_run(path: Path, run: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Load a config of a run, for commands that use the run without training it.

    The file may be untrusted: its author decides the computation, but never which files are written
    or which compiled code is loaded (`Flag.SIDE_EFFECT`). Plugins are imported only if the run is
    trusted.

    Raises:
        UserError: As `load_config`.
    """
    text = read_text(path)
    # Before validation: already reading a path of a stranger's config would be an effect.
    values = _without_side_effects(toml.parse(text, str(path)))
    if isinstance(checkpoint := values.get("checkpoint", {}), Mapping):
        values["checkpoint"] = {**checkpoint, "dir": str(run)}
    return _unresolved(values, overrides, str(path), text, trust.of_run(run)).resolve()


def make_config(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    source: str = "",
    trusts: Decision = trust.always,
) -> JobConfig:
    """Combine defaults, tables and settings, and validate the result.

    Raises:
        UserError: If a value is invalid.
    """
    return _unresolved(copy.deepcopy(values), overrides, source, "", trusts).resolve()


def _without_side_effects(values: Mapping[str, Any]) -> dict[str, Any]:
    removed = {*flagged(JobConfig, Flag.SIDE_EFFECT), "data.mixture_file"}

    def is_kept(section: str, key: str) -> bool:
        stored = kempnerforge.STORED_AS.get((section, key), (section, key))
        return not {f"{section}.{key}", ".".join(map(str, stored[:2]))} & removed

    return {
        section: {key: value for key, value in table.items() if is_kept(section, key)}
        if isinstance(table, Mapping) else table
        for section, table in values.items()
    }  # fmt: skip


def _unresolved(
    values: dict[Any, Any], overrides: Sequence[str], source: str, text: str, trusts: Decision
) -> UnresolvedConfig:
    values, lines = kempnerforge.rewrite(without_retired_defaults(values), key_lines(text), source)
    settings = parse_overrides(overrides)
    # Settings come before rewriting, so that both forms of a key can be on the command line.
    for setting in settings:
        _assign(values, setting.path, setting.value)
    notes = kempnerforge.drop_ineffective(values)
    reading = forms.Reading(values, Sources(source, lines, settings))
    forms.rewrite(reading)
    return UnresolvedConfig(values, reading.sources, trusts, notes)


def _assign(values: dict[Any, Any], path: KeyPath, value: object) -> None:
    """Set the value at `path`, creating the tables above it."""
    *tables, name = path
    for table in tables:
        if not isinstance(values.get(table), dict):
            values[table] = {}
        values = values[table]
    values[name] = value


def parse_overrides(arguments: Sequence[str]) -> list[Setting]:
    """Parse command-line settings in their order.

    A value is a Python literal, a TOML table or array, or else text. `--section.flag` alone means
    true. A table value sets only the keys that it contains; an empty table means its defaults.

    Raises:
        UserError: If arguments are not settings; the message lists all of them.
    """
    problems: list[str] = []
    settings: list[Setting] = []
    for argument in arguments:
        try:
            settings += _leaves(_parse(argument))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return settings


def _parse(argument: str) -> Setting:
    if not argument.startswith("--"):
        raise UserError(f"{argument}: expected --section.key=value")
    key, equals, text = argument[2:].partition("=")
    path = renamed(tuple(key.split(".")))
    # A form that is only read has no schema: the stored key tells whether its value is text.
    stored = node_at(STORED_AS[path]) if path in STORED_AS else None
    is_text = stored is not None and stored["type"] == "string"
    node = node_at(path) or (stored if stored and is_text else {})
    if equals:
        return Setting(argument, path, _value(text, node))
    if node.get("type", "boolean") != "boolean":
        raise UserError(f"{argument} needs a value: {expected(node)}")
    return Setting(argument, path, True)


def _value(text: str, node: Node) -> object:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = _toml(text) if text.lstrip().startswith(("[", "{")) else text
    # The name 1e3 must not become 1000.0.
    is_text = node.get("type") == "string" and not isinstance(value, str | None)
    return text if is_text else value


def _toml(text: str) -> object:
    """Parse a TOML table or array; return other text unchanged."""
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except (ValueError, RecursionError):  # also for more than one value
        return text
    return value


def _leaves(setting: Setting) -> Iterator[Setting]:
    """Split a table value into its keys, so that other keys keep their values."""
    node = node_at(setting.path)
    if not (node and is_table(node) and setting.value and isinstance(setting.value, dict)):
        yield setting
        return
    for name, value in setting.value.items():
        yield from _leaves(Setting(setting.flag, (*setting.path, name), value))
