"""JSON that others wrote: bounded in bytes, depth and digits, and checked field by field.

Each limit is far beyond what a real file has. Together they keep the cost of a small file within
seconds and 300 MB; the cost of a large file is in proportion to its bytes.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeGuard

from jaxforge.errors import UserError, printable

DOCUMENT = 32 << 20  # bytes of a document
DOCUMENT_MADE = 160 << 20  # bytes of the values in a document
LINE = 16 << 20  # bytes of a line
DEPTH = 64  # of lists and objects in each other
DIGITS = 308  # of an integer: more do not fit into a float
STEPS = 2**31  # a page has steps in 32 bits
LATEST = 253_402_300_800  # Unix time of the year 10,000, the first that `datetime` does not have
_NAME = 500  # characters of a metric's name
_FIRST_OMISSIONS = 3  # lines of a file that are named one by one


def load_object(data: bytes | str, where: str) -> dict[str, Any]:
    """Read a document that is an object with keys.

    Args:
        data: UTF-8, or text.
        where: the file, for messages.

    Raises:
        UserError: it is not JSON or not an object, or its values would take far more memory than
            its bytes.
    """
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    nbytes = 72 * (text.count(b"[") + text.count(b"{")) + 40 * text.count(b",")
    if len(text) > DOCUMENT or nbytes > DOCUMENT_MADE:
        raise UserError(f"{where}: {len(text)} bytes of JSON, which is more than is read here")
    try:
        document = json.loads(text.decode("utf-8"), parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({excerpt(error)})") from error
    if not isinstance(document, dict):
        raise UserError(f"{where}: not an object with keys")
    if _is_deeper(document, DEPTH):
        raise UserError(f"{where}: lists and objects in each other, more than {DEPTH} deep")
    return document


def excerpt(text: object, most: int = 200) -> str:
    """Shorten text of a file for a message, and escape what a terminal obeys."""
    plain = printable(str(text)[: most + 1]).replace("\n", "\\n")
    return plain if len(plain) <= most else plain[:most] + "..."


def is_step(value: object) -> bool:
    """Tell whether a value is the number of a step."""
    return is_number(value) and 0 <= value < STEPS and value == int(value)


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a finite number that fits into a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 10**DIGITS


def is_text(value: object) -> bool:
    """Tell whether a value is text."""
    return isinstance(value, str)


def is_table(value: object, kind: type | UnionType) -> bool:
    """Tell whether a value is an object whose values are all of a kind."""
    return isinstance(value, dict) and all(isinstance(inner, kind) for inner in value.values())


def is_time(value: object) -> bool:
    """Tell whether a value is a time in Unix seconds, before the year 10,000."""
    return is_number(value) and 0 <= value < LATEST


class Field(NamedTuple):
    """Rule for the value that a line has under a name.

    Attributes:
        is_valid: of a value.
        kind: in words: "a step".
        required: a line without the name is damaged.
    """

    is_valid: Callable[[Any], bool]
    kind: str
    required: bool = True


class Omissions:
    """Lines that a reader left out of a file, with the reasons.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._first, self._others = path, list[str](), 0

    def add(self, line: int, reason: str, count: int = 1) -> None:
        """Count lines that were left out.

        Args:
            line: number of the first of them, from 1.
            reason: why the first was.
            count: how many.
        """
        named = int(len(self._first) < _FIRST_OMISSIONS)
        if named:
            self._first.append(f"{self._path}:{line}: {reason}; the line is left out")
        self._others += count - named

    def note(self, what: str) -> None:
        """Say once that a part of the file was left out.

        Args:
            what: the reason and the part: "step 3: ...; the loads".
        """
        message = f"{self._path}: {what} are left out"
        if message not in self._first and len(self._first) < 2 * _FIRST_OMISSIONS:
            self._first.append(message)

    def messages(self) -> list[str]:
        """Return a message for each of the first lines, and a message that counts the others."""
        others = f"{self._path}: {self._others:,} more damaged lines are left out"
        return self._first + [others] * bool(self._others)


def read_lines(path: Path, fields: Mapping[str, Field]) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the whole lines of a file of objects; a process may be writing the last one.

    Args:
        path: the file, which may not exist.
        fields: what each line has to have.

    Returns:
        The sound lines, and messages about damaged lines, which are left out.

    Raises:
        UserError: the file cannot be read.
    """
    objects, omissions = list[dict[str, Any]](), Omissions(path)
    if not path.is_file():
        return objects, []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE), b""), 1):
                if not line.endswith(b"\n"):
                    if len(line) == LINE:
                        omissions.add(number, f"more than {LINE:,} bytes, and so is all after it")
                    break
                value, problem = parse_line(line)
                problem = problem or problem_of(value, fields)
                if problem:
                    omissions.add(number, problem)
                else:
                    objects.append(value)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return objects, omissions.messages()


def parse_line(line: bytes) -> tuple[Any, str]:
    """Return the object on a line, and what is wrong with the line (empty: nothing)."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start} of the line"
    except (ValueError, RecursionError):
        return None, "not a JSON object"
    return value, "" if isinstance(value, dict) else "not a JSON object"


def parse_metrics(line: bytes) -> tuple[dict[str, Any], str]:
    """Return a line of metrics.jsonl, and what is wrong with the line (empty: nothing).

    A sound line has a step and metrics, each a number, a list, or null.
    """
    value, problem = parse_line(line)
    problem = problem or problem_of(value, _METRICS_LINE)
    if not problem:
        for name, metric in value.items():
            is_metric = metric is None or isinstance(metric, list | float) or is_number(metric)
            if not is_metric or len(name) > _NAME:
                return value, f"{excerpt(name, 60)} is not the value of a metric"
    return value, problem


def problem_of(value: Mapping[str, Any], fields: Mapping[str, Field]) -> str:
    """Return what is wrong with an object; empty where nothing is."""
    for name, field in fields.items():
        if name not in value:
            if field.required:
                return f"no {name}"
        elif not field.is_valid(value[name]):
            return f"{name} is not {field.kind}"
    return ""


_METRICS_LINE = {
    "step": Field(is_step, "the number of a step"),
    "time": Field(is_time, "a time in seconds since 1970", required=False),
}


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _is_deeper(value: Any, depth: int) -> bool:  # noqa: ANN401 (any JSON)
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
