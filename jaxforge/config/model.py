"""`[model]`: the architecture."""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.mixers import (
    GLOBAL_ATTENTION,
    LATENT_ATTENTION,
    MIXER_TABLES,
    HeadSizes,
    MixerConfig,
    MixerTables,
)
from jaxforge.config.section import (
    MOST_LAYERS,
    Constant,
    Needs,
    Requires,
    Section,
    SplitBy,
    Structure,
    Weights,
    WeightTable,
    facts,
    not_multiple,
)
from jaxforge.registry import Registry

LAYERS = "layers"
"""Name of the parameter group of all layers, and of the axis along which layers are stacked."""

ATTENTION, NO_MIXER = "attention", "none"
"""Names of softmax attention as a mixer, and of layers without a mixer."""

MIXERS = Registry("model.mixer_pattern", ATTENTION, *MIXER_TABLES, NO_MIXER, joint="+")
"""Registered mixers (`model.mixer_pattern`), which exchange information between tokens."""

SHARED_MIXERS = {name: f"shared_{name}" for name in (ATTENTION, GLOBAL_ATTENTION)}
"""Mixer -> mixer of the layers of `n_kv_shared_layers`, which has no keys and values of its own."""

GLOBAL_MIXERS = frozenset({GLOBAL_ATTENTION, SHARED_MIXERS[GLOBAL_ATTENTION]})
"""Mixers whose heads have the sizes of `[model.global_attention]`."""

FeedForward = Literal["dense", "experts", "none"]

MTP, MTP_LOSS = "mtp", "mtp_loss"
"""Names of the parameter group of the modules of multi-token prediction, and of their loss."""

EXPERTS = "experts"
"""Axis along which experts are stacked; it is sharded over devices and never gathered."""

AMAX_HISTORIES = ("input_amax_history", "weight_amax_history")
"""Names of the arrays that determine delayed scales of 8-bit products (`model.fp8`)."""

MODELS = Registry("model.model_type", "transformer")
"""Registered architectures (`model.transformer`)."""

_OF_EXPERTS = Needs("num_experts")
_OF_ROTARY = Requires("position_embedding", "rotary")


class RopeScaling(Section):
    """`[model.rope_scaling]`: scaling of rotary positions to longer contexts."""

    rope_type: Literal["llama3", "linear", "dynamic", "yarn", "longrope", "proportional"] = "llama3"
    """Scaling method. llama3: as in Llama 3.1. linear: every wavelength * factor. dynamic
    (NTK-aware): the base grows for sequences over original_max_seq_len. yarn, longrope: as in
    their papers. proportional: every wavelength * factor, and only the pairs of channels with the
    shortest wavelengths are rotated, as in Gemma 4."""
    factor: PositiveFloat = 8.0
    """Ratio of the extended to the original context length."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths over original_max_seq_len / low_freq_factor are scaled by factor."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths under original_max_seq_len / high_freq_factor are unchanged."""
    original_max_seq_len: PositiveInt = 8192
    """Original context length in tokens; not used by linear and proportional."""
    attention_factor: PositiveFloat | None = None
    """yarn, longrope: factor on rotated queries and keys; if not set, the value of their papers."""
    beta_fast: PositiveFloat = 32.0
    """yarn: channels with more rotations than this in the original context are unchanged."""
    beta_slow: PositiveFloat = 1.0
    """yarn: channels with fewer rotations than this are scaled by factor."""
    mscale: Annotated[PositiveFloat | None, Requires("mscale_all_dim")] = None
    """yarn: with mscale_all_dim, numerator of the factor on rotated queries and keys, as in
    DeepSeek: (1 + 0.1 mscale ln factor) / (1 + 0.1 mscale_all_dim ln factor)."""
    mscale_all_dim: Annotated[PositiveFloat | None, Requires("rope_type", "yarn")] = None
    """yarn: multiply attention scores by (1 + 0.1 mscale_all_dim ln factor)², as in DeepSeek."""
    truncate: bool = True
    """yarn: round the bounds of the interpolated range to whole channels."""
    short_factor: tuple[PositiveFloat, ...] = ()
    """longrope: wavelength factor of each pair of channels, in sequences of up to
    original_max_seq_len tokens."""
    long_factor: tuple[PositiveFloat, ...] = ()
    """longrope: wavelength factor of each pair of channels, in longer sequences."""
    rotated_share: Annotated[float, Field(gt=0, le=1), Requires("rope_type", "proportional")] = 1.0
    """proportional: fraction of the pairs of channels that are rotated."""

    @property
    def score_factor(self) -> float:
        """Factor of attention scores; 1 except for yarn with `mscale_all_dim`."""
        return 1.0 if self.mscale_all_dim is None else self.yarn_factor(self.mscale_all_dim) ** 2

    def yarn_factor(self, mscale: float) -> float:
        """Return YaRN's factor of queries and keys (arXiv:2309.00071, section 3.4)."""
        return 0.1 * mscale * math.log(max(1.0, self.factor)) + 1.0

    def _problems(self) -> Iterator[str]:
        if self.rope_type == "yarn" and self.beta_slow >= self.beta_fast:
            yield f"beta_slow = {self.beta_slow} must be less than beta_fast = {self.beta_fast}"
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            yield (
                f"low_freq_factor = {self.low_freq_factor} must be less than "
                f"high_freq_factor = {self.high_freq_factor}"
            )


class Rope(NamedTuple):
    """Rotary positions.

    Attributes:
        theta: base of the frequencies.
        scaling: scaling of the frequencies; None: none.
        size: number of rotated channels of a head.
    """

    theta: float
    scaling: RopeScaling | None
    size: int


_STACK_WORDS: dict[FeedForward, str] = {"dense": "dense", "experts": "moe", "none": ""}


def mixer_names(mixer: str) -> tuple[str, ...]:
    """Return the registered names of the mixers in an entry of `model.mixer_pattern`."""
    return () if mixer == NO_MIXER else tuple(mixer.split(MIXERS.joint))


