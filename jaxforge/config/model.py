"""`[model]`: the shape of the network."""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.section import Section
from jaxforge.registry import Registry

MODELS = Registry("model.model_type", "transformer")
"""Architectures: `model.transformer`."""


class RopeScaling(Section):
    """`[model.rope_scaling]`: Llama 3's stretching of the rotary frequencies to longer contexts."""

    factor: PositiveFloat = 8.0
    """How many times longer the context gets."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths over original_max_seq_len / this are stretched by the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths under original_max_seq_len / this stay as they are."""
    original_max_seq_len: PositiveInt = 8192
    """Context length before the stretching, tokens."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this table."""
        if self.low_freq_factor >= self.high_freq_factor:
            yield (
                f"low_freq_factor = {self.low_freq_factor} must be less than "
                f"high_freq_factor = {self.high_freq_factor}"
            )


class ModelConfig(Section):
    """Architecture of a decoder language model."""

    dim: PositiveInt = 4096
    """Width of the residual stream."""
    n_layers: PositiveInt = 32
    """Number of transformer blocks."""
    n_heads: PositiveInt = 32
    """Query heads per block."""
    n_kv_heads: PositiveInt | None = None
    """Key/value heads per block; not set means n_heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; not set means dim / n_heads."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values, as Qwen2 does."""
    vocab_size: PositiveInt = 32000
    """Number of token ids."""
    ffn_dim_multiplier: PositiveFloat = 1.0
    """Scales the feed-forward width 4 * dim * 2/3, which is then rounded up to 256."""
    ffn_hidden_dim: PositiveInt | None = None
    """Feed-forward width, instead of the computed one."""
    norm_type: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before attention, feed-forward and head."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in norms."""
    activation: Literal["silu", "gelu", "relu"] = "silu"
    """silu is gated (SwiGLU, three matrices); gelu (exact) and relu have two."""
    max_seq_len: PositiveInt = 2048
    """Longest sequence that the position table covers, tokens."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretches rotary positions to longer contexts as Llama 3 does."""
    sliding_window: PositiveInt | None = None
    """Tokens that a token sees in layers of sliding attention, itself included."""
    attention_pattern: tuple[Literal["full", "sliding"], ...] = ()
    """Attention of consecutive layers, repeated over all of them. Empty: every layer is sliding if
    sliding_window is set, else every layer is full."""
    local_rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies in sliding layers, without rope_scaling; not set: as in full
    layers."""
    rope_pattern: tuple[bool, ...] = ()
    """Which of consecutive layers have rotary positions, repeated over all of them; empty: all."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head as well."""
    qk_norm: bool = False
    """RMSNorm of queries and keys per head, before the rotary embedding."""
    qk_norm_eps: PositiveFloat = 1e-5
    """Added to the variance in the norms of queries and keys, whatever norm_eps is."""
    init_std: NonNegativeFloat = 0.02
    """Standard deviation of initial weights; o_proj and down_proj divide it by sqrt(2 n_layers)."""
    model_type: Annotated[str, MODELS] = "transformer"
    """Which model to build."""
    sdpa_backend: Literal[
        "auto", "flash", "efficient", "cudnn", "math", "reference", "blockwise", "splash"
    ] = "auto"
    """Attention kernel; auto takes the fastest that can do what is asked."""
    num_experts: NonNegativeInt = 0
    """Experts per mixture-of-experts block; 0 makes every block dense."""
    moe_top_k: NonNegativeInt = 2
    """Experts that each token goes to."""
    moe_frequency: NonNegativeInt = 1
    """Every n-th block has experts: block i when (i + 1) % n == 0."""
    moe_router: Literal["softmax_topk", "sigmoid_topk"] = "softmax_topk"
    """How tokens choose experts."""
    moe_shared_experts: NonNegativeInt = 0
    """More than 0 adds one shared expert that sees every token."""
    moe_aux_loss_weight: NonNegativeFloat = 0.01
    """Weight of the load-balancing loss."""
    moe_capacity_factor: NonNegativeFloat = 0.0
    """Tokens an expert may take, relative to an even share; 0 drops none."""
    moe_sequence_aux_loss_weight: NonNegativeFloat = 0.0
    """Weight of the sigmoid router's own balance loss."""
    moe_gradient_scale: bool = False
    """Scale each expert's output by its share of the load."""
    moe_bias_schedule: Literal["constant", "cosine_decay", "linear_warmup"] = "constant"
    """Schedule of the sigmoid router's bias updates."""
    moe_packed_experts: bool = False
    """Keep all experts of a block in one tensor per projection."""
    moe_expert_ffn_multiplier: PositiveFloat = 1.0
    """Width of an expert relative to the dense feed-forward, rounded to 16."""
    moe_router_z_loss_weight: NonNegativeFloat = 0.0
    """Weight of the penalty on large router logits."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads: `n_kv_heads`, or as many as there are query heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head: `head_dim`, or the heads' share of `dim`."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def ffn_dim(self) -> int:
        """Width of the dense feed-forward: `ffn_hidden_dim`, or Llama's rule rounded up to 256."""
        if self.ffn_hidden_dim is not None:
            return self.ffn_hidden_dim
        # Evaluated in this order: another one truncates to another integer now and then.
        return 256 * math.ceil(int(4 * self.dim * (2 / 3) * self.ffn_dim_multiplier) / 256)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that a token sees in each layer, itself included; None: all up to itself."""
        pattern = itertools.cycle(self.attention_pattern or ("sliding",))
        kinds = itertools.islice(pattern, self.n_layers)
        return tuple(self.sliding_window if kind == "sliding" else None for kind in kinds)

    @property
    def is_moe(self) -> bool:
        """Whether some blocks have experts."""
        return self.num_experts > 0

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this section."""
        if self.head_dim is None and self.dim % self.n_heads:
            yield (
                f"dim = {self.dim} must be a multiple of n_heads = {self.n_heads}; or set head_dim"
            )
        elif self.head_size % 2:
            share = f"dim / n_heads = {self.dim} / {self.n_heads}"
            yield (
                f"{'head_dim' if self.head_dim else share} = {self.head_size} must be even: "
                "rotary positions pair the two halves of a head"
            )
        if self.n_heads % self.kv_heads:
            yield f"n_heads = {self.n_heads} must be a multiple of n_kv_heads = {self.kv_heads}"
        yield from self._window_problems()
        if self.is_moe:
            yield from self._expert_problems()

    def _window_problems(self) -> Iterator[str]:
        has_sliding = "sliding" in self.attention_pattern
        if has_sliding and self.sliding_window is None:
            yield 'attention_pattern has "sliding", which needs sliding_window'
        if self.attention_pattern and not has_sliding and self.sliding_window is not None:
            yield (
                f"sliding_window = {self.sliding_window} has no effect: no layer of "
                'attention_pattern is "sliding"'
            )
        if self.local_rope_theta is not None and self.sliding_window is None:
            yield (
                f"local_rope_theta = {self.local_rope_theta} is for sliding layers, and there are "
                "none: set sliding_window"
            )

    def _expert_problems(self) -> Iterator[str]:
        if not 0 < self.moe_top_k <= self.num_experts:
            yield f"moe_top_k = {self.moe_top_k} must be from 1 to num_experts = {self.num_experts}"
        if self.moe_frequency == 0:
            yield "moe_frequency = 0 must be at least 1 when num_experts > 0"
