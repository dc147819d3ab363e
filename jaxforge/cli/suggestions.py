"""Suggestions for misspelt names and paths, and for typing errors in command lines.

Editors and chat programs replace `--` by a dash, and quotation marks by typographic ones. Settings
of Hydra have no hyphens, and TOML allows spaces around `=`.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jaxforge.errors import shortened

_LONGEST_NAME = 200  # characters
ALIKE = 0.66
"""Similarity (`difflib`) from which a message suggests one of many options or keys."""

_MANY = 10_000  # largest number of names read from a directory


def hint(name: str, names: Iterable[str], quote: str = '"') -> str:
    """Return `; did you mean "cosine"?` if one of the names is similar, else "".

    Args:
        name: the unknown name.
        names: the valid names.
        quote: quotation mark around the suggestion.
    """
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {quote}{near[0]}{quote}?" if near else ""


def choices(name: str, names: Sequence[str]) -> str:
    """Return a suggestion with all names: `; did you mean "web"? Choose from web, code`."""
    near = hint(name, names)
    return f"{f'{near} Choose' if near else '; choose'} from {', '.join(names)}"


def listed(names: Iterable[object], most: int = 30) -> str:
    """Return the first names of a file in words: `a, b and 7 more`; "nothing" without names.

    Args:
        names: the names.
        most: number of names that are listed.
    """
    every = list(names)
    shown = ", ".join(shortened(str(name), _LONGEST_NAME) for name in every[:most])
    more = len(every) - most
    return f"{shown} and {more:,} more" if more > 0 else shown or "nothing"


def path_hint(path: str | Path, quote: str = "") -> str:
    """Return a suggestion for a local path: existing names similar to the first missing part.

    Args:
        path: file or directory that does not exist.
        quote: quotation mark around the suggestion.
    """
    if "://" in str(path):  # in a bucket
        return ""
    path = Path(path)
    missing = next(
        (parent for parent in reversed((path, *path.parents)) if not parent.exists()), None
    )
    if missing is None or not missing.parent.is_dir():
        return ""
    if missing.is_symlink():  # to nothing, or to itself
        return ""
    names = _alike(missing.name, _names(missing.parent))
    similar = [missing.parent / name / path.relative_to(missing) for name in names]
    existing = next(filter(Path.exists, similar), None)  # prefer a path that exists completely
    nearest = existing or (missing.with_name(names[0]) if names else None)
    if not nearest:
        return ""
    is_blank = "".join(str(nearest).split()) == "".join(str(path).split())
    end = ", without a blank?" if is_blank else "?"
    return f"; did you mean {quote}{nearest}{quote}{end}"


def _alike(name: str, names: Iterable[str]) -> list[str]:
    """Return similar names, nearest first, compared without suffixes."""
    by_stem: dict[str, list[str]] = {}
    for known in names:
        by_stem.setdefault(Path(known).stem, []).append(known)
    stems = difflib.get_close_matches(Path(name).stem, by_stem, n=5)
    return [known for stem in stems for known in sorted(by_stem[stem])]


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for _, entry in zip(range(_MANY), entries, strict=False)]
    except OSError:  # unreadable directories give no suggestions
        return []


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
