"""Protection against untrusted `tokenizer.json` files.

The library `tokenizers` is written in Rust. Some files make it panic, which raises a
`BaseException` in Python and writes to standard error. Others end the process, or take unbounded
memory or time.
"""

import hashlib
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LOAD = (
    "import signal, sys, tokenizers\n"
    "signal.signal(signal.SIGPROF, signal.SIG_DFL)\n"
    "file = sys.stdin.buffer.read()\n"
    "from jaxforge.data.corpus.untrusted_tokenizer import limit_resources\n"
    "limit_resources(len(file))\n"
    "tokenizers.Tokenizer.from_buffer(file)\n"
)
_RISKS = re.compile(rb'"(?:Precompiled|Regex|Unigram)"|(?:^|[^\\])(?:\\\\)*\\u00[2-7]')
"""Parts of files that can do more harm than an error, and escapes that may spell such parts."""

_MEMORY, _MEMORY_PER_BYTE = 256 << 20, 64
_SECONDS, _SECONDS_PER_BYTE = 2.0, 2e-6
_LARGEST_SPARSE_ID = 1 << 20
_LARGEST_GROWTH, _LARGEST_ADDITION = 10, 100  # of a text: characters per character, and at its ends
_loaded: set[str] = set()  # sha256 of files that a child has loaded


def is_risky(file: bytes) -> bool:
    """Return whether a `tokenizer.json` has parts that can panic, abort or search without end."""
    return bool(_RISKS.search(file))


@contextmanager
def reraise_panics(error_type: type[ValueError], what: str, advice: str = "") -> Iterator[None]:
    """Raise whatever `tokenizers` raises, panics included, as an error of another type.

    Args:
        error_type: type of the error to raise.
        what: failed action, for the message.
        advice: advice to the user.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the bindings have no narrower type
        reason = str(error) or type(error).__name__
        raise error_type(": ".join(filter(None, [f"{what} ({reason})", advice]))) from error


def check_loads(file: bytes) -> None:
    """Load a `tokenizer.json` in a child process first, if it may end the process.

    Raises:
        ValueError: it cannot be loaded, or takes too much memory or time.
    """
    key = hashlib.sha256(file).hexdigest()
    if key in _loaded or not is_risky(file):
        return
    source = str(Path(__file__).parents[3])
    ran = subprocess.run(
        # -P: no module of the working directory replaces `tokenizers`.
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {source!r})\n{_LOAD}"],
        input=file,
        capture_output=True,
        check=False,
    )
    if ran.returncode == -signal.SIGPROF:
        raise ValueError("loading it takes more than a few seconds")
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip().splitlines() or ["it ended the process"]
        # After the reason of a panic, Rust writes notes and a backtrace.
        useful = [line for line in said if not line.startswith(("note:", "  ", "stack"))]
        raise ValueError(f"not a tokenizer.json ({(useful or said)[-1]:.200})")
    _loaded.add(key)


def limit_resources(size: int) -> None:
    """Limit memory and CPU time of this process to the needs of loading `size` bytes."""
    limit_time(size)
    limit_memory(_MEMORY + _MEMORY_PER_BYTE * size)


def limit_memory(nbytes: int) -> None:
    """Limit the memory of this process to its current size plus a number of bytes."""
    statm = Path("/proc/self/statm")
    if statm.exists():  # other systems do not enforce the limit
        pages = int(statm.read_text().split()[0])
        limit = pages * resource.getpagesize() + nbytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_time(size: int | None, per_byte: float = _SECONDS_PER_BYTE) -> None:
    """Set a timer that ends this process by SIGPROF if `size` bytes take too much CPU time.

    Args:
        size: number of bytes; None stops the timer.
        per_byte: seconds of CPU time per byte.
    """
    seconds = 0.0 if size is None else _SECONDS + per_byte * size
    signal.setitimer(signal.ITIMER_PROF, seconds)


def check_growth(state: bytes, what: str) -> None:
    """Refuse a normalizer or decoder that makes long texts of short ones.

    Args:
        state: its JSON.
        what: its name in messages.

    Raises:
        ValueError: a text may become more than ten times as long, or longer by 100 characters.
    """
    factor, added = 1.0, 0.0
    for step in _steps(json.loads(state)):
        if step["type"] == "Prepend":
            added += len(step["prepend"])
        elif step["type"] == "Replace":
            replaced = step["pattern"].get("String", ".") or "."  # a pattern: at least a character
            growth = max(1.0, len(step["content"]) / len(replaced))
            # A step also lengthens what the steps before it have added.
            factor, added = factor * growth, added * growth
        if factor > _LARGEST_GROWTH or added > _LARGEST_ADDITION:
            raise ValueError(
                f"its {what} makes texts more than {_LARGEST_GROWTH} times as long, or puts more "
                f"than {_LARGEST_ADDITION} characters before them"
            )


def _steps(component: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a normalizer or decoder, which may be nested sequences."""
    if component["type"] != "Sequence":
        yield component
        return
    for inner in component.get("normalizers") or component.get("decoders") or ():
        yield from _steps(inner)


def check_affixes(model: object) -> None:
    """Refuse a model that puts long texts before or after each character of a word.

    Raises:
        ValueError: an affix is too long.
    """
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(model, name, None) or "") > _LARGEST_ADDITION:
            raise ValueError(f"its {name} has more than {_LARGEST_ADDITION} characters")


def check_added(ids: Sequence[int], count: int, vocab_size: int) -> None:
    """Check the ids that a post-processor adds to a text.

    Args:
        ids: ids of a text with those that are added.
        count: number of added ids.
        vocab_size: one more than the largest id of the vocabulary.

    Raises:
        ValueError: they are too many, or outside of the vocabulary.
    """
    if count > _LARGEST_ADDITION:
        raise ValueError(f"its post-processor adds {count:,} tokens to each text")
    if max(ids, default=0) >= vocab_size:
        raise ValueError(
            f"its post-processor adds the id {max(ids):,}, and its vocabulary has {vocab_size:,}"
        )


def check_ids(largest: int, n_tokens: int) -> None:
    """Refuse sparse vocabularies, because counts are allocated for every id.

    Raises:
        ValueError: the vocabulary is too sparse.
    """
    if largest >= max(_LARGEST_SPARSE_ID, 4 * n_tokens):
        raise ValueError(f"it has {n_tokens:,} tokens, and one of them the id {largest:,}")