class LayerParts(NamedTuple):
    """Parts of a layer, which determine its parameters.

    Attributes:
        mixer: registered name of the mixer (`MIXERS`), several names that are joined, or
            `NO_MIXER`.
        feed_forward: kind of the feed-forward; "none": the layer has none.
    """

    mixer: str
    feed_forward: FeedForward

    @property
    def mixers(self) -> tuple[str, ...]:
        """Registered names of the layer's mixers."""
        return mixer_names(self.mixer)


@functools.lru_cache
def _layer_parts(
    n_layers: int,
    mixers: tuple[str, ...],
    feed_forwards: tuple[FeedForward, ...],
    n_dense: int,
    n_shared: int,
) -> tuple[LayerParts, ...]:
    """Return the parts of each layer, the first `n_dense` without experts.

    The last `n_shared` have the mixers with shared keys. Parts are cached, because rules and plans
    ask for each layer.
    """
    repeated = zip(itertools.cycle(mixers), itertools.cycle(feed_forwards), strict=False)
    of_layers = enumerate(itertools.islice(repeated, n_layers))
    return tuple(
        LayerParts(
            SHARED_MIXERS.get(mixer, mixer) if i >= n_layers - n_shared else mixer,
            "dense" if kind == "experts" and i < n_dense else kind,
        )
        for i, (mixer, kind) in of_layers
    )


def every_nth(n: int) -> tuple[FeedForward, ...]:
    """Return the feed-forward pattern in which layer i has experts when (i + 1) % n == 0."""
    dense: tuple[FeedForward, ...] = ("dense",)
    return (*dense * (n - 1), "experts") if n > 1 else ()


def scaled_width(dim: int, multiplier: float = 1.0) -> int:
    """Return Llama's width of a feed-forward, rounded up to a multiple of 256."""
    # The order of evaluation matters: another order sometimes truncates to another integer.
    return 256 * math.ceil(int(4 * dim * (2 / 3) * multiplier) / 256)


def scaled_expert(width: int, multiplier: float = 1.0) -> int:
    """Return the width of an expert relative to a feed-forward, rounded to a multiple of 16."""
    return max(16, 16 * round(int(width * multiplier) / 16))


