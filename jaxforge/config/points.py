"""Names and patterns of the values that can be captured (`model.attention.Capture`)."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from jaxforge.cli.suggestions import choices

STREAM = ("attention", "mlp", "residual")
"""What is added to the residual stream, and that itself, of each layer."""

ATTENTION_WEIGHTS = "attention_weights"
LOGITS = "logits"

POINTS = (*STREAM, ATTENTION_WEIGHTS, LOGITS)
"""All names."""


def matching(patterns: Iterable[str]) -> tuple[str, ...]:
    """The names that some pattern matches, such as "att*", in the order of `POINTS`."""
    patterns = tuple(patterns)
    return tuple(name for name in POINTS if any(fnmatchcase(name, pattern) for pattern in patterns))


def unknown(patterns: Iterable[str]) -> str | None:
    """Return a message about the first pattern that matches no name, or None."""
    for pattern in patterns:
        if not matching([pattern]):
            return f'there is no point "{pattern}"{choices(pattern, POINTS)}'
    return None
