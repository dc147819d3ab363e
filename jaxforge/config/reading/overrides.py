"""Settings on the command line: `--section.key=value`."""

import ast
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxforge.config.reading.kempnerforge import STORED_AS, rewrite_path
from jaxforge.config.reading.schema import Node, Path, expected, is_table, node_at
from jaxforge.errors import UserError


class Setting(NamedTuple):
    """A setting on the command line."""

    flag: str
    """Argument as typed."""
    path: Path
    """Path of the key."""
    value: Any
    """New value, not yet validated."""


def parse_overrides(arguments: Sequence[str]) -> list[Setting]:
    """Parse command-line settings in their order.

    A value is a Python literal, a TOML table or array, or else text. `--section.flag` alone means
    true. A table value sets only the keys that it contains; an empty table means its defaults.

    Args:
        arguments: Such as "--train.lr=3e-4", "--data.datasets=[{'path': 'a'}]".

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
    path = rewrite_path(tuple(key.split(".")))
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
