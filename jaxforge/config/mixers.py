"""Settings of the mixers, each a table of `[model]` with the mixer's name."""

from collections.abc import Iterator

from pydantic import PositiveFloat, PositiveInt

from jaxforge.config.section import Section


class LatentAttentionConfig(Section):
    """`[model.latent_attention]`: multi-head latent attention, as in DeepSeek-V2 and V3."""

    q_rank: PositiveInt | None = None
    """Width of the latent from which queries are computed; if not set, queries are computed from
    the residual stream, as in DeepSeek-V2-Lite."""
    kv_rank: PositiveInt = 512
    """Width of the latent from which keys and values are computed. With the rotary key, it is all
    that decoding keeps of a token."""
    nope_head_dim: PositiveInt = 128
    """Channels of a query or key head without rotary positions."""
    rope_head_dim: PositiveInt = 64
    """Channels of a query head with rotary positions; all heads share those of the key."""
    value_head_dim: PositiveInt = 128
    """Width of a value head."""
    norm_eps: PositiveFloat = 1e-6
    """Added to the variance in the RMSNorms of the latents, independent of model.norm_eps."""

    @property
    def query_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def cached_values(self) -> int:
        """Values of a token that decoding keeps in each layer: its latent and its rotary key."""
        return self.kv_rank + self.rope_head_dim

    def problems(self) -> Iterator[str]:
        """Yield the broken rules between the keys of this table."""
        if self.rope_head_dim % 2:
            yield (
                f"rope_head_dim = {self.rope_head_dim} must be even: rotary embeddings pair the "
                "two halves"
            )
