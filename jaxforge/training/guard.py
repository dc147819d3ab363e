"""Judges each step inside the step: a loss or gradient norm that is not finite changes nothing."""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

T = TypeVar("T")


class GuardState(NamedTuple):
    """Counts of bad steps; part of the checkpoint.

    Attributes:
        consecutive: bad steps in a row, up to now.
        total: bad steps of the whole run.
    """

    consecutive: Int[Array, ""]
    total: Int[Array, ""]

    @classmethod
    def fresh(cls) -> "GuardState":
        """No bad step yet."""
        return cls(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def judge(
        self, loss: Float[Array, ""], grad_norm: Float[Array, ""]
    ) -> tuple[Bool[Array, ""], "GuardState"]:
        """Whether this step's update may be applied, and the counts after it."""
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        bad = (~good).astype(jnp.int32)
        return good, GuardState(jnp.where(good, 0, self.consecutive + 1), self.total + bad)

    def halted(self, limit: int) -> Bool[Array, ""]:
        """True once `limit` bad steps have come in a row: from then on the state stands still.

        So the host, which looks only at steps that are logged, finds the run where it gave up.
        """
        return self.consecutive >= limit


def select(good: Bool[Array, ""], new: T, old: T) -> T:
    """`new` where the step was good, `old` bit for bit where it was not."""
    return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
