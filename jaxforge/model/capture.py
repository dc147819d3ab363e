"""What a model computes on its way, for those who look: values by name, of each layer.

    attention           what attention adds to the residual stream, [b, s, d]
    mlp                 the same of the feed-forward, or of experts
    residual            what leaves the block
    attention_weights   of each query and key, after the softmax, [b, heads, s, s]; only where they
                        are asked for, as a softmax of their own makes them

Nobody looks as a rule, and then nothing is kept. Inside of `watching`, what `keep` makes of a value
comes out of `Model.forward` in `LayerOut.seen`, stacked over layers.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar

from jaxtyping import Array, Float, PyTree

from jaxforge.config.points import ATTENTION_WEIGHTS, STREAM

POINTS = STREAM
"""Names of the values that are looked at where nobody says which: those of [b, s, d]."""

Keep = Callable[[str, Array], PyTree]
"""(name, value) -> what is kept of it; None keeps nothing."""

_KEEP: ContextVar[tuple[Keep, Collection[str]] | None] = ContextVar("keep", default=None)
_SEEN: ContextVar[dict[str, PyTree] | None] = ContextVar("seen", default=None)


@contextlib.contextmanager
def watching(keep: Keep, points: Collection[str] = POINTS) -> Iterator[None]:
    """What is traced inside keeps what `keep` makes of each value of these names."""
    token = _KEEP.set((keep, points))
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


def is_wanted(name: str) -> bool:
    """Whether somebody looks at values of a name in the layer that is traced."""
    watched = _KEEP.get()
    return watched is not None and _SEEN.get() is not None and name in watched[1]


def point(name: str, x: Float[Array, "b ..."]) -> None:
    """A value of the layer that is traced."""
    assert name in (*STREAM, ATTENTION_WEIGHTS)
    watched, seen = _KEEP.get(), _SEEN.get()
    if watched is None or seen is None or not is_wanted(name):
        return
    if (kept := watched[0](name, x)) is not None:
        seen[name] = kept
