"""Configs in YAML and JSON, which are refused with their settings in TOML."""

from collections.abc import Hashable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from jaxforge.config.job import short_toml
from jaxforge.config.reading import toml
from jaxforge.config.reading.foreign_names import advice, key_of, note_of
from jaxforge.config.reading.schema import all_keys, dotted, has_keys, nearest_keys
from jaxforge.config.reading.toml import Path as KeyPath
from jaxforge.errors import UserError

_MOST = 60  # settings in a message


def refusal(path: Path, text: str) -> UserError:
    """Return the error for a config that is not TOML, with its settings in TOML."""
    try:
        document = parse_yaml(text, path)
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


class _Loader(yaml.SafeLoader):
    """Loader of plain YAML: no anchors, which multiply, and no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401
        if self.check_event(yaml.AliasEvent):
            problem = "anchors and aliases are not supported"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        for number, name in enumerate(names):
            if name in names[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.MarkedYAMLError(problem=f"{name} occurs twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, path: Path) -> Any:  # noqa: ANN401 (validated by the caller)
    """Parse a document.

    Raises:
        UserError: the document is not valid YAML, or exceeds a limit.
    """
    if len(text) > toml.SIZE:
        raise UserError(f"{path}: {len(text):,} characters; a config has at most {toml.SIZE:,}")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {str(error) or 'nested too deep'}") from None
