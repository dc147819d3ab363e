"""Detection of typing errors in command lines: dashes, quotation marks, spaces, missing hyphens.

Editors and chat programs replace `--` by a dash, and quotation marks by typographic ones. Settings
of Hydra have no hyphens, and TOML allows spaces around `=`.
"""

import re
from collections.abc import Callable, Sequence

_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_QUOTES = "\u2018\u2019\u201a\u201c\u201d\u201e"
_DASHED = re.compile(rf"-?[{_DASHES}]+-?(?P<rest>[a-zA-Z].*)|-(?P<letters>[a-zA-Z].+)", re.DOTALL)
_QUOTED = re.compile(rf"(--[\w.-]+=)?[{_QUOTES}]\S*|\S*[{_QUOTES}]")
_SETTING = re.compile(r"[a-zA-Z_]\w*(\.\w+)+=.+", re.DOTALL)


def slip(
    argv: Sequence[str],
    is_option: Callable[[str], bool],
    takes_value: Callable[[str], bool],
    takes_settings: bool,
) -> str:
    """Return a message about the typing error in a refused command line, or "".

    Args:
        argv: the command line.
        is_option: returns whether `--name` is an option or a key.
        takes_value: returns whether `--name` takes the next word as its value.
        takes_settings: whether the command accepts `--section.key=value`.
    """
    words = list(argv)
    for i, word in enumerate(words):
        if word == "--":
            break
        if message := dash(word, is_option) or quotes(word) or spaces(words[i:]):
            return message
        is_value = i > 0 and takes_value(words[i - 1])
        if takes_settings and not is_value and _SETTING.fullmatch(word):
            return f"unexpected argument {word}; did you mean --{word}?"
    return ""


def dash(word: str, is_option: Callable[[str], bool]) -> str:
    """Return a message about an option that begins with a dash or a single hyphen, or ""."""
    match = _DASHED.fullmatch(word)
    meant = match and f"--{match['rest'] or match['letters']}"
    if not meant or not is_option(meant.partition("=")[0]):
        return ""
    return f"{word}: an option begins with two hyphens; did you mean {meant}?"


def quotes(word: str) -> str:
    """Return a message about a word in typographic quotation marks, or ""."""
    if not _QUOTED.fullmatch(word):
        return ""
    mark = next(c for c in word if c in _QUOTES)
    return f"{word}: {mark} is not a quotation mark of the shell; use \" or ' instead"


def spaces(words: Sequence[str]) -> str:
    """Return a message about spaces around the "=" of the first word, an option, or ""."""
    name, *values = words[:3]
    if not name.startswith("--") or not values or "=" in name[:-1]:
        return ""
    parts = [name, *values] if values[0] == "=" else [name, values[0]]
    joined = "".join(parts)
    if "=" not in (name[-1], values[0][:1]) or joined.endswith("=") or parts[-1].startswith("--"):
        return ""
    return f"{' '.join(parts)}: no spaces are allowed around =; did you mean {joined}?"