class ModelConfig(MixerTables):
    """Architecture of a decoder language model."""

    dim: Annotated[PositiveInt, SplitBy("cp ep")] = 4096
    """Width of the residual stream."""
    n_layers: Annotated[int, Field(gt=0, le=MOST_LAYERS)] = 32
    """Number of transformer blocks."""
    n_heads: Annotated[PositiveInt, Structure(), SplitBy("tp")] = 32
    """Query heads per block."""
    n_kv_heads: Annotated[PositiveInt | None, Structure("kv_heads"), SplitBy("tp")] = None
    """Key/value heads per block; if not set, n_heads."""
    head_dim: Annotated[PositiveInt | None, Structure("head_size")] = None
    """Width of one head; if not set, dim / n_heads."""
    mixer_pattern: tuple[Annotated[str, MIXERS], ...] = ()
    """Mixers of consecutive layers, repeated over all layers: registered names of the part that
    exchanges information between tokens. "none": the layer has a feed-forward only.
    "attention+mamba2": the layer has both, side by side, and adds their outputs. If empty, every
    layer has attention."""
    n_kv_shared_layers: Annotated[NonNegativeInt, Structure()] = 0
    """Number of last layers that take keys and values from an earlier layer: the last of all others
    with the same mixer (Gemma 3n and 4)."""
    mixer_multipliers: Annotated[WeightTable, Constant()] = Field(default_factory=Weights)
    """Factors on the outputs of mixers by name, as in Falcon-H1: {attention = 0.9, mamba2 = 0.2}.
    Mixers that are not in the table have 1."""
    feed_forward_pattern: tuple[FeedForward, ...] = ()
    """Feed-forwards of consecutive layers, repeated over all layers; "none": the layer has a mixer
    only. If empty, all layers have experts if num_experts is set, else none."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values, as Qwen2 does; in latent attention to the projections
    to latents."""
    o_bias: bool = False
    """Add a bias to the output projection of attention."""
    clip_qkv: Annotated[PositiveFloat | None, Constant()] = None
    """Clamp queries, keys and values to +- this value before they are split into heads, as OLMoE
    does. If not set, they are not clamped."""
    attention_scale: Annotated[PositiveFloat | None, Constant()] = None
    """Factor on attention scores; if not set, 1 / sqrt(head width)."""
    attn_logit_softcap: Annotated[PositiveFloat | None, Constant()] = None
    """Cap of attention scores s: cap * tanh(s / cap), as in Gemma 2."""
    attention_sinks: bool = False
    """Add a learned logit per query head to the denominator of its softmax, as in gpt-oss. The
    attention weights of the tokens then sum to less than 1."""
    attention_output_gate: bool = False
    """Multiply the output of attention, before o_proj, by a sigmoid gate per channel of a head that
    is a linear function of the layer's input (Qwen3-Next)."""
    attn_temperature_scale: Annotated[PositiveFloat | None, Constant()] = None
    """Multiply the query at position p by 1 + scale * log(1 + floor((p + 1) /
    attn_temperature_floor)) in layers without rotary positions, as Llama 4 does with a scale of
    0.1; or as attn_temperature_type says."""
    attn_temperature_floor: Annotated[
        PositiveInt, Requires("attn_temperature_scale"), Constant()
    ] = 8192
    """Tokens between the steps of attn_temperature_scale."""
    attn_temperature_type: Annotated[
        Literal["llama4", "ministral3"], Requires("attn_temperature_scale"), Constant()
    ] = "llama4"
    """Positions and layers of attn_temperature_scale. ministral3: p instead of p + 1, and all
    layers."""
    vocab_size: Annotated[PositiveInt, SplitBy("pp tp")] = 32000
    """Number of token ids."""
    ffn_hidden_dim: Annotated[PositiveInt | None, SplitBy("tp", "ffn_dim")] = None
    """Feed-forward width; if not set, 4 * dim * 2/3, rounded up to a multiple of 256."""
    kv_shared_ffn_dim: Annotated[
        PositiveInt | None, Requires("n_kv_shared_layers"), SplitBy("tp")
    ] = None
    """Feed-forward width of the layers of n_kv_shared_layers; if not set, that of all others."""
    layer_embedding_dim: Annotated[PositiveInt | None, Structure()] = None
    """Width of the embeddings that each layer has of every token (Gemma 3n and 4), which gates of
    the layer's output multiply. If not set, layers have none."""
    norm_type: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation of attention, feed-forward and the final output."""
    norm_eps: Annotated[PositiveFloat, Constant()] = 1e-5
    """Added to the variance in norms."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before attention and feed-forward, after them (OLMo 2), or both (Gemma 2)."""
    norm_unit_offset: Annotated[bool, Structure()] = False
    """Norms multiply by 1 + weight with weights initialised to 0, as in Gemma and, with LayerNorm,
    in Nemotron."""
    norm_bias: Annotated[bool, Requires("norm_type", "layernorm")] = True
    """Bias of each LayerNorm; false in Cohere's models. RMSNorm never has one."""
    parallel_residual: Annotated[bool, Structure()] = False
    """Attention and feed-forward both read the input of the block, as in GPT-NeoX."""
    hyper_connections: Literal["none", "dynamic", "manifold"] = "none"
    """Several residual streams, which each part of a block combines and mixes by learned functions.
    dynamic: hyper-connections (arXiv:2409.19606). manifold: shares of streams in one another are
    doubly stochastic (arXiv:2512.24880), as in DeepSeek V4. none: a plain residual."""
    residual_streams: Annotated[PositiveInt, Needs("hyper_connections")] = 4
    """Number of residual streams."""
    sinkhorn_iterations: Annotated[
        PositiveInt, Needs("hyper_connections", "manifold"), Constant()
    ] = 20
    """Number of divisions by sums that make the shares of streams doubly stochastic."""
    shared_norm: Annotated[
        bool, Requires("parallel_residual", True), Requires("norm_placement", "pre")
    ] = False
    """Attention and feed-forward share a norm, as in Cohere's models."""
    activation: Annotated[
        Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"], Structure()
    ] = "silu"
    """Activation function of the feed-forward: gelu is exact, gelu_tanh its tanh approximation.
    relu2 is relu(x)^2 (Primer, Nemotron).
    swiglu_oai (gpt-oss) is always gated: g * sigmoid(1.702 g) * (u + 1) of gate g and input u."""
    gated_mlp: Annotated[bool | None, Structure("is_gated")] = None
    """Gated feed-forward with three matrices (SwiGLU, GeGLU) instead of two. If not set, silu and
    swiglu_oai are gated and other activations are not."""
    swiglu_limit: Annotated[PositiveFloat | None, Constant()] = None
    """Clamp gates to at most this value, and their multiplicands to +- this value, before the
    activation function (7 in gpt-oss). If not set, neither is clamped."""
    mlp_bias: bool = False
    """Add a bias to every linear layer of the feed-forward."""
    mlp_multipliers: Annotated[tuple[PositiveFloat, PositiveFloat], Constant()] = (1.0, 1.0)
    """Factors on the gate of the feed-forward, before its activation, and on its output, as in
    Falcon-H1."""
    embedding_multiplier: Annotated[PositiveFloat, Constant()] = 1.0
    """Factor on embeddings; sqrt(dim) in Gemma."""
    layer_multipliers: bool = False
    """Multiply the output of each layer, with its residual, by a number that checkpoints hold and
    training does not change, as in Gemma 4. It is 1 in a new model."""
    residual_multiplier: Annotated[PositiveFloat, Constant()] = 1.0
    """Factor on the outputs of attention and feed-forward, as in Granite."""
    logits_scaling: Annotated[PositiveFloat, Constant()] = 1.0
    """Divisor of the final logits, as in Granite."""
    final_logit_softcap: Annotated[PositiveFloat | None, Constant()] = None
    """Cap of the final logits z: cap * tanh(z / cap), as in Gemma 2."""
    max_seq_len: PositiveInt = 2048
    """Maximum sequence length in tokens."""
    position_embedding: Annotated[Literal["rotary", "learned"], Structure()] = "rotary"
    """Position encoding: rotary embeddings, or a learned table added to the token embeddings."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1), _OF_ROTARY, Constant()] = 1.0
    """Fraction of the channels of a head, from the first, that get rotary embeddings."""
    rope_theta: Annotated[PositiveFloat, Constant()] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: Annotated[RopeScaling | None, _OF_ROTARY, Constant()] = None
    """Scaling of rotary positions to longer contexts."""
    sliding_window: PositiveInt | None = None
    """Window of sliding-attention layers in tokens, including the token itself."""
    attention_chunk_size: Annotated[PositiveInt | None, Constant()] = None
    """Chunk size in tokens of chunked-attention layers, where tokens attend within their chunk only
    (Llama 4). Chunks begin at the first token of a document."""
    attention_pattern: tuple[Literal["full", "sliding", "chunked"], ...] = ()
    """Attention kinds of consecutive layers, repeated over all layers. If empty, every layer is
    sliding if sliding_window is set, chunked if attention_chunk_size is set, else full."""
    local_rope_theta: Annotated[
        PositiveFloat | None, _OF_ROTARY, Requires("sliding_window"), Constant()
    ] = None
    """Base of the rotary frequencies in sliding layers, without rope_scaling. If not set, sliding
    layers use the same frequencies as full layers."""
    rope_pattern: Annotated[tuple[bool, ...], _OF_ROTARY, Constant()] = ()
    """Use of rotary positions in consecutive layers, repeated over all; if empty, all use them."""
    mtp_depth: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 0
    """Number of modules of multi-token prediction, as in DeepSeek-V3. Module k predicts the token k
    positions after the next one, from the output of module k - 1 and the token before. Only
    training uses the modules (train.mtp_loss_weight)."""
    mtp_mixer: Annotated[str, MIXERS] | None = None
    """Mixer of the modules of multi-token prediction, one of the mixers of the layers; if not set,
    that of the last layer. Their feed-forward is that of the last layer."""
    tie_embeddings: bool = False
    """Share the embedding matrix with the output head."""
    qk_norm: bool = False
    """Normalise queries and keys before the rotary embedding, or after it with
    qk_norm_after_rotary."""
    qk_norm_type: Annotated[
        Literal["rmsnorm", "layernorm"], Requires("qk_norm", True), Structure()
    ] = "rmsnorm"
    """Norm of qk_norm; LayerNorm has no bias here (Command R+)."""
    qk_norm_scope: Annotated[
        Literal["head", "each_head", "projection"], Requires("qk_norm", True), Structure()
    ] = "head"
    """Scope of qk_norm. head: each head, by weights that all heads share. each_head: each head has
    weights of its own (Command R+). projection: all heads of a token together (OLMo 2)."""
    qk_norm_after_rotary: Annotated[bool, Requires("qk_norm", True), _OF_ROTARY, Structure()] = (
        False
    )
    """Normalise queries and keys after the rotary embedding, as in Hunyuan."""
    qk_l2_norm: Annotated[bool, Structure()] = False
    """Divide the heads of queries and keys by their root mean square in layers with rotary
    positions, without weights (Llama 4)."""
    value_norm: Annotated[bool, Structure()] = False
    """Divide the heads of values by their root mean square, without weights (Gemma 4)."""
    qk_norm_eps: Annotated[PositiveFloat, Constant()] = 1e-5
    """Added to the variance in the norms of queries, keys and values, independent of norm_eps."""
    init_std: NonNegativeFloat = 0.02
    """Standard deviation of initial weights, over sqrt(2 n_layers) in o_proj and down_proj."""
    mup_base_width: Annotated[PositiveInt | None, Constant()] = None
    """Enable maximal update parametrisation (muP): init_std and optimizer.lr are values for a model
    of this dim and transfer to other widths. If not set, the standard parametrisation."""
    mup_base_head_dim: Annotated[PositiveInt | None, Requires("mup_base_width"), Constant()] = None
    """Head width at mup_base_width, if heads widen with the model: attention scores are then scaled
    by 1 / head width. If not set, wider models have more heads of equal width."""
    model_type: Annotated[str, MODELS] = "transformer"
    """Registered name of the architecture."""
    sdpa_backend: Literal[
        "auto", "flash", "efficient", "cudnn", "triton", "math", "reference", "blockwise", "splash"
    ] = "auto"
    """Attention kernel; auto selects the fastest kernel that supports the config."""
    num_experts: Annotated[NonNegativeInt, SplitBy("ep")] = 0
    """Experts per mixture-of-experts block; 0 makes every block dense."""
    moe_top_k: Annotated[NonNegativeInt, _OF_EXPERTS, Constant()] = 2
    """Experts per token."""
    moe_first_dense_layers: NonNegativeInt = 0
    """Number of first blocks whose feed-forward is dense instead of experts."""
    moe_router: Annotated[Literal["softmax_topk", "sigmoid_topk"], _OF_EXPERTS, Structure()] = (
        "softmax_topk"
    )
    """Router scores: a softmax over all experts, or a sigmoid per expert."""
    moe_norm_topk: Annotated[bool, _OF_EXPERTS, Constant()] = True
    """Divide the scores of the selected experts by their sum."""
    moe_score_inputs: Annotated[bool, _OF_EXPERTS, Structure()] = False
    """Multiply the inputs of experts by their scores, as in Llama 4, instead of their outputs."""
    moe_routed_scaling: Annotated[PositiveFloat, _OF_EXPERTS, Constant()] = 1.0
    """Factor on the summed output of the routed experts."""
    moe_groups: Annotated[PositiveInt, _OF_EXPERTS, Constant()] = 1
    """Groups of consecutive experts. A token is routed to experts of its best moe_top_k_groups
    groups, each scored as in moe_group_score."""
    moe_group_score: Annotated[Literal["sum_of_two", "max"], _OF_EXPERTS, Constant()] = "sum_of_two"
    """Score of a group of experts: the sum of its two best experts (DeepSeek-V3), or its best
    expert (DeepSeek-V2)."""
    moe_top_k_groups: Annotated[PositiveInt, _OF_EXPERTS, Constant()] = 1
    """Expert groups per token."""
    moe_router_bias: Annotated[bool, _OF_EXPERTS] = False
    """Add a bias to the router's logits, as gpt-oss does."""
    moe_bias_update: Annotated[
        Literal["none", "sign", "kempnerforge"] | None, _OF_EXPERTS, Constant("bias_update")
    ] = None
    """Load balancing by a bias on the router scores. sign: as in DeepSeek-V3, the bias affects only
    the selection, and moves by moe_bias_update_rate toward underloaded experts. kempnerforge: a
    bias inside the sigmoid, trained by the optimizer and adjusted by a running mean of the load.
    If not set, kempnerforge with the sigmoid router, else none."""
    moe_bias_update_rate: Annotated[NonNegativeFloat, _OF_EXPERTS] = 1e-3
    """Change of a bias per update."""
    moe_bias_schedule: Annotated[
        Literal["constant", "cosine_decay", "linear_warmup"], _OF_EXPERTS
    ] = "constant"
    """Schedule of moe_bias_update_rate: decay over the run, or warm-up over a tenth of it."""
    moe_shared_experts: Annotated[NonNegativeInt, _OF_EXPERTS] = 0
    """A value above 0 adds one shared expert that processes every token, as in KempnerForge: n
    shared experts equal one expert of n times the width (moe_shared_expert_dim)."""
    moe_shared_expert_dim: Annotated[
        PositiveInt | None,
        _OF_EXPERTS,
        Requires("moe_shared_experts"),
        SplitBy("tp", "shared_expert_dim"),
    ] = None
    """Width of the shared expert; if not set, the width of a routed expert."""
    moe_shared_expert_gate: Annotated[bool, _OF_EXPERTS, Requires("moe_shared_experts")] = False
    """Multiply the shared expert's output by a sigmoid gate per token, as in Qwen2-MoE."""
    moe_separate_norms: Annotated[
        bool, _OF_EXPERTS, Requires("moe_shared_experts"), Requires("norm_placement", "sandwich")
    ] = False
    """Router, experts and shared expert read the residual stream through a norm each, and the
    outputs of experts and shared expert have a norm each before they are added (Gemma 4)."""
    moe_expert_scales: Annotated[bool, _OF_EXPERTS] = False
    """Multiply the output of each expert by a learned number (Gemma 4)."""
    moe_expert_dim: Annotated[PositiveInt | None, _OF_EXPERTS, SplitBy("tp", "expert_dim")] = None
    """Width of an expert; if not set, that of the feed-forward, rounded to a multiple of 16."""
    moe_latent_dim: Annotated[PositiveInt | None, _OF_EXPERTS, SplitBy("cp")] = None
    """Width of the latent that routed experts read and write (Nemotron 3 Super): tokens are
    projected to it before they are sent to their experts, and the weighted sum back to dim. Router
    and shared expert read the full width. If not set, experts read and write dim."""
    moe_capacity_factor: Annotated[NonNegativeFloat, _OF_EXPERTS, Constant()] = 0.0
    """Capacity of an expert for tokens' first choices, second choices and so on, relative to an
    even load. Later tokens of the microbatch are dropped. 0 drops no tokens."""
    moe_gradient_scale: Annotated[bool, _OF_EXPERTS] = False
    """In training, divide each expert's output by its load relative to an even load."""
    moe_aux_loss_weight: Annotated[NonNegativeFloat, _OF_EXPERTS] = 0.01
    """Weight of the load-balancing loss of the Switch Transformer, over a microbatch."""
    moe_sequence_aux_loss_weight: Annotated[NonNegativeFloat, _OF_EXPERTS] = 0.0
    """Weight of DeepSeek-V3's balance loss within each sequence. With moe_bias_update =
    "kempnerforge", weight of KempnerForge's loss over a microbatch, times moe_aux_loss_weight."""
    moe_router_z_loss_weight: Annotated[NonNegativeFloat, _OF_EXPERTS] = 0.0
    """Weight of the penalty on large router logits."""
    moe_packed_experts: Annotated[bool, _OF_EXPERTS] = False
    """Export all experts of a block to KempnerForge as one tensor per projection."""
    moe_backend: Annotated[Literal["auto", "blocks", "megablox", "mosaic_gpu"], _OF_EXPERTS] = (
        "auto"
    )
    """Kernel of the grouped expert products; auto selects the platform's kernel."""

    def uses(self, key: str) -> bool:
        """Return whether a key, or a key of a table, affects the model."""
        # Two keys give it an effect, which one `Needs` cannot say.
        if key == "qk_norm_eps":
            return self.qk_norm or self.qk_l2_norm or self.value_norm
        if (table := key.partition(".")[0]) in MIXER_TABLES:
            return table in self.mixers
        needs = (needs for name, needs in facts(ModelConfig, Needs) if name == key)
        return all(each.is_met(getattr(self, each.key)) for each in needs)

    @property
    def kv_heads(self) -> int:
        """Key/value heads: `n_kv_heads`, or `n_heads` if not set."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_size(self) -> int:
        """Width of a query or key head: `head_dim`, or `dim` / `n_heads`."""
        if self.has_latent_attention:
            return self.latent_attention.query_head_dim
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def value_head_size(self) -> int:
        """Width of a value head."""
        has_latents = self.has_latent_attention
        return self.latent_attention.value_head_dim if has_latents else self.head_size

    @property
    def widest_head(self) -> int:
        """Width of a query or key head in the layers with the widest heads."""
        return max([self.head_size, *(self.head_sizes(name).head_size for name in self.mixers)])

    def head_sizes(self, mixer: str) -> HeadSizes:
        """Return the sizes of the heads of a mixer with softmax attention."""
        table, is_shared = self.global_attention, mixer in SHARED_MIXERS.values()
        if mixer not in GLOBAL_MIXERS:
            return HeadSizes(self.kv_heads, self.head_size, 0 if is_shared else 2)
        kv_heads, own = table.n_kv_heads or self.kv_heads, 2 - table.keys_as_values
        return HeadSizes(kv_heads, table.head_dim, 0 if is_shared else own)

    @property
    def key_sources(self) -> tuple[int, ...]:
        """Layers whose keys and values the last `n_kv_shared_layers` layers use, in order."""
        names = [parts.mixer for parts in self.layer_parts]
        last = {SHARED_MIXERS.get(name): i for i, name in enumerate(names)}
        return tuple(sorted(last[name] for name in {*names} & last.keys()))

    @property
    def has_latent_attention(self) -> bool:
        """True if some layers have latent attention; other layers then have no other attention."""
        return any(LATENT_ATTENTION in mixer_names(mixer) for mixer in self.mixer_pattern)

    @property
    def n_streams(self) -> int:
        """Number of residual streams."""
        return 1 if self.hyper_connections == "none" else self.residual_streams

    @property
    def stream_dim(self) -> int:
        """Width of all residual streams."""
        return self.n_streams * self.dim

    @property
    def ffn_dim(self) -> int:
        """Width of the dense feed-forward: `ffn_hidden_dim`, or Llama's rule rounded up to 256."""
        return scaled_width(self.dim) if self.ffn_hidden_dim is None else self.ffn_hidden_dim

    def dense_width(self, parts: LayerParts) -> int:
        """Return the width of the dense feed-forward in layers with these parts."""
        shared = self.kv_shared_ffn_dim if parts.mixer in SHARED_MIXERS.values() else None
        return shared or self.ffn_dim

    @property
    def rotary_size(self) -> int:
        """Channels of a head with rotary embeddings."""
        if self.has_latent_attention:
            return self.latent_attention.rope_head_dim
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward has a gate."""
        usual = self.activation in ("silu", "swiglu_oai")
        return usual if self.gated_mlp is None else self.gated_mlp

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer in tokens, including the token itself; None: no window."""
        return self._in_layers("sliding", self.sliding_window)

    @property
    def chunks(self) -> tuple[int | None, ...]:
        """Attention chunk size of each layer in tokens; None for layers without chunks."""
        return self._in_layers("chunked", self.attention_chunk_size)

    def _in_layers(self, selected_kind: str, tokens: int | None) -> tuple[int | None, ...]:
        """Return `tokens` for each layer with attention of kind `selected_kind`, else None."""
        pattern = itertools.cycle(self.attention_pattern or (selected_kind,))
        kinds = itertools.islice(pattern, self.n_layers)
        return tuple(tokens if kind == selected_kind else None for kind in kinds)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Rotary positions of each layer; None for layers without."""
        turns = itertools.cycle(self.rope_pattern or (self.position_embedding == "rotary",))
        # Sliding layers see a short context: Gemma 3 neither scales nor stretches their positions.
        full, local = (self.rope_theta, self.rope_scaling), self.local_rope_theta
        sliding = full if local is None else (local, None)
        of_layers = zip(self.windows, self.layer_parts, turns, strict=False)
        return tuple(
            Rope(
                *(full if window is None else sliding),
                self.global_attention.head_dim
                if GLOBAL_MIXERS.intersection(parts.mixers)
                else self.rotary_size,
            )
            if turn
            else None
            for window, parts, turn in of_layers
        )

    @property
    def layer_parts(self) -> tuple[LayerParts, ...]:
        """Mixer and feed-forward of each layer."""
        usual: tuple[FeedForward, ...] = ("experts" if self.num_experts else "dense",)
        return _layer_parts(
            self.n_layers, self.mixer_pattern or (ATTENTION,), self.feed_forward_pattern or usual,
            self.moe_first_dense_layers, self.n_kv_shared_layers,
        )  # fmt: skip

    @property
    def mtp_parts(self) -> LayerParts:
        """Mixer and feed-forward of the modules of multi-token prediction."""
        last = self.layer_parts[-1]
        return last if self.mtp_mixer is None else last._replace(mixer=self.mtp_mixer)

    @property
    def mixers(self) -> tuple[str, ...]:
        """Distinct mixers of the layers, in order of appearance."""
        return tuple(dict.fromkeys(name for parts in self.layer_parts for name in parts.mixers))

    @property
    def mixer_tables(self) -> dict[str, MixerConfig]:
        """Settings of the mixers of the layers, by name of the mixer."""
        return {name: getattr(self, name) for name in self.mixers if name in MIXER_TABLES}

    @property
    def is_moe(self) -> bool:
        """True if some blocks have experts."""
        return any(self.has_experts)

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """True for each block that has experts."""
        return tuple(parts.feed_forward == "experts" for parts in self.layer_parts)

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Layer indices of each stack of equal parameter shapes, by parameter group.

        There is one stack, "layers", if all layers have the same parts. Otherwise the name of a
        stack tells the parts that differ: "dense_layers" and "moe_layers", or "mamba2_layers".
        """
        parts = self.layer_parts
        # Parameters of equal shapes are stacked [layers, ...] and run by one scan.
        if len(set(parts)) == 1:
            return {LAYERS: tuple(range(self.n_layers))}
        mixers_differ, feed_forwards_differ = (
            len(set(kinds)) > 1 for kinds in zip(*parts, strict=True)
        )
        stacks: dict[str, list[int]] = {}
        for i, (mixer, feed_forward) in enumerate(parts):
            words = [
                *(mixer_names(mixer) if mixers_differ else ()),
                _STACK_WORDS[feed_forward] if feed_forwards_differ else "",
                LAYERS,
            ]
            stacks.setdefault("_".join(word for word in words if word), []).append(i)
        return {name: tuple(layers) for name, layers in sorted(stacks.items())}

    @property
    def moe_stacks(self) -> tuple[str, ...]:
        """Names of the stacks of layers with experts."""
        has_experts = self.has_experts
        return tuple(name for name, layers in self.stacks.items() if has_experts[layers[0]])

    @property
    def expert_dim(self) -> int:
        """Width of an expert: `moe_expert_dim`, or `ffn_dim` rounded to 16."""
        return scaled_expert(self.ffn_dim) if self.moe_expert_dim is None else self.moe_expert_dim

    @property
    def expert_embed_dim(self) -> int:
        """Width of what routed experts read and write: `moe_latent_dim`, or `dim`."""
        return self.moe_latent_dim or self.dim

    @property
    def shared_expert_dim(self) -> int:
        """Width of the shared expert; 0 without a shared expert."""
        return (self.moe_shared_expert_dim or self.expert_dim) if self.moe_shared_experts else 0

    @property
    def bias_update(self) -> Literal["none", "sign", "kempnerforge"]:
        """Resolved value of `moe_bias_update`."""
        if self.moe_bias_update is None:
            return "kempnerforge" if self.moe_router == "sigmoid_topk" else "none"
        return self.moe_bias_update

    def _problems(self) -> Iterator[str]:
        if self.head_dim is None and self.dim % self.n_heads and not self.has_latent_attention:
            yield f"{not_multiple('dim', self.dim, 'n_heads', self.n_heads)}, or set head_dim"
        elif self.position_embedding == "rotary":
            yield from self._rotary_problems()
        if self.n_heads % self.kv_heads:
            yield not_multiple("n_heads", self.n_heads, "n_kv_heads", self.kv_heads)
        if GLOBAL_ATTENTION in self.mixers:
            yield from self._global_problems()
        yield from self._layer_input_problems()
        if self.activation == "swiglu_oai" and not self.is_gated:
            yield 'activation = "swiglu_oai" is always gated: remove gated_mlp'
        if self.swiglu_limit is not None and not self.is_gated:
            yield f"swiglu_limit = {self.swiglu_limit} requires gated_mlp = true"
        if self.mlp_multipliers != (1.0, 1.0) and (self.is_moe or not self.is_gated):
            yield (
                f"mlp_multipliers = {list(self.mlp_multipliers)} requires a gated feed-forward "
                "without experts: remove it"
            )
        yield from self._position_problems()
        yield from self._norm_problems()
        yield from self._window_problems()
        yield from self._part_problems()
        if self.has_latent_attention:
            yield from self._latent_problems()
        if self.num_experts:
            yield from self._expert_problems()

    def _position_problems(self) -> Iterator[str]:
        is_llama4 = self.attn_temperature_type == "llama4"
        if self.attn_temperature_scale is not None and is_llama4 and all(self.ropes):
            yield (
                f"attn_temperature_scale = {self.attn_temperature_scale} has no effect: all layers "
                "have rotary positions. Set rope_pattern, or remove it"
            )

    def _norm_problems(self) -> Iterator[str]:
        if self.qk_l2_norm and (self.qk_norm or not any(self.ropes)):
            yield "qk_l2_norm = true requires layers with rotary positions, and qk_norm = false"
        if self.hyper_connections != "none":
            for key in ("parallel_residual", "mup_base_width", "mtp_depth"):
                if value := getattr(self, key):
                    yield (
                        f"{key} = {str(value).lower()} is not supported with hyper_connections = "
                        f'"{self.hyper_connections}": remove one of them'
                    )
        if self.qk_norm_after_rotary and (
            self.qk_norm_scope == "projection" or not any(self.ropes)
        ):
            yield (
                "qk_norm_after_rotary = true requires layers with rotary positions, and "
                'qk_norm_scope = "head" or "each_head"'
            )
        if self.shared_norm and any("none" in parts for parts in self.layer_parts):
            yield "shared_norm = true requires a mixer and a feed-forward in each layer"

    def _rotary_problems(self) -> Iterator[str]:
        scaling, size = self.rope_scaling, self.rotary_size
        if self.partial_rotary_factor < 1 and (size % 2 or not size):
            yield (
                f"partial_rotary_factor = {self.partial_rotary_factor} turns {size} of "
                f"{self.head_size} channels: rotary embeddings require an even number above 0"
            )
        elif size % 2:
            share = f"dim / n_heads = {self.dim} / {self.n_heads}"
            yield (
                f"{'head_dim' if self.head_dim else share} = {self.head_size} must be even: "
                "rotary embeddings pair the two halves of a head"
            )
        if scaling is None:
            return
        for key in ("short_factor", "long_factor") if scaling.rope_type == "longrope" else ():
            if len(getattr(scaling, key)) != size // 2:
                yield (
                    f"rope_scaling.{key} has {len(getattr(scaling, key))} numbers, but there are "
                    f"{size // 2} pairs of channels"
                )
        if scaling.rope_type == "yarn" and self.rope_theta <= 1:
            yield f'rope_theta = {self.rope_theta} must be greater than 1 with rope_type = "yarn"'

    def _window_problems(self) -> Iterator[str]:
        for kind, key in (("sliding", "sliding_window"), ("chunked", "attention_chunk_size")):
            has_kind, tokens = kind in self.attention_pattern, getattr(self, key)
            if has_kind and tokens is None:
                yield f'attention_pattern has "{kind}", which requires {key}'
            if self.attention_pattern and not has_kind and tokens is not None:
                yield (f'{key} = {tokens} has no effect: no layer of attention_pattern is "{kind}"')
        # Without a pattern all layers are of one kind.
        both = self.sliding_window is not None and self.attention_chunk_size is not None
        if both and not self.attention_pattern:
            yield (
                "sliding_window and attention_chunk_size apply to different layers: choose the "
                '"sliding" and "chunked" layers with attention_pattern, or remove a key'
            )

    def _part_problems(self) -> Iterator[str]:
        parts = self.layer_parts
        if (NO_MIXER, "none") in parts:
            yield (
                f"layer {parts.index(LayerParts(NO_MIXER, 'none'))} has neither a mixer nor a "
                "feed-forward: change mixer_pattern or feed_forward_pattern"
            )
        of_layers = {mixer for mixer, _ in parts} - {NO_MIXER}
        if self.mtp_mixer not in (None, *of_layers):
            yield (
                f'mtp_mixer = "{self.mtp_mixer}" is not the mixer of a layer: set it to '
                f"{' or '.join(sorted(of_layers))}, or remove it"
            )
        for mixer in dict.fromkeys(self.mixer_pattern):
            names = mixer.split(MIXERS.joint)
            if len(names) > 1 and (NO_MIXER in names or len(set(names)) < len(names)):
                yield f'mixer_pattern has "{mixer}": mixers side by side must be distinct'
        mixers, fields = set(self.mixers), type(self).model_fields
        if unused := sorted(self.mixer_multipliers.keys() - mixers):
            yield (
                f'mixer_multipliers.{unused[0]} has no effect: mixer_pattern has no "{unused[0]}". '
                "Add it there, or remove the factor"
            )
        for mixer in MIXER_TABLES:
            # A table that nothing uses is more likely a missing name than a default.
            if mixer not in mixers and getattr(self, mixer) != fields[mixer].default:
                yield (
                    f'[model.{mixer}] has no effect: mixer_pattern has no "{mixer}". Add it there, '
                    "or remove the table"
                )
        for mixer, table in self.mixer_tables.items():
            if self.mup_base_width is not None and not table.has_mup_rules:
                yield (
                    f"mup_base_width = {self.mup_base_width} is not supported with mixer "
                    f'"{mixer}": muP has no rules for its parameters. Remove it'
                )
        if "experts" in self.feed_forward_pattern and not self.num_experts:
            yield 'feed_forward_pattern has "experts", which requires num_experts'
        if (
            self.feed_forward_pattern
            and self.num_experts
            and ("experts" not in self.feed_forward_pattern)
        ):
            yield (
                f"num_experts = {self.num_experts} has no effect: no layer of "
                'feed_forward_pattern is "experts"'
            )

    def _global_problems(self) -> Iterator[str]:
        kv_heads = self.head_sizes(GLOBAL_ATTENTION).kv_heads
        if self.n_heads % kv_heads:
            yield not_multiple("n_heads", self.n_heads, "global_attention.n_kv_heads", kv_heads)
        if self.partial_rotary_factor < 1:
            yield (
                f"partial_rotary_factor = {self.partial_rotary_factor} is not supported with mixer "
                '"global_attention": remove it. rope_scaling of type "proportional" rotates a part '
                "of the channels of full layers"
            )
        if any({ATTENTION, GLOBAL_ATTENTION} <= {*parts.mixers} for parts in self.layer_parts):
            yield (
                'mixer_pattern has "attention" and "global_attention" side by side, whose rotary '
                "positions differ: choose one of them for each layer"
            )

    def _layer_input_problems(self) -> Iterator[str]:
        """Yield problems of keys that layers share, and of the embeddings that each layer has."""
        used = {
            f"n_kv_shared_layers = {self.n_kv_shared_layers}": self.n_kv_shared_layers,
            f"layer_embedding_dim = {self.layer_embedding_dim}": self.layer_embedding_dim,
        }
        for setting in (name for name, value in used.items() if value):
            for key in ("mtp_depth", "mup_base_width"):
                if value := getattr(self, key):
                    yield f"{key} = {value} is not supported with {setting}: remove one of them"
        if self.layer_embedding_dim and self.hyper_connections != "none":
            yield (
                f'hyper_connections = "{self.hyper_connections}" is not supported with '
                f"layer_embedding_dim = {self.layer_embedding_dim}: remove one of them"
            )
        names, shared = [parts.mixer for parts in self.layer_parts], self.n_kv_shared_layers
        if shared >= self.n_layers:
            yield (
                f"n_kv_shared_layers = {shared} must be less than n_layers = {self.n_layers}: an "
                "earlier layer computes the keys"
            )
            return
        of_earlier = {SHARED_MIXERS.get(name) for name in names[: self.n_layers - shared]}
        if wrong := [name for name in names[self.n_layers - shared :] if name not in of_earlier]:
            mixer = next((own for own, name in SHARED_MIXERS.items() if name == wrong[0]), wrong[0])
            yield (
                f'n_kv_shared_layers = {shared} has layers of mixer "{mixer}", whose keys no '
                f"earlier layer computes: set it to less, or change mixer_pattern. Layers of "
                f"{' and '.join(SHARED_MIXERS)} share keys"
            )

    def _latent_problems(self) -> Iterator[str]:
        # Both would share the sizes of heads, which the latents determine.
        for other in (ATTENTION, GLOBAL_ATTENTION):
            if other in self.mixers:
                yield f'mixer_pattern has both "{other}" and "latent_attention": choose one of them'
        for key in ("head_dim", "n_kv_heads", "partial_rotary_factor", "qk_norm",
                    "attention_sinks", "value_norm"):  # fmt: skip
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                shown = str(value).lower() if isinstance(value, bool) else value
                yield f'{key} = {shown} is not possible with mixer "latent_attention": remove it'
        if not self.latent_attention.has_indexer:
            return
        for key in ("sliding_window", "attention_chunk_size", "mup_base_width"):
            if (value := getattr(self, key)) is not None:
                yield (
                    f"{key} = {value} is not supported with latent_attention.index_heads = "
                    f"{self.latent_attention.index_heads}: remove one of them"
                )

    def _expert_problems(self) -> Iterator[str]:
        experts, groups = self.num_experts, self.moe_groups
        if not 0 < self.moe_top_k <= experts:
            yield f"moe_top_k = {self.moe_top_k} must be from 1 to num_experts = {experts}"
            return
        if not self.is_moe and "experts" in (self.feed_forward_pattern or ("experts",)):
            yield (
                f"no layer has experts with feed_forward_pattern = "
                f"{list(self.feed_forward_pattern)} and moe_first_dense_layers = "
                f"{self.moe_first_dense_layers} in n_layers = {self.n_layers}: change them, or set "
                "num_experts = 0"
            )
        if experts % groups:
            yield not_multiple("num_experts", experts, "moe_groups", groups)
        elif not self.moe_top_k_groups <= groups:
            yield (
                f"moe_top_k_groups = {self.moe_top_k_groups} must be at most moe_groups = {groups}"
            )
        elif self.moe_top_k > experts // groups * self.moe_top_k_groups:
            yield (
                f"moe_top_k = {self.moe_top_k} is more than the {experts // groups} experts of "
                f"each of the moe_top_k_groups = {self.moe_top_k_groups} groups"
            )
        if self.moe_score_inputs and self.moe_gradient_scale:
            yield "moe_gradient_scale = true scales outputs: it excludes moe_score_inputs = true"
        if self.bias_update == "kempnerforge" and self.moe_router != "sigmoid_topk":
            yield 'moe_bias_update = "kempnerforge" requires moe_router = "sigmoid_topk"'
