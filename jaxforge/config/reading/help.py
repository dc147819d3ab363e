"""`--help` of sections and keys, with type, default and description, from the schema."""

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxforge.config.job import JobConfig, toml
from jaxforge.config.reading.explain import VISION_SECTIONS, suggestion
from jaxforge.config.reading.schema import (
    Node,
    all_keys,
    expected,
    has_keys,
    short_type,
    tables,
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

    Raises:
        UserError: no section or key has this name.
    """
    name = name.strip("-[]")
    # A section is shown with its tables, such as optimizer with optimizer.muon.
    shown = [key for key in tables() if name == _ALL or f"{key}.".startswith(f"{name}.")]
    if name == _ALL or name in shown:
        return Group(*(_table(*tables()[key]) for key in shown))
    if name.partition(".")[0] in VISION_SECTIONS:
        raise UserError(f"--help {name}: jaxforge trains text models only")
    keys = all_keys()
    matching = [key for key in keys if name in (key, key.rpartition(".")[2])]
    if not matching:
        hint = suggestion(tuple(name.split(".")))
        raise UserError(f"--help {name}: no such section or key{hint}")
    return Group(*(_about(key, keys[key]) for key in matching))


def _about(key: str, node: Node) -> Text:
    """Return the help of a key: description, accepted values, default and usage."""
    table, _, name = key.rpartition(".")
    default = node.get("default")
    value = toml(default) if default is not None and not has_keys(node) else "..."
    lines = [("  ", node["description"]), ("  expected: ", expected(node))]
    lines += [("  default: ", value if default is not None else "not set")]
    lines += [("  needs: ", needs) for needs in node.get("needs", ())]
    lines += [("  in the config: ", f"[{table}] {name} = {value}")]
    lines += [("  command line: ", f"--{key}={value}")]
    return Text.assemble((key, "bold"), *(f"\n{label}{text}" for label, text in lines), "\n")


def _table(title: str, keys: Mapping[str, Node]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(max_width=34, overflow="fold")
    table.add_column(max_width=22, style="cyan", overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for name, node in keys.items():
        table.add_row(*_row(name, node))
    return table


def _row(name: str, node: Node) -> Iterator[Text]:
    default = node.get("default")
    is_set = not (default is None or has_keys(node))
    yield Text.assemble((name, "bold"), f" = {toml(default)}" if is_set else "")
    yield Text(short_type(node))
    yield Text(node["description"])
