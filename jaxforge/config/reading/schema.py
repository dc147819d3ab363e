"""JSON schema of the config, from which `--help`, messages and suggestions are derived."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

from jaxforge.cli.suggestions import ALIKE
from jaxforge.config.data import DATASETS
from jaxforge.config.eval import EVAL_FUNCTIONS
from jaxforge.config.job import JobConfig
from jaxforge.config.model import MIXERS, MODELS
from jaxforge.config.optimizer import OPTIMIZERS, SCHEDULERS
from jaxforge.config.reading.toml import Path
from jaxforge.config.section import Needs, facts
from jaxforge.config.train import LOSSES

Node = dict[str, Any]
"""The JSON schema of one value."""

REGISTRIES = (MODELS, MIXERS, LOSSES, OPTIMIZERS, SCHEDULERS, DATASETS, EVAL_FUNCTIONS)
"""Registries of the keys that accept registered names."""

_ALIKE_ELSEWHERE = 0.8
"""Similarity (`difflib`) from which a message suggests a key of another table."""

_UNION = "union"
"""Type of a value with several types, none of which has a fixed set of values."""

_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str"}
_NOUNS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a table",
}
_BOUNDS = {
    "exclusiveMinimum": "greater than",
    "minimum": "of at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}


def dotted(path: Path) -> str:
    """Return a path in dotted notation: `data.datasets[0].weight`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).lstrip(".")


def node_at(path: Path) -> Node | None:
    """Return the schema of the value at `path`, or None if the path is invalid."""
    node: Node | None = _root()
    for part in path:
        node = _child(node, part) if node else None
    return node


def without_member(path: Path) -> Path:
    """Return the path of a value without the type in a union, which pydantic appends to it."""
    values = (path[:end] for end in range(1, len(path)))
    nodes = ((value, node_at(value)) for value in values)
    return next((value for value, node in nodes if node and _is_scalar(node)), path)


def all_keys() -> dict[str, Node]:
    """Return the schema of each key, by dotted path without list indices."""
    return _all_keys(_registered())


def tables() -> dict[str, tuple[str, dict[str, Node]]]:
    """Return each table as (header with its description, schema by name), by its dotted path."""
    result: dict[str, tuple[str, dict[str, Node]]] = {}
    for key, node in all_keys().items():
        table, _, name = key.rpartition(".")
        if table:
            result[table][1][name] = node
        if has_keys(node):
            header = f"[[{key}]]" if node["type"] == "array" else f"[{key}]"
            result[key] = f"{header}  {node['description']}", {}
    return result


def keys_by_name() -> dict[str, list[str]]:
    """Return the dotted paths of keys by the name after the last dot."""
    by_name: dict[str, list[str]] = {}
    for key in all_keys():
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    return by_name


def nearest_keys(path: Path) -> list[str]:
    """Return the same key in other tables, else the most similar one; [] if none is similar."""
    name = str(path[-1]).lower()
    parts = [part.lower() for part in path if isinstance(part, str)]
    by_name, keys = keys_by_name(), all_keys()
    for start in range(len(parts) - 1):  # TRAIN.EARLY_STOP.METRIC is early_stop.metric
        if (key := ".".join(parts[start:])) in keys:
            return [key]
    if name in by_name:
        near = get_close_matches(parts[0], JobConfig.model_fields, n=1, cutoff=ALIKE)
        same = [key for key in by_name[name] if key in (f"{table}.{name}" for table in near)]
        return same or by_name[name]
    table = "".join(f"{part}." for part in parts[:-1])
    siblings = [sibling for sibling, keys in by_name.items() if table + sibling in keys]
    if near := get_close_matches(name, siblings, n=1, cutoff=ALIKE):
        return [table + near[0]]
    near = get_close_matches(name, by_name, n=1, cutoff=_ALIKE_ELSEWHERE)
    return [key for alike in near for key in by_name[alike]]


