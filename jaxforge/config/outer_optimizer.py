"""`[outer_optimizer]`: the update that joins groups which train apart."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.section import Needs, Options, OptionTable, Section

NESTEROV = "nesterov"
"""Name of the default: gradient descent with Nesterov momentum."""

_FAMILY = "optax."


class OuterOptimizerConfig(Section):
    """Update of the global weights by the mean change of the groups (`train.outer_interval`).

    The defaults are those of DiLoCo (Douillard et al., 2023, arXiv:2311.08105). Fragments, overlap
    and mixing are those of Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512).
    """

    name: str = NESTEROV
    """nesterov, or an optimizer of optax by its name, such as optax.adam."""
    lr: PositiveFloat = 0.7
    """Learning rate; 1 with optax.sgd makes the global weights the mean of the groups' weights."""
    momentum: Annotated[float, Field(ge=0, lt=1), Needs("name", NESTEROV)] = 0.9
    """Nesterov momentum."""
    options: OptionTable = Field(default_factory=Options)
    """Further arguments of the optimizer of optax."""
    fragments: PositiveInt = 1
    """Parts of the model that are exchanged in turn: every fragments-th layer is one part."""
    overlap: NonNegativeInt = 0
    """Updates from the exchange of a fragment to its use, in which groups train on."""
    mixing: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of its own weights that a group keeps at an exchange; if not set, 0.5 with overlap,
    else 0."""

    def _problems(self) -> Iterator[str]:
        if self.name != NESTEROV and not self.name.startswith(_FAMILY):
            yield (
                f'name = "{self.name}": expected {NESTEROV}, or an optimizer of optax such as '
                f"{_FAMILY}sgd"
            )
        if self.name == NESTEROV and self.options:
            yield (
                f'options has no effect with name = "{NESTEROV}": remove it, or name an optimizer '
                "of optax"
            )

    @property
    def share_kept(self) -> float:
        """Share of its own weights that a group keeps at an exchange."""
        if self.mixing is None:
            return 0.5 if self.overlap else 0.0
        return self.mixing
