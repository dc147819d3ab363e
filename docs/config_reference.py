"""Write docs/config_reference.md from the config schema: `python docs/config_reference.py`."""

from pathlib import Path

from jaxforge.config.job import toml
from jaxforge.config.reading.kempnerforge import NO_EFFECT, STORED_AS
from jaxforge.config.reading.schema import Node, dotted, expected, has_keys, tables

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
    lines = []
    for header, keys in tables().values():
        name, _, meaning = header.partition("  ")
        lines += [f"\n## `{name}`\n\n{_line(meaning)}\n",
                  "| key | values | default | meaning |", "|---|---|---|---|"]  # fmt: skip
        rows = {key: node for key, node in keys.items() if not has_keys(node)}
        lines += [f"| {' | '.join(_cells(key, node))} |" for key, node in rows.items()]
    stored = (f"- `{dotted(path)}`: `{_key(key)}`" for path, key in STORED_AS.items())
    ignored = (f"- `{dotted(path)}`: {answer}" for path, answer in NO_EFFECT.items())
    return "\n".join([HEAD, *lines, OTHER_FORMS, *stored, WITHOUT_EFFECT, *ignored]) + "\n"


def _key(path: tuple[str | int, ...]) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def _cells(name: str, node: Node) -> list[str]:
    default = node.get("default")
    needs = "`, `".join(node.get("needs", ()))
    meaning = node["description"] + (f" Needs `{needs}`." if needs else "")
    value = "not set" if default is None else f"`{toml(default)}`"
    return [_line(cell) for cell in (f"`{name}`", expected(node), value, meaning)]


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
