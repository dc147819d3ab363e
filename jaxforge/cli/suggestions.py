"""Suggestions for misspelt names and paths."""

import difflib
import os
from collections.abc import Iterable, Sequence
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
    # A dangling link "does not exist", and would be its own most similar name.
    if missing is None or not missing.parent.is_dir() or missing.is_symlink():
        return ""
    names = _alike(missing.name, _names(missing.parent))
    similar = [missing.parent / name / path.relative_to(missing) for name in names]
    existing = next(filter(Path.exists, similar), None)  # prefer a path that exists completely
    nearest = existing or (missing.with_name(names[0]) if names else None)
    return f"; did you mean {quote}{nearest}{quote}?" if nearest else ""


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
