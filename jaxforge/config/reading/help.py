"""`--help`: every key with its type, default and meaning, from the models themselves."""

from collections.abc import Iterator
from io import StringIO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxforge.config.job import toml
from jaxforge.config.reading.schema import Node, all_keys, has_keys, short_type


def help_text(width: int = 100) -> str:
    """The reference of all keys as plain text.

    Args:
        width: Columns to lay it out in.
    """
    console = Console(file=StringIO(), width=width, color_system=None)
    with console.capture() as text:
        console.print(_reference())
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def print_help(console: Console | None = None) -> None:
    """Prints the reference of all keys.

    Args:
        console: Where to print; standard output if None.
    """
    (console or Console()).print(_reference())


def _reference() -> Group:
    tables: dict[str, Table] = {}
    for key, node in all_keys().items():
        table, _, name = key.rpartition(".")
        if table:
            tables[table].add_row(*_row(name, node))
        if has_keys(node):
            header = f"[[{key}]]" if node["type"] == "array" else f"[{key}]"
            tables[key] = _table(f"{header}  {node['description']}")
    return Group(*tables.values())


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
