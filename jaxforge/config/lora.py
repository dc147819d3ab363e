"""`[lora]`: low-rank adapters, which train while all other parameters are frozen."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from jaxforge.config.facts import Requires
from jaxforge.config.section import AnyPath, Section

ADAPTER = ("lora_a", "lora_b")
"""Names of an adapter's matrices, next to the `weight` of their linear layer."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): y = x Wᵀ + scale · x Aᵀ Bᵀ, with W frozen."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains the whole model without adapters."""
    alpha: PositiveFloat = 16.0
    """The adapters' outputs are multiplied by alpha / rank."""
    use_rslora: bool = False
    """Multiply by alpha / √rank instead (arXiv:2312.03732), for high ranks."""
    targets: tuple[str, ...] = ()
    """Regular expressions; linear layers with a matching name are adapted. By default all are."""
    dropout: Annotated[float, Field(ge=0, lt=1), Requires("rank")] = 0.0
    """Probability that training drops an element of an adapter's input; others are scaled up."""
    adapter: Annotated[AnyPath | None, Requires("rank")] = None
    """Adapter to start from, of PEFT or of another run; by default A is random and B zero."""

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def adapts(self, layer: str) -> bool:
        """Return whether a linear layer has an adapter.

        Args:
            layer: name such as "layers.attention.q_proj", without the index of the layer.
        """
        return not self.targets or any(re.search(pattern, layer) for pattern in self.targets)

    def freezes(self, name: str) -> bool:
        """Return whether adapters are trained and a parameter does not belong to one."""
        return bool(self.rank) and not is_adapter(name)

    def problems(self) -> Iterator[str]:
        """Yield the broken rules between the keys of this section."""
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f'targets: "{pattern}" is not a regular expression: {error}'


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, given its dotted name."""
    return name.rpartition(".")[2] in ADAPTER
