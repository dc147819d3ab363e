"""Pages of the documentation and their command lines."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from jaxforge.commands import COMMANDS

ROOT = Path(__file__).parents[1]


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


LAUNCHERS = {"srun", "$"}


def commands():
    """(page, line) of what stands in fences without a language; long lines are one."""
    for page in PAGES:
        for language, text in FENCE.findall(page.read_text()):
            for line in text.replace("\\\n", " ").splitlines() if not language else ():
                if re.match(r"(\$ )?(srun )?(python|jaxforge|make|pip) ", line):
                    yield pytest.param(line, id=f"{page.stem}: {line[:60]}")


def words_of(line):
    """Return the first words of forms such as `[--tokenizer byte|bpe] [--workers N]`."""
    words = shlex.split(line, comments=True)
    words = [word.replace("...", "").strip("[]") for word in words]
    words = [word.partition("|")[0] for word in words if word and word not in LAUNCHERS]
    return ["1" if word == "N" else word for word in words]


def parser_of(command) -> argparse.ArgumentParser:
    return importlib.import_module(COMMANDS[command].module).parser()
