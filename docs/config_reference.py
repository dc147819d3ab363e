"""Write docs/config_reference.md from the config schema: `python docs/config_reference.py`."""

from pathlib import Path

from jaxforge.config.facts import Needs, facts
from jaxforge.config.job import JobConfig, toml
from jaxforge.config.reading.schema import Node, all_keys, expected, has_keys
from jaxforge.config.torch_only import TORCH_ONLY

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Config reference

All sections and keys of a config with their defaults. The page is generated from the schema
(`python docs/config_reference.py`); `jaxforge train --help KEY` prints the same in a terminal. Keys
are set in a TOML file, or on the command line as `--section.key=value`. [configs.md](configs.md) is
the guide.
"""


def reference() -> str:
    """Return the page as Markdown: a heading and a table for each section of the config."""
    tables: dict[str, list[str]] = {}
    for key, node in all_keys().items():
        table, _, name = key.rpartition(".")
        if table:
            tables[table].append(f"| {' | '.join(_cells(key, name, node))} |")
        if has_keys(node):
            header = f"[[{key}]]" if node["type"] == "array" else f"[{key}]"
            tables[key] = [f"\n## `{header}`\n\n{_line(node['description'])}\n",
                           "| key | values | default | meaning |", "|---|---|---|---|"]  # fmt: skip
    return "\n".join([HEAD, *(line for lines in tables.values() for line in lines)]) + "\n"


def _cells(key: str, name: str, node: Node) -> list[str]:
    default = node.get("default")
    needs = [each.describe(key) for name, each in facts(JobConfig, Needs) if name == key]
    meaning = node["description"] + (f" Needs `{'`, `'.join(needs)}`." if needs else "")
    meaning += f" No effect: {TORCH_ONLY[key]}." if key in TORCH_ONLY else ""
    value = "not set" if default is None else "a table" if has_keys(node) else f"`{toml(default)}`"
    return [_line(cell) for cell in (f"`{name}`", expected(node), value, meaning)]


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
