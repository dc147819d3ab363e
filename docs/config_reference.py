"""Write docs/config_reference.md from the config schema: `python docs/config_reference.py`."""

from pathlib import Path

from jaxforge.config.facts import Needs, facts
from jaxforge.config.job import JobConfig, toml
from jaxforge.config.reading.kempnerforge import NO_EFFECT, STORED_AS
from jaxforge.config.reading.schema import Node, all_keys, dotted, expected, has_keys

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Config reference

All sections and keys of a config with their defaults. The page is generated from the schema
(`python docs/config_reference.py`); `jaxforge train --help KEY` prints the same in a terminal. Keys
are set in a TOML file, or on the command line as `--section.key=value`. [configs.md](configs.md) is
the guide.
"""

OTHER_FORMS = """
## Other forms that are read

KempnerForge's keys and those of older runs, each with the key as which it is stored.
"""
WITHOUT_EFFECT = """
## Keys without effect

Keys of KempnerForge that a file may have, and what does their job here.
"""


def reference() -> str:
    """Return the page as Markdown: a heading and a table for each section of the config."""
    tables: dict[str, list[str]] = {}
    for key, node in all_keys().items():
        table, _, name = key.rpartition(".")
        if table and not has_keys(node):
            tables[table].append(f"| {' | '.join(_cells(key, name, node))} |")
        if has_keys(node):
            header = f"[[{key}]]" if node["type"] == "array" else f"[{key}]"
            tables[key] = [f"\n## `{header}`\n\n{_line(node['description'])}\n",
                           "| key | values | default | meaning |", "|---|---|---|---|"]  # fmt: skip
    lines = [line for lines in tables.values() for line in lines]
    stored = (f"- `{dotted(path)}`: `{_key(key)}`" for path, key in STORED_AS.items())
    ignored = (f"- `{dotted(path)}`: {answer}" for path, answer in NO_EFFECT.items())
    return "\n".join([HEAD, *lines, OTHER_FORMS, *stored, WITHOUT_EFFECT, *ignored]) + "\n"


def _key(path: tuple[str | int, ...]) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def _cells(key: str, name: str, node: Node) -> list[str]:
    default = node.get("default")
    needs = [each.describe(key) for name, each in facts(JobConfig, Needs) if name == key]
    meaning = node["description"] + (f" Needs `{'`, `'.join(needs)}`." if needs else "")
    value = "not set" if default is None else f"`{toml(default)}`"
    return [_line(cell) for cell in (f"`{name}`", expected(node), value, meaning)]


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
