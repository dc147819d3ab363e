"""Fragments of a model, which groups that train apart exchange one after another.

A fragment is every P-th layer of each kind, from one layer on. The first fragment also has the
parameters before the layers, and the last those after them.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Int

from jaxforge.model.transformer import EMBEDDINGS, Params
from jaxforge.optim.trees import Path
from jaxforge.parallel.stages import is_stack

WHOLE = -1
"""Number that stands for all fragments together."""


class Fragments:
    """The fragments of a model.

    Args:
        count: number of fragments.
        interval: updates from one exchange of a fragment to the next.
    """

    def __init__(self, count: int, interval: int) -> None:
        self.count, self._apart = count, interval // count

    def due(self, updates: Int[Array, ""]) -> Int[Array, ""]:
        """Return the fragment that is due after a number of updates; `count` if none is.

        Fragment p is due after (p + 1) · interval / count updates, and every interval from then on.
        """
        turn, since = jnp.divmod(updates, self._apart)
        is_due = (since == 0) & (turn > 0)
        return jnp.where(is_due, (turn - 1) % self.count, self.count)

    def rows(self, fragment: int, path: Path, n: int) -> slice | None:
        """Return the rows [n, ...] of a parameter that are in a fragment; None if there are none.

        A share of a pipeline stage has the same rows as the whole, because `fragments` divides the
        layers of a stage.
        """
        if fragment == WHOLE or self.count == 1:
            return slice(0, n)
        if is_stack(path[0]):
            return slice(fragment, n, self.count)
        owner = 0 if path[0] in EMBEDDINGS else self.count - 1
        return slice(0, n) if fragment == owner else None

    def of(self, fragment: int, params: Params) -> dict[Path, slice]:
        """Return the rows of a fragment in each parameter that has any."""
        rows = {
            path: self.rows(fragment, path, leaf.shape[0])
            for path, leaf in flatten_dict(params).items()
        }
        return {path: at for path, at in rows.items() if at is not None}

    def replace(self, fragment: int, new: Params, old: Params, *, dimension: int = 0) -> Params:
        """Return `old` with the rows of a fragment from `new`.

        Args:
            fragment: number of the fragment.
            new: a tree of parameters, or of values with the shapes of some of them.
            old: a tree like `new`.
            dimension: dimension of the rows.
        """
        flat: Mapping[Path, Array] = flatten_dict(new)
        result = {}
        for path, leaf in flatten_dict(old).items():
            n = leaf.shape[dimension]
            rows = self.rows(fragment, path, n)
            if rows is None:
                result[path] = leaf
            elif rows == slice(0, n):
                result[path] = flat[path]
            else:
                at = (slice(None),) * dimension + (rows,)
                result[path] = leaf.at[at].set(flat[path][at])
        return unflatten_dict(result)
