"""What a model computes on its way, for those who look: values by name, of each layer.

    attention   what attention adds to the residual stream, [b, s, d]
    mlp         the same of the feed-forward, or of experts
    residual    what leaves the block

Nobody looks as a rule, and then nothing is kept. Inside of `watching`, what `keep` makes of a value
comes out of `Model.forward` in `LayerOut.seen`, stacked over layers.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from jaxtyping import Array, Float, PyTree

POINTS = ("attention", "mlp", "residual")
"""Names of values."""

Keep = Callable[[str, Float[Array, "b s d"]], PyTree]
"""(name, value) -> what is kept of it; None keeps nothing."""

_KEEP: ContextVar[Keep | None] = ContextVar("keep", default=None)
_SEEN: ContextVar[dict[str, PyTree] | None] = ContextVar("seen", default=None)


@contextlib.contextmanager
def watching(keep: Keep) -> Iterator[None]:
    """What is traced inside keeps what `keep` makes of each value."""
    token = _KEEP.set(keep)
    try:
        yield
    finally:
        _KEEP.reset(token)


@contextlib.contextmanager
def layer() -> Iterator[dict[str, PyTree]]:
    """A layer that is traced; gives what is kept of it."""
    seen: dict[str, PyTree] = {}
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)


def point(name: str, x_BSD: Float[Array, "b s d"]) -> None:
    """A value of the layer that is traced."""
    keep, seen = _KEEP.get(), _SEEN.get()
    if keep is None or seen is None:
        return
    assert name in POINTS
    if (kept := keep(name, x_BSD)) is not None:
        seen[name] = kept
