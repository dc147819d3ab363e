"""What of a model's computation can be kept (`model.attention.Capture`), by name and by pattern."""

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
    return tuple(name for name in POINTS if any(fnmatchcase(name, one) for one in patterns))


def unknown(patterns: Iterable[str]) -> str | None:
    """What is wrong with the first pattern that matches no name; None if each matches one."""
    for pattern in patterns:
        if not matching([pattern]):
            return f'there is no point "{pattern}"{choices(pattern, POINTS)}'
    return None
