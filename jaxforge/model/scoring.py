"""What becomes of the products of queries and keys before the softmax."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Scoring(NamedTuple):
    """Scores are cap · tanh(scale · q kᵀ / cap), as in Gemma 2 (arXiv:2408.00118).

    Attributes:
        scale: what multiplies products; None: 1 / √h.
        softcap: the cap; None: scores are not capped.
    """

    scale: float | None = None
    softcap: float | None = None

    def scale_of(self, head_size: int) -> float:
        """What multiplies products of heads so wide."""
        return head_size**-0.5 if self.scale is None else self.scale

    def capped(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """Scores, given scaled products."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def slope(self, capped: Float[Array, "..."]) -> Float[Array, "..."]:
        """The derivative of `capped`, from what it gave."""
        return 1 - (capped / self.softcap) ** 2 if self.softcap else jnp.ones_like(capped)


PLAIN = Scoring()
"""1 / √h, without a cap."""
