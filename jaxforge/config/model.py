"""`[model]`: the shape of the network."""

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.problems import Problem, divisors, multiples, nearest, single_change
from jaxforge.config.section import Section
from jaxforge.registry import Registry

LAYERS = "layers"
"""The part of a model's arrays that holds all layers, and the axis along which they are stacked."""

DENSE_LAYERS, MOE_LAYERS = "dense_layers", "moe_layers"
"""The two parts, instead, of a model in which some layers have experts and others have none."""

EXPERTS = "experts"
"""The axis along which experts are stacked: they are spread over devices, and never gathered."""

AMAX_HISTORIES = ("input_amax_history", "weight_amax_history")
"""Arrays that delayed scales of 8-bit products go by (`model.fp8`)."""

MODELS = Registry("model.model_type", "transformer")
"""Architectures: `model.transformer`."""


class RopeScaling(Section):
    """`[model.rope_scaling]`: stretches rotary positions to longer contexts."""

    rope_type: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = "llama3"
    """llama3: Llama 3.1's. linear: every wavelength * factor. dynamic (NTK-aware): the base grows
    with sequences over original_max_seq_len. yarn and longrope: of their papers."""
    factor: PositiveFloat = 8.0
    """How many times longer the context gets."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths over original_max_seq_len / this are stretched by the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths under original_max_seq_len / this stay as they are."""
    original_max_seq_len: PositiveInt = 8192
    """Context length before the stretching, tokens; linear does not look at it."""
    attention_factor: PositiveFloat | None = None
    """yarn, longrope: multiplies rotated queries and keys; not set: as their papers have it."""
    beta_fast: PositiveFloat = 32.0
    """yarn: channels that turn more often than this in the original context stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """yarn: channels that turn less often than this are stretched by the whole factor."""
    truncate: bool = True
    """yarn: whole channels bound what is between the two."""
    short_factor: tuple[PositiveFloat, ...] = ()
    """longrope: stretches the wavelength of each pair of channels, in sequences of up to
    original_max_seq_len tokens."""
    long_factor: tuple[PositiveFloat, ...] = ()
    """longrope: the same, in longer sequences."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this table."""
        if self.rope_type == "yarn" and self.beta_slow >= self.beta_fast:
            yield f"beta_slow = {self.beta_slow} must be less than beta_fast = {self.beta_fast}"
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
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
    o_bias: bool = False
    """Add a bias to the output projection of attention."""
    attention_scale: PositiveFloat | None = None
    """Multiplies attention scores; not set means 1 / sqrt(head width)."""
    attn_logit_softcap: PositiveFloat | None = None
    """Attention scores s become cap * tanh(s / cap), as in Gemma 2."""
    attention_sinks: bool = False
    """Each query head has a learned logit that joins its softmax and has no value, as in gpt-oss:
    what it takes, tokens do not get."""
    vocab_size: PositiveInt = 32000
    """Number of token ids."""
    ffn_dim_multiplier: PositiveFloat = 1.0
    """Scales the feed-forward width 4 * dim * 2/3, which is then rounded up to 256."""
    ffn_hidden_dim: PositiveInt | None = None
    """Feed-forward width, instead of the computed one."""
    norm_type: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation around attention and feed-forward, and before the head."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in norms."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Norms before attention and feed-forward, after them (OLMo 2), or on both sides (Gemma 2)."""
    norm_unit_offset: bool = False
    """RMSNorm multiplies by 1 + weight, as in Gemma, and weights begin at 0."""
    parallel_residual: bool = False
    """Attention and feed-forward both read the input of the block, as in GPT-NeoX."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"] = "silu"
    """Non-linearity of the feed-forward: gelu is exact, gelu_tanh its approximation by tanh.
    swiglu_oai is gpt-oss's, always gated: g * sigmoid(1.702 g) * (u + 1) of gate g and u."""
    gated_mlp: bool | None = None
    """Multiply by a gate, with three matrices (SwiGLU, GeGLU), not two; not set means that silu and
    swiglu_oai are gated and others are not."""
    swiglu_limit: PositiveFloat | None = None
    """Before the non-linearity, gates are at most this, and what they multiply is within +-this
    (7 in gpt-oss); not set: neither is bounded."""
    mlp_bias: bool = False
    """Add a bias to every matrix of the feed-forward."""
    embedding_multiplier: PositiveFloat = 1.0
    """Multiplies embeddings: sqrt(dim) in Gemma."""
    residual_multiplier: PositiveFloat = 1.0
    """Multiplies what attention and feed-forward add to the residual stream, as in Granite."""
    logits_scaling: PositiveFloat = 1.0
    """Divides final logits, as in Granite."""
    final_logit_softcap: PositiveFloat | None = None
    """Final logits z become cap * tanh(z / cap), as in Gemma 2."""
    max_seq_len: PositiveInt = 2048
    """Longest sequence that the position table covers, tokens."""
    position_embedding: Literal["rotary", "learned"] = "rotary"
    """How positions are told: rotary embeddings, or a table that is added to the embeddings."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's channels that rotary positions turn, the first ones."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretches rotary positions to longer contexts."""
    sliding_window: PositiveInt | None = None
    """Tokens that a token sees in layers of sliding attention, itself included."""
    attention_chunk_size: PositiveInt | None = None
    """Tokens of a chunk in layers of chunked attention, which see no other chunk (Llama 4); chunks
    are counted from the first token of a document."""
    attention_pattern: tuple[Literal["full", "sliding", "chunked"], ...] = ()
    """Attention of consecutive layers, repeated over all of them. Empty: every layer is sliding if
    sliding_window is set, chunked if attention_chunk_size is, else full."""
    local_rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies in sliding layers, without rope_scaling; not set: as in full
    layers."""
    rope_pattern: tuple[bool, ...] = ()
    """Which of consecutive layers have rotary positions, repeated over all of them; empty: all."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head as well."""
    qk_norm: bool = False
    """RMSNorm of queries and keys, before the rotary embedding."""
    qk_norm_scope: Literal["head", "projection"] = "head"
    """What qk_norm normalises: each head, or all heads of a token at once (OLMo 2)."""
    qk_norm_eps: PositiveFloat = 1e-5
    """Added to the variance in the norms of queries and keys, whatever norm_eps is."""
    init_std: NonNegativeFloat = 0.02
    """Standard deviation of initial weights; o_proj and down_proj divide it by sqrt(2 n_layers)."""
    mup_base_width: PositiveInt | None = None
    """Maximal update parametrisation: init_std and optimizer.lr are those of a model of this dim,
    and carry over to other widths. Not set: the standard parametrisation."""
    mup_base_head_dim: PositiveInt | None = None
    """Width of a head at mup_base_width, where it grows with the model: scores are then scaled by
    1 / head width. Not set: wider models have more heads, not wider ones."""
    model_type: Annotated[str, MODELS] = "transformer"
    """Which model to build."""
    sdpa_backend: Literal[
        "auto", "flash", "efficient", "cudnn", "triton", "math", "reference", "blockwise", "splash"
    ] = "auto"
    """Attention kernel; auto takes the fastest that can do what is asked."""
    num_experts: NonNegativeInt = 0
    """Experts per mixture-of-experts block; 0 makes every block dense."""
    moe_top_k: NonNegativeInt = 2
    """Experts that each token goes to."""
    moe_frequency: NonNegativeInt = 1
    """Every n-th block has experts: block i when (i + 1) % n == 0."""
    moe_first_dense_layers: NonNegativeInt = 0
    """Blocks at the beginning that have no experts, whatever moe_frequency says."""
    moe_router: Literal["softmax_topk", "sigmoid_topk"] = "softmax_topk"
    """How a token scores experts: by a softmax over all of them, or each by its own sigmoid."""
    moe_norm_topk: bool = True
    """Divide the scores of the experts that a token goes to by their sum."""
    moe_routed_scaling: PositiveFloat = 1.0
    """Multiplies what the routed experts add up to."""
    moe_groups: PositiveInt = 1
    """Groups of consecutive experts; a token goes to experts of its best groups only, where a group
    is as good as its two best experts together (DeepSeek-V3)."""
    moe_top_k_groups: PositiveInt = 1
    """Groups that a token may go to."""
    moe_router_bias: bool = False
    """Add a bias to the router's logits, as gpt-oss does."""
    moe_bias_update: Literal["none", "sign", "kempnerforge"] | None = None
    """How experts are kept busy by a bias on their scores. sign: as DeepSeek-V3, a bias that only
    chooses, and moves by moe_bias_update_rate to where tokens are missing. kempnerforge: a bias
    inside the sigmoid, which the optimizer trains and a running mean of the load moves. Not set:
    kempnerforge with the sigmoid router, else none."""
    moe_bias_update_rate: NonNegativeFloat = 1e-3
    """How far a bias moves in one update."""
    moe_bias_schedule: Literal["constant", "cosine_decay", "linear_warmup"] = "constant"
    """What becomes of moe_bias_update_rate: it decays over the run, or rises over a tenth of it."""
    moe_shared_experts: NonNegativeInt = 0
    """More than 0 adds a shared expert that sees every token: one, as in KempnerForge, since n of
    them are one of n times the width (moe_shared_expert_dim)."""
    moe_shared_expert_dim: PositiveInt | None = None
    """Width of the shared expert; not set means that of an expert."""
    moe_shared_expert_gate: bool = False
    """Multiply the shared expert's output by a sigmoid of each token, as Qwen2-MoE does."""
    moe_expert_dim: PositiveInt | None = None
    """Width of an expert, instead of the computed one."""
    moe_expert_ffn_multiplier: PositiveFloat = 1.0
    """Width of an expert relative to the dense feed-forward, rounded to 16."""
    moe_capacity_factor: NonNegativeFloat = 0.0
    """Tokens an expert may take as somebody's first choice, second choice and so on, relative to an
    even share; what comes later in the microbatch is dropped. 0 drops none."""
    moe_gradient_scale: bool = False
    """In training, divide each expert's output by its load relative to an even one."""
    moe_aux_loss_weight: NonNegativeFloat = 0.01
    """Weight of the load-balancing loss of the Switch Transformer, over a microbatch."""
    moe_sequence_aux_loss_weight: NonNegativeFloat = 0.0
    """Weight of DeepSeek-V3's balance loss within each sequence. With moe_bias_update =
    "kempnerforge", that of KempnerForge's over a microbatch, times moe_aux_loss_weight."""
    moe_router_z_loss_weight: NonNegativeFloat = 0.0
    """Weight of the penalty on large router logits."""
    moe_packed_experts: bool = False
    """Exports to KempnerForge keep all experts of a block in one tensor per projection."""
    moe_backend: Literal["auto", "blocks", "megablox", "mosaic_gpu"] = "auto"
    """Kernel of the products with each token's experts; auto takes the platform's own."""

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
    def rotary_size(self) -> int:
        """Channels of a head that rotary positions turn."""
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward has a gate."""
        usual = self.activation in ("silu", "swiglu_oai")
        return usual if self.gated_mlp is None else self.gated_mlp

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that a token sees in each layer, itself included; None: all up to itself."""
        return self._in_layers("sliding", self.sliding_window)

    @property
    def chunks(self) -> tuple[int | None, ...]:
        """Tokens of a chunk in each layer, which sees no other; None: it has none."""
        return self._in_layers("chunked", self.attention_chunk_size)

    def _in_layers(self, wanted: str, tokens: int | None) -> tuple[int | None, ...]:
        """In each layer of a kind of attention, its tokens; in others None."""
        pattern = itertools.cycle(self.attention_pattern or (wanted,))
        kinds = itertools.islice(pattern, self.n_layers)
        return tuple(tokens if kind == wanted else None for kind in kinds)

    @property
    def ropes(self) -> tuple[tuple[float, RopeScaling | None] | None, ...]:
        """Base and scaling of each layer's rotary positions; None: it has none."""
        turns = itertools.cycle(self.rope_pattern or (self.position_embedding == "rotary",))
        full, local = (self.rope_theta, self.rope_scaling), self.local_rope_theta
        sliding = full if local is None else (local, None)
        of_layers = zip(self.windows, turns, strict=False)
        return tuple(
            (full if window is None else sliding) if turn else None for window, turn in of_layers
        )

    @property
    def is_moe(self) -> bool:
        """True if some blocks have experts."""
        return any(self.has_experts)

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Return for each block whether it has experts."""
        first, every = self.moe_first_dense_layers, max(1, self.moe_frequency)
        return tuple(
            self.num_experts > 0 and i >= first and (i + 1) % every == 0
            for i in range(self.n_layers)
        )

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Return the layers that are stacked, as they share parameter shapes, by array name.

        One stack if all layers have experts or none has; else two.
        """
        if len(set(self.has_experts)) == 1:
            return {LAYERS: tuple(range(self.n_layers))}
        dense, experts = (
            tuple(i for i, has in enumerate(self.has_experts) if has == wanted)
            for wanted in (False, True)
        )
        return {DENSE_LAYERS: dense, MOE_LAYERS: experts}

    @property
    def moe_stack(self) -> str:
        """The name of the stack of layers that have experts."""
        return MOE_LAYERS if MOE_LAYERS in self.stacks else LAYERS

    @property
    def has_router_state(self) -> bool:
        """True if routers have non-trainable state."""
        return self.is_moe and self.bias_update != "none"

    @property
    def expert_dim(self) -> int:
        """Width of an expert: `moe_expert_dim`, or a share of `ffn_dim`, rounded to 16."""
        if self.moe_expert_dim is not None:
            return self.moe_expert_dim
        return max(16, 16 * round(int(self.ffn_dim * self.moe_expert_ffn_multiplier) / 16))

    @property
    def shared_expert_dim(self) -> int:
        """Width of the shared expert; 0: there is none."""
        return (self.moe_shared_expert_dim or self.expert_dim) if self.moe_shared_experts else 0

    @property
    def bias_update(self) -> Literal["none", "sign", "kempnerforge"]:
        """Resolved value of `moe_bias_update`."""
        if self.moe_bias_update is None:
            return "kempnerforge" if self.moe_router == "sigmoid_topk" else "none"
        return self.moe_bias_update

    def problems(self) -> Iterator[str | Problem]:
        """Yields the broken rules between the keys of this section."""
        if self.head_dim is None and self.dim % self.n_heads:
            yield Problem(
                f"dim = {self.dim} must be a multiple of n_heads = {self.n_heads}",
                (
                    multiples("dim", self.dim, self.n_heads),
                    nearest("n_heads", self.n_heads, divisors(self.dim)),
                    multiples("head_dim", self.dim // self.n_heads, 2),
                ),
            )
        elif self.position_embedding == "rotary":
            yield from self._rotary_problems()
        else:
            yield from self._unused_rotary_keys()
        if self.n_heads % self.kv_heads:
            yield Problem(
                f"n_heads = {self.n_heads} must be a multiple of n_kv_heads = {self.kv_heads}",
                (
                    nearest("n_kv_heads", self.kv_heads, divisors(self.n_heads)),
                    multiples("n_heads", self.n_heads, self.kv_heads),
                ),
            )
        if self.activation == "swiglu_oai" and not self.is_gated:
            yield 'activation = "swiglu_oai" has a gate: leave gated_mlp out'
        if self.swiglu_limit is not None and not self.is_gated:
            yield f"swiglu_limit = {self.swiglu_limit} is for a gate, and there is none"
        if self.norm_unit_offset and self.norm_type != "rmsnorm":
            yield f'norm_unit_offset = true is for norm_type = "rmsnorm", not "{self.norm_type}"'
        if self.qk_norm_scope != "head" and not self.qk_norm:
            yield f'qk_norm_scope = "{self.qk_norm_scope}" has no effect without qk_norm = true'
        if self.mup_base_head_dim is not None and self.mup_base_width is None:
            yield (
                f"mup_base_head_dim = {self.mup_base_head_dim} has no effect without "
                "mup_base_width: set that to the dim of the model that was tuned, or remove it"
            )
        yield from self._window_problems()
        if self.num_experts:
            yield from self._expert_problems()

    def _rotary_problems(self) -> Iterator[str]:
        scaling, size = self.rope_scaling, self.rotary_size
        if self.partial_rotary_factor < 1 and (size % 2 or not size):
            yield (
                f"partial_rotary_factor = {self.partial_rotary_factor} turns {size} of "
                f"{self.head_size} channels, which must be even and above 0: they are paired"
            )
        elif size % 2:
            share = f"dim / n_heads = {self.dim} / {self.n_heads}"
            yield (
                f"{'head_dim' if self.head_dim else share} = {self.head_size} must be even: "
                "rotary positions pair the two halves of a head"
            )
        if scaling is None:
            return
        for key in ("short_factor", "long_factor") if scaling.rope_type == "longrope" else ():
            if len(getattr(scaling, key)) != size // 2:
                yield (
                    f"rope_scaling.{key} has {len(getattr(scaling, key))} numbers, and there are "
                    f"{size // 2} pairs of channels"
                )
        if scaling.rope_type == "yarn" and self.rope_theta <= 1:
            yield f'rope_theta = {self.rope_theta} must be over 1 with rope_type = "yarn"'

    def _unused_rotary_keys(self) -> Iterator[str]:
        keys = ("rope_scaling", "rope_pattern", "local_rope_theta", "partial_rotary_factor")
        plain = type(self).model_fields
        for key in keys:
            if getattr(self, key) != plain[key].default:
                yield f'{key} has no effect with position_embedding = "learned": remove it'

    def _window_problems(self) -> Iterator[str]:
        for kind, key in (("sliding", "sliding_window"), ("chunked", "attention_chunk_size")):
            has_kind, tokens = kind in self.attention_pattern, getattr(self, key)
            if has_kind and tokens is None:
                yield f'attention_pattern has "{kind}", which needs {key}'
            if self.attention_pattern and not has_kind and tokens is not None:
                yield (f'{key} = {tokens} has no effect: no layer of attention_pattern is "{kind}"')
        both = self.sliding_window is not None and self.attention_chunk_size is not None
        if both and not self.attention_pattern:
            yield (
                "sliding_window and attention_chunk_size are for different layers: say with "
                'attention_pattern which are "sliding" and which "chunked", or leave one out'
            )
        if self.local_rope_theta is not None and self.sliding_window is None:
            yield (
                f"local_rope_theta = {self.local_rope_theta} is for sliding layers, and there are "
                "none: set sliding_window"
            )

    def _expert_problems(self) -> Iterator[str | Problem]:
        experts, groups = self.num_experts, self.moe_groups
        if not 0 < self.moe_top_k <= experts:
            yield Problem(
                f"moe_top_k = {self.moe_top_k} must be from 1 to num_experts = {experts}",
                (
                    single_change("moe_top_k", min(experts, max(1, self.moe_top_k))),
                    single_change("num_experts", max(experts, self.moe_top_k)),
                ),
            )
            return
        if self.moe_frequency == 0:
            yield "moe_frequency = 0 must be at least 1 when num_experts > 0"
        elif not any(self.has_experts):
            yield (
                f"no layer has experts with moe_frequency = {self.moe_frequency} and "
                f"moe_first_dense_layers = {self.moe_first_dense_layers} in n_layers = "
                f"{self.n_layers}: lower them, or set num_experts = 0"
            )
        if experts % groups:
            yield Problem(
                f"num_experts = {experts} must be a multiple of moe_groups = {groups}",
                (
                    multiples("num_experts", experts, groups),
                    nearest("moe_groups", groups, divisors(experts)),
                ),
            )
        elif not self.moe_top_k_groups <= groups:
            yield (
                f"moe_top_k_groups = {self.moe_top_k_groups} must be at most moe_groups = {groups}"
            )
        elif self.moe_top_k > experts // groups * self.moe_top_k_groups:
            yield (
                f"moe_top_k = {self.moe_top_k} is more than the {experts // groups} experts of "
                f"each of moe_top_k_groups = {self.moe_top_k_groups} groups"
            )
        if self.bias_update == "kempnerforge" and self.moe_router != "sigmoid_topk":
            yield 'moe_bias_update = "kempnerforge" needs moe_router = "sigmoid_topk"'
        for key in ("moe_shared_expert_dim", "moe_shared_expert_gate"):
            if getattr(self, key) and not self.moe_shared_experts:
                yield f"{key} has no effect with moe_shared_experts = 0"