def is_misspelt_table(path: Path, names: Iterable[object]) -> bool:
    """Return whether an unknown table is named almost like a table that has some of its keys."""
    near = get_close_matches(str(path[-1]), JobConfig.model_fields, n=1, cutoff=_ALIKE_ELSEWHERE)
    return any(f"{table}.{name}" in all_keys() for table in near for name in names)


def alternatives(node: Node) -> list[str]:
    """Return the accepted values of a key with a fixed set of values."""
    return node.get("enum") or ([node["const"]] if "const" in node else [])


def is_table(node: Node) -> bool:
    """Return whether a value is a table with known keys."""
    return "properties" in node


def has_keys(node: Node) -> bool:
    """Return whether a value is a table with known keys, or a list of such tables."""
    return is_table(_plain(node.get("items", node)))


def short_type(node: Node) -> str:
    """Return the short name of a type: `int`, `none | full`, `[float, float]`, `[table]`."""
    if alternatives(node):
        return " | ".join(alternatives(node))
    if node["type"] == "array":
        items = node.get("prefixItems") or [node["items"]]
        return "[" + ", ".join(short_type(_plain(item)) for item in items) + "]"
    return _TYPES.get(node["type"], "table") + (" | duration" if node.get("duration") else "")


def expected(node: Node) -> str:
    """Return the text after "expected": `an integer greater than 0`."""
    if alternatives(node):
        family = f", or {node['family']}<name>" if "family" in node else ""
        return "one of " + ", ".join(alternatives(node)) + family
    if node["type"] == _UNION:
        *types, last = map(expected, node[_UNION])
        return f"{', '.join(types)} or {last}"
    if node["type"] == "array":
        count = len(node.get("prefixItems", ()))
        return f"a list of {count} values" if count else "a list"
    if is_table(node):
        names = list(node["properties"])
        return f"a table of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    bounds = [
        f"{words} {_number(node[bound])}" for bound, words in _BOUNDS.items() if bound in node
    ]
    text = " ".join([_NOUNS[node["type"]], " and ".join(bounds)]).strip()
    return f'{text}, or a duration like "10%", "2ep", "1B tok"' if node.get("duration") else text


def expected_of(node: Node) -> str:
    """Return the text after "expected" for the schema of a value outside the config."""
    return expected(_plain(node))


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _registered() -> tuple[tuple[str, ...], ...]:
    """Return the registered names, on which the schema depends."""
    return tuple(registry.names() for registry in REGISTRIES)


def _root() -> Node:
    return _schema(_registered())


@cache
def _schema(registered: tuple[tuple[str, ...], ...]) -> Node:
    return JobConfig.model_json_schema()


@cache
def _all_keys(registered: tuple[tuple[str, ...], ...]) -> dict[str, Node]:
    keys = dict(_walk(_schema(registered), ""))
    for key, needs in facts(JobConfig, Needs):
        keys[key].setdefault("needs", []).append(needs.describe(key))
    return keys


def _plain(node: Node) -> Node:
    """Resolve references, join unions, and drop the "or null" of optional keys."""
    # Optional keys are "X or null" in the schema; TOML has no null.
    options = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
    value = options[0] if options else node
    # A union of fixed values is one choice; "float32 | 8bit" lists all of them.
    if len(options) > 1:
        names = [name for option in options for name in alternatives(option)]
        value = {"type": "string", "enum": names} if names else {"type": _UNION, _UNION: options}
    if "$ref" in value:
        value = _root()["$defs"][value["$ref"].rsplit("/", 1)[-1]]
    return {**value, **{key: node[key] for key in ("description", "default") if key in node}}


def _is_scalar(node: Node) -> bool:
    return node["type"] not in ("array", "object")


def _child(node: Node, part: str | int) -> Node | None:
    if isinstance(part, int):
        child = dict(enumerate(node.get("prefixItems", ()))).get(part) or node.get("items")
    else:
        child = node.get("properties", {}).get(part) or node.get("additionalProperties")
    return _plain(child) if child else None


def _walk(node: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    for name, child in node.get("properties", {}).items():
        value = _plain(child)
        yield prefix + name, value
        yield from _walk(_plain(value.get("items", value)), f"{prefix}{name}.")
