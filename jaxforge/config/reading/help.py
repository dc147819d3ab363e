"""`--help` of sections and keys, with type, default and description, from the schema."""

from collections.abc import Iterator
from io import StringIO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxforge.config.facts import Needs, facts
from jaxforge.config.job import JobConfig, toml
from jaxforge.config.reading.explain import VISION_SECTIONS, suggestion
from jaxforge.config.reading.schema import (
    Node,
    all_keys,
    expected,
    has_keys,
    short_type,
)
from jaxforge.errors import UserError

_ALL = "all"


def contents() -> str:
    """Return a line per section, and the usage of `--help`."""
    sections = {name: field.description for name, field in JobConfig.model_fields.items()}
    width = max(map(len, sections))
    rows = [f"  {name:{width}}  {about}" for name, about in sections.items()]
    more = "--help SECTION lists its keys, --help KEY explains a key, --help all lists all keys"
    return "\n".join(("sections of the config:", *rows, "", more))


def topic(name: str) -> Group:
    """Return the help of a section, of a key, of all keys with a name, or with "all" of everything.

    Args:
        name: such as "optimizer", "optimizer.lr" or "lr".

    Raises:
        UserError: no section or key has this name.
    """
    name = name.strip("-[]")
    if name == _ALL:
        return Group(*_tables().values())
    if name in (tables := _tables()):
        return Group(*(table for key, table in tables.items() if f"{key}.".startswith(f"{name}.")))
    if name.partition(".")[0] in VISION_SECTIONS:
        raise UserError(f"--help {name}: jaxforge trains text models only")
    keys = all_keys()
    matching = [key for key in keys if name in (key, key.rpartition(".")[2])]
    if not matching:
        hint = suggestion(tuple(name.split(".")))
        raise UserError(f"--help {name}: no such section or key{hint}")
    return Group(*(_about(key, keys[key]) for key in matching))


def help_text(width: int = 100) -> str:
    """Return the reference of all keys as plain text.

    Args:
        width: Text width in columns.
    """
    console = Console(file=StringIO(), width=width, color_system=None)
    with console.capture() as text:
        console.print(topic(_ALL))
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def _about(key: str, node: Node) -> Text:
    """Return the help of a key: description, accepted values, default and usage."""
    table, _, name = key.rpartition(".")
    default = node.get("default")
    value = toml(default) if default is not None and not has_keys(node) else "..."
    lines = [("  ", node["description"]), ("  expected: ", expected(node))]
    lines += [("  default: ", value if default is not None else "not set")]
    lines += [("  needs: ", x.describe(key)) for name, x in facts(JobConfig, Needs) if name == key]
    lines += [("  in the config: ", f"[{table}] {name} = {value}")]
    lines += [("  command line: ", f"--{key}={value}")]
    return Text.assemble((key, "bold"), *(f"\n{label}{text}" for label, text in lines), "\n")


def _tables() -> dict[str, Table]:
    """Return a table of keys for each section, and for each table in it."""
    tables: dict[str, Table] = {}
    for key, node in all_keys().items():
        table, _, name = key.rpartition(".")
        if table:
            tables[table].add_row(*_row(name, node))
        if has_keys(node):
            header = f"[[{key}]]" if node["type"] == "array" else f"[{key}]"
            tables[key] = _table(f"{header}  {node['description']}")
    return tables


def _table(title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(max_width=34, overflow="fold")
    table.add_column(max_width=22, style="cyan", overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    return table


def _row(name: str, node: Node) -> Iterator[Text]:
    default = node.get("default")
    is_set = not (default is None or has_keys(node))
    yield Text.assemble((name, "bold"), f" = {toml(default)}" if is_set else "")
    yield Text(short_type(node))
    yield Text(node["description"])
