"""Reader of untrusted JSON, with limits on bytes, depth and digits, and checks of each field.

Each limit is far above the size of real files. Together, the limits bound the cost of a small file
to seconds and 300 MB. The cost of a large file is proportional to its bytes.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import orjson

from jaxforge.errors import UserError, printable

if TYPE_CHECKING:
    from pydantic import ValidationError

DOCUMENT = 32 << 20  # bytes per document
DOCUMENT_MADE = 160 << 20  # bytes of the parsed values of a document
LINE = 16 << 20  # bytes per line
DEPTH = 64  # nested lists and objects
DIGITS = 308  # digits of an integer: more do not fit into a float
STEPS = 2**31  # reports store steps in 32 bits
LATEST = 253_402_300_800  # Unix time of the year 10,000, which `datetime` does not support
_NAME = 500  # characters of a metric's name
_NO_OBJECT = "not a JSON object"
_FIRST_OMISSIONS = 3  # lines of a file that are reported individually


def load_object(data: bytes | str, where: str) -> dict[str, Any]:
    """Parse a document that must be an object.

    Args:
        data: UTF-8 bytes, or text.
        where: the file, for messages.

    Raises:
        UserError: the document is not JSON, not an object, or would need far more memory than its
            size.
    """
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    # Upper bound on the bytes of CPython's objects, from the characters that create them.
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
    """Shorten text of a file for a message, and escape control characters."""
    plain = printable(str(text)[: most + 1]).replace("\n", "\\n")
    return plain if len(plain) <= most else plain[:most] + "..."


def first_problem(error: "ValidationError") -> str:
    """Return the first problem of a document as "key: problem", without the document's values."""
    first = error.errors(include_input=False, include_context=False, include_url=False)[0]
    return excerpt(": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]])))


def is_step(value: object) -> bool:
    """Return whether a value is a step number."""
    return is_number(value) and 0 <= value < STEPS and value == int(value)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number that fits into a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 10**DIGITS


def is_text(value: object) -> bool:
    """Return whether a value is text."""
    return isinstance(value, str)


def is_table(value: object, kind: type | UnionType) -> bool:
    """Return whether a value is an object whose values all have a type."""
    return isinstance(value, dict) and all(isinstance(inner, kind) for inner in value.values())


def is_time(value: object) -> bool:
    """Return whether a value is a Unix time before the year 10,000."""
    return is_number(value) and 0 <= value < LATEST


class Field(NamedTuple):
    """Rule for a field of a line.

    Attributes:
        is_valid: returns whether a value is valid.
        kind: description of valid values, such as "a step".
        required: whether a line without the field is damaged.
    """

    is_valid: Callable[[Any], bool]
    kind: str
    required: bool = True


class Omissions:
    """Lines of a file that a reader skipped, with the reasons.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._first, self._n_more = path, list[str](), 0

    def add(self, line: int, reason: str, count: int = 1) -> None:
        """Add skipped lines.

        Args:
            line: number of the first skipped line, from 1.
            reason: reason for the first line.
            count: number of lines.
        """
        named = int(len(self._first) < _FIRST_OMISSIONS)
        if named:
            self._first.append(f"{self._path}:{line}: {reason}; the line is left out")
        self._n_more += count - named

    def note(self, what: str) -> None:
        """Add a skipped part of the file, once.

        Args:
            what: reason and part, such as "step 3: ...; the loads".
        """
        message = f"{self._path}: {what} are left out"
        if message not in self._first and len(self._first) < 2 * _FIRST_OMISSIONS:
            self._first.append(message)

    def messages(self) -> list[str]:
        """Return a message for each of the first skipped lines, and a count of the others."""
        more = f"{self._path}: {self._n_more:,} more damaged lines are left out"
        return self._first + [more] * bool(self._n_more)


def read_lines(path: Path, fields: Mapping[str, Field]) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the complete lines of a file of objects; the last line may be incomplete.

    Args:
        path: the file, which may not exist.
        fields: rules for the fields of each line.

    Returns:
        The sound lines, and messages about damaged lines, which are skipped.

    Raises:
        UserError: the file cannot be read.
    """
    omissions = Omissions(path)
    return list(sound_lines(path, fields, omissions)), omissions.messages()


def sound_lines(
    path: Path, fields: Mapping[str, Field], omissions: Omissions
) -> Iterator[dict[str, Any]]:
    """Yield the sound lines of `read_lines` one at a time; add the others to `omissions`."""
    if not path.is_file():
        return
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
                    yield value
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def parse_line(line: bytes) -> tuple[Any, str]:
    """Return the object on a line, and the problem of the line or ""."""
    # A start reads all lines of a run, for which json needs several times as long as orjson.
    try:
        value = orjson.loads(line)
    except ValueError:
        return _parse_any_line(line)
    return value, "" if isinstance(value, dict) else _NO_OBJECT


def _parse_any_line(line: bytes) -> tuple[Any, str]:
    """Parse a line that orjson refuses: it is damaged, or has a NaN or a very large number."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start} of the line"
    except (ValueError, RecursionError):
        return None, _NO_OBJECT
    return value, "" if isinstance(value, dict) else _NO_OBJECT


def parse_metrics(line: bytes) -> tuple[dict[str, Any], str]:
    """Return a line of metrics.jsonl, and the problem of the line or "".

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
    """Return the problem of an object, or ""."""
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
    # Level by level and not recursively: the depth is what is being limited.
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
