"""Settings of the mixers, each a table of `[model]` with the mixer's name."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveInt

from jaxforge.config.problems import Problem, divisors, multiples, nearest
from jaxforge.config.section import Section


class GatedDeltaNetConfig(Section):
    """`[model.gated_delta_net]`: linear attention with the gated delta rule, as in Qwen3-Next."""

    key_heads: PositiveInt = 16
    """Query and key heads per layer."""
    value_heads: PositiveInt = 32
    """Value heads per layer, a multiple of key_heads. Each has a state of key_head_dim times
    value_head_dim numbers."""
    key_head_dim: PositiveInt = 128
    """Width of a query or key head."""
    value_head_dim: PositiveInt = 128
    """Width of a value head."""
    conv_size: Annotated[int, Field(ge=2)] = 4
    """Tokens in the causal convolutions of queries, keys and values, including the token itself."""

    @property
    def key_size(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_head_dim

    def problems(self) -> Iterator[str | Problem]:
        """Yield the broken rules between the keys of this table."""
        if self.value_heads % self.key_heads:
            yield Problem(
                f"value_heads = {self.value_heads} must be a multiple of "
                f"key_heads = {self.key_heads}",
                (
                    nearest("key_heads", self.key_heads, divisors(self.value_heads)),
                    multiples("value_heads", self.value_heads, self.key_heads),
                ),
            )
