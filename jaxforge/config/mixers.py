"""Settings of the mixers, each a table of `[model]` with the mixer's name.

A mixer of `model/mixers/` declares its settings here, and not in its own file: that file imports
JAX, which a config is read without, and imports point downwards.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.section import (
    Constant,
    Flag,
    Needs,
    Section,
    SplitBy,
    Structure,
    not_multiple,
)


class MixerConfig(Section):
    """Table of a mixer."""

    has_mup_rules: ClassVar[bool] = False
    """Whether muP has rules for the parameters."""

    has_chunks: ClassVar[bool] = False
    """Whether a scan over chunks of a sequence passes on a state."""

    @property
    def has_output_bias(self) -> bool:
        """True if the output of the mixer has a bias."""
        return False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Widths of latents; matrices that read them are sharded along them."""
        return ()

    def freezes(self, name: str) -> bool:
        """Return whether the settings of the mixer freeze a parameter of the model."""
        return False

    def smaller(self, tp: int) -> dict[str, Any]:
        """Return the keys of a mixer with the same structure and few channels, for `prove`.

        Args:
            tp: devices that share the heads.
        """
        return {}


class DeltaSizes(NamedTuple):
    """Sizes of the heads of mixers with the gated delta rule.

    Attributes:
        key_heads, value_heads: numbers of heads.
        key_head_dim, value_head_dim: their widths.
        conv_size: tokens in the causal convolutions.
    """

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int

    @property
    def key_size(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_head_dim


class HeadSizes(NamedTuple):
    """Sizes of the heads of softmax attention.

    Attributes:
        kv_heads: number of key and value heads.
        head_size: width of a query, key or value head.
        projections: number of matrices of keys and values. 1: values are the keys before norm and
            rotation. 0: both are those of an earlier layer.
    """

    kv_heads: int
    head_size: int
    projections: int = 2


_MOST_VALUE_HEADS = 8  # per key head, in `smaller`
GATED_DELTA_NET = "gated_delta_net"


class GatedDeltaNetConfig(MixerConfig):
    """`[model.gated_delta_net]`: linear attention with the gated delta rule, as in Qwen3-Next."""

    has_chunks = True

    key_heads: Annotated[PositiveInt, Structure(), SplitBy("tp")] = 16
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
    def sizes(self) -> DeltaSizes:
        """Sizes of the heads."""
        return DeltaSizes(self.key_heads, self.value_heads, self.key_head_dim,
                          self.value_head_dim, self.conv_size)  # fmt: skip

    def smaller(self, tp: int) -> dict[str, Any]:
        """Return the keys of a mixer with few channels."""
        keys = 2 * tp
        values = keys * min(_MOST_VALUE_HEADS, self.value_heads // self.key_heads)
        return {"key_heads": keys, "value_heads": values, "key_head_dim": 8, "value_head_dim": 8}

    def _problems(self) -> Iterator[str]:
        if self.value_heads % self.key_heads:
            yield not_multiple("value_heads", self.value_heads, "key_heads", self.key_heads)


KIMI_DELTA_ATTENTION = "kimi_delta_attention"


class KimiDeltaAttentionConfig(MixerConfig):
    """`[model.kimi_delta_attention]`: the gated delta rule with a decay per channel.

    Default values are those of Kimi Linear 48B-A3B (arXiv:2510.26692).
    """

    has_chunks = True

    heads: Annotated[PositiveInt, SplitBy("tp")] = 32
    """Heads per layer. Each has a state of head_dim times head_dim numbers."""
    head_dim: Annotated[PositiveInt, SplitBy("cp ep")] = 128
    """Width of queries, keys and values of a head, and of the bottlenecks of decays and output
    gates."""
    conv_size: Annotated[int, Field(ge=2)] = 4
    """Tokens in the causal convolutions of queries, keys and values, including the token itself."""

    @property
    def sizes(self) -> DeltaSizes:
        """Sizes of the heads."""
        return DeltaSizes(self.heads, self.heads, self.head_dim, self.head_dim, self.conv_size)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Width of the bottlenecks."""
        return (self.head_dim,)

    def smaller(self, tp: int) -> dict[str, Any]:
        """Return the keys of a mixer with few channels."""
        return {"heads": 2 * tp, "head_dim": 8}


MAMBA2 = "mamba2"


class Mamba2Config(MixerConfig):
    """`[model.mamba2]`: state-space layers of Mamba-2, as in Nemotron-H, Granite 4 and Bamba.

    Default values are those of the 2.7B model of the paper (arXiv:2405.21060).
    """

    has_chunks = True

    heads: Annotated[PositiveInt, SplitBy("tp")] = 80
    """Heads per layer."""
    head_dim: PositiveInt = 64
    """Width of a head. Each head has a state of head_dim times state_size numbers."""
    state_size: PositiveInt = 128
    """Width of the input and output projections of the state, B and C."""
    groups: Annotated[PositiveInt, Structure(), SplitBy("tp", "split_groups")] = 1
    """Groups of heads, each with its own B and C and its own norm. A divisor of heads."""
    conv_size: Annotated[int, Field(ge=2)] = 4
    """Tokens in the causal convolution of x, B and C, including the token itself."""
    conv_bias: bool = True
    """Add a bias to the convolution."""
    proj_bias: bool = False
    """Add a bias to the projections before and after the recurrence."""
    gated_norm: Annotated[Literal["after_gate", "before_gate", "none"], Structure()] = "after_gate"
    """Norm of the recurrence's output y: RMSNorm(y silu(z)), RMSNorm(y) silu(z), or y silu(z)
    without a norm, as in Falcon-H1."""
    multipliers: Annotated[tuple[PositiveFloat, ...], Constant()] = ()
    """Factors on the five projections to z, x, B, C and the time steps, as in Falcon-H1; if empty,
    all are 1."""
    chunk_size: PositiveInt = 256
    """Tokens that are computed by products with each other. It affects speed and memory, and
    results only by rounding."""
    time_step_min: Annotated[NonNegativeFloat, Constant()] = 0.0
    """Lower limit of the time steps of a head."""
    time_step_max: Annotated[PositiveFloat | None, Constant()] = None
    """Upper limit of the time steps of a head; if not set, there is none."""
    init_time_step_min: Annotated[PositiveFloat, Flag.TRAINING] = 0.001
    """Smallest initial time step. Initial time steps of heads are uniform in their logarithm."""
    init_time_step_max: Annotated[PositiveFloat, Flag.TRAINING] = 0.1
    """Largest initial time step."""

    @property
    def split_groups(self) -> int:
        """Number of groups that devices share; a single group is not split."""
        return self.groups if self.groups > 1 else 0

    @property
    def has_output_bias(self) -> bool:
        """True if the output of the mixer has a bias."""
        return self.proj_bias

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Channels of B, and of C, of all groups."""
        return self.groups * self.state_size

    @property
    def time_step_limits(self) -> tuple[float, float]:
        """Smallest and largest time step."""
        largest = self.time_step_max
        return self.time_step_min, float("inf") if largest is None else largest

    def smaller(self, tp: int) -> dict[str, Any]:
        """Return the keys of a mixer with few channels."""
        groups = 1 if self.groups == 1 else 2 * tp
        return {"groups": groups, "heads": 2 * max(groups, tp), "head_dim": 8, "state_size": 12,
                "chunk_size": 16}  # fmt: skip

    def _problems(self) -> Iterator[str]:
        if self.heads % self.groups:
            yield not_multiple("heads", self.heads, "groups", self.groups)
        if len(self.multipliers) not in (0, 5):
            yield f"multipliers must have five factors, not {len(self.multipliers)}"
        for first, last in (
            ("time_step_min", "time_step_max"),
            ("init_time_step_min", "init_time_step_max"),
        ):
            least, most = getattr(self, first), getattr(self, last)
            if most is not None and least >= most:
                yield f"{first} = {least} must be less than {last} = {most}"


GLOBAL_ATTENTION = "global_attention"


class GlobalAttentionConfig(MixerConfig):
    """`[model.global_attention]`: attention with heads of another size, in full layers of Gemma 4.

    Its other settings are those of "attention".
    """

    head_dim: Annotated[PositiveInt, Structure()] = 512
    """Width of a head."""
    n_kv_heads: Annotated[PositiveInt | None, Structure(), SplitBy("tp")] = None
    """Key/value heads; if not set, those of "attention" (model.n_kv_heads)."""
    keys_as_values: Annotated[bool, Structure()] = False
    """Take the keys, before their norm and rotation, as values: there is no v_proj."""

    def smaller(self, tp: int) -> dict[str, Any]:
        """Return the keys of a mixer with few channels."""
        return {"head_dim": 16, "n_kv_heads": None}

    def _problems(self) -> Iterator[str]:
        if self.head_dim % 2:
            yield (
                f"head_dim = {self.head_dim} must be even: rotary embeddings pair the two halves "
                "of a head"
            )


LATENT_ATTENTION, INDEXER = "latent_attention", "indexer"


class LatentAttentionConfig(MixerConfig):
    """`[model.latent_attention]`: multi-head latent attention, as in DeepSeek-V2 and V3."""

    has_mup_rules = True

    q_rank: Annotated[PositiveInt | None, SplitBy("cp ep")] = None
    """Width of the latent from which queries are computed; if not set, queries are computed from
    the residual stream, as in DeepSeek-V2-Lite."""
    kv_rank: Annotated[PositiveInt, Structure(), SplitBy("cp ep")] = 512
    """Width of the latent from which keys and values are computed. With the rotary key, it is all
    that decoding keeps of a token."""
    nope_head_dim: Annotated[PositiveInt, Structure()] = 128
    """Channels of a query or key head without rotary positions."""
    rope_head_dim: Annotated[PositiveInt, Structure()] = 64
    """Channels of a query head with rotary positions; all heads share those of the key."""
    value_head_dim: Annotated[PositiveInt, Structure()] = 128
    """Width of a value head."""
    norm_eps: Annotated[PositiveFloat, Structure()] = 1e-6
    """Added to the variance in the RMSNorms of the latents, independent of model.norm_eps."""
    index_heads: Annotated[NonNegativeInt, Structure(), SplitBy("tp")] = 0
    """Heads of the indexer that selects the keys of each query (DeepSeek Sparse Attention,
    arXiv:2512.02556). 0: queries attend to all earlier keys. Requires q_rank."""
    index_head_dim: Annotated[PositiveInt, Needs("index_heads"), Structure()] = 128
    """Width of a head of the indexer, of which rope_head_dim channels have rotary positions."""
    index_top_k: Annotated[PositiveInt, Needs("index_heads"), Constant()] = 2048
    """Number of keys that a query attends to, those with the largest scores of the indexer."""
    index_loss_weight: Annotated[NonNegativeFloat, Needs("index_heads"), Flag.TRAINING] = 1.0
    """Weight of the indexer's loss: the divergence of its scores from the weights of attention,
    averaged over tokens and layers. With 0 the indexer is frozen."""
    index_warm_up: Annotated[bool, Needs("index_heads"), Flag.TRAINING] = False
    """Train the indexer alone, while queries attend to all earlier keys and all other parameters
    are frozen. It prepares a model with dense attention for the selection."""

    @property
    def query_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def cached_values(self) -> int:
        """Values of a token that decoding keeps in each layer: its latent and its rotary key."""
        return self.kv_rank + self.rope_head_dim

    @property
    def ranks(self) -> tuple[int, ...]:
        """Widths of the latents."""
        return (self.kv_rank,) if self.q_rank is None else (self.q_rank, self.kv_rank)

    @property
    def has_indexer(self) -> bool:
        """True if an indexer selects the keys of each query."""
        return self.index_heads > 0

    def freezes(self, name: str) -> bool:
        """Return whether the indexer has no loss, or is trained alone and does not own it."""
        no_loss = not self.index_loss_weight
        return self.has_indexer and (no_loss if is_of_indexer(name) else self.index_warm_up)

    def smaller(self, tp: int) -> dict[str, Any]:
        """Return the keys of a mixer with few channels."""
        indexer = {"index_heads": 2 * tp, "index_head_dim": 8, "index_top_k": 8}
        return {"q_rank": None if self.q_rank is None else 64, "kv_rank": 32, "nope_head_dim": 8,
                "rope_head_dim": 4, "value_head_dim": 6,
                **(indexer if self.has_indexer else {})}  # fmt: skip

    def _problems(self) -> Iterator[str]:
        if self.rope_head_dim % 2:
            yield (
                f"rope_head_dim = {self.rope_head_dim} must be even: rotary embeddings pair the "
                "two halves"
            )
        if not self.has_indexer:
            return
        if self.q_rank is None:
            yield (
                f"index_heads = {self.index_heads} requires q_rank: the indexer computes its "
                "queries from that latent. Set q_rank, or index_heads = 0"
            )
        if self.rope_head_dim > self.index_head_dim:
            yield (
                f"index_head_dim = {self.index_head_dim} must be at least rope_head_dim = "
                f"{self.rope_head_dim}, the channels with rotary positions"
            )
        if self.index_warm_up and not self.index_loss_weight:
            yield "index_warm_up = true trains nothing with index_loss_weight = 0: change one"


def is_of_indexer(name: str) -> bool:
    """Return whether a parameter belongs to an indexer, given its dotted name."""
    return f".{INDEXER}." in name


SHORT_CONVOLUTION = "short_convolution"


class ShortConvolutionConfig(MixerConfig):
    """`[model.short_convolution]`: gated convolutions over a few tokens, as in LFM2."""

    conv_size: Annotated[int, Field(ge=2)] = 3
    """Tokens in the causal convolution, including the token itself."""
    bias: bool = False
    """Add a bias to the convolution and to the projections before and after it."""

    @property
    def has_output_bias(self) -> bool:
        """True if the output of the mixer has a bias."""
        return self.bias


class MixerTables(Section):
    """Tables of `[model]` for the mixers with settings."""

    global_attention: GlobalAttentionConfig = GlobalAttentionConfig()
    """Settings of layers with "global_attention" in mixer_pattern."""
    gated_delta_net: GatedDeltaNetConfig = GatedDeltaNetConfig()
    """Settings of layers with "gated_delta_net" in mixer_pattern."""
    kimi_delta_attention: KimiDeltaAttentionConfig = KimiDeltaAttentionConfig()
    """Settings of layers with "kimi_delta_attention" in mixer_pattern."""
    latent_attention: LatentAttentionConfig = LatentAttentionConfig()
    """Settings of layers with "latent_attention" in mixer_pattern."""
    mamba2: Mamba2Config = Mamba2Config()
    """Settings of layers with "mamba2" in mixer_pattern."""
    short_convolution: ShortConvolutionConfig = ShortConvolutionConfig()
    """Settings of layers with "short_convolution" in mixer_pattern."""


MIXER_TABLES = tuple(MixerTables.model_fields)
"""Mixers with a table of settings, which has the name of the mixer."""
