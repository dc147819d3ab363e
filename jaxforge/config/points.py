"""Names and patterns of the values that can be captured (`model.attention.Capture`)."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from jaxforge.cli.suggestions import choices

STREAM = ("attention", "mlp", "residual")
"""Points of each layer: both contributions to the residual stream, and the stream itself."""

ATTENTION_WEIGHTS = "attention_weights"
LOGITS = "logits"
MAX_LOGITS = "max_logits"
"""The largest attention logits: a value of layers, but not a point that `[eval]` can name."""

POINTS = (*STREAM, ATTENTION_WEIGHTS, LOGITS)
"""Names of all points."""


def matching(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the points that match a pattern, such as "att*", in the order of `POINTS`."""
    patterns = tuple(patterns)
    return tuple(name for name in POINTS if any(fnmatchcase(name, pattern) for pattern in patterns))


def unknown(patterns: Iterable[str]) -> str | None:
    """Return a message about the first pattern that matches no name, or None."""
    for pattern in patterns:
        if not matching([pattern]):
            return f'unknown point "{pattern}"{choices(pattern, POINTS)}'
    return None
