"""Modules of a decoder: declarations of the parameters, and the forward pass of a block."""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxforge.aux_outputs import AuxOutputs, Max
from jaxforge.config.model import ModelConfig
from jaxforge.config.points import ATTENTION_WEIGHTS, MAX_LOGITS
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model import remat
from jaxforge.model.attention import Attention, Context, KVCache, LayerOut, LayerSettings
from jaxforge.model.linear import Declare, Embedding, Linear, look_up, normal, times
from jaxforge.model.mlp import MLP
from jaxforge.model.moe import MoE, empty_expert_aux
from jaxforge.model.norm import LayerNorm, RMSNorm, build_norm
from jaxforge.model.plan import LayerKind
from jaxforge.model.runtime import Runtime
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import constrain


class TokenEmbedding(nnx.Module):
    """Token embedding, nested one level as in KempnerForge's parameter names."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = config
        self.embedding = Embedding(c.vocab_size, c.dim, std=c.init_std, declare=declare)


class OutputHead(nnx.Module):
    """Projection to logits; models with tied embeddings have none."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        out, inp = (config.vocab_size, "vocab"), (config.dim, "embed")
        self.proj = Linear(out, inp, std=config.init_std, declare=declare, bias=config.head_bias)


class PositionEmbedding(nnx.Module):
    """Learned position embedding."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        shape, self.reduce_dtype = (config.max_seq_len, config.dim), declare.backward.dtype
        self.weight = declare(shape, _POSITIONS, normal(config.init_std))

    def __call__(self, positions: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Look up positions; positions beyond the table get its last row."""
        table = self.weight[...]
        return look_up(_at_positions, table, positions, _POSITIONS, dtype, self.reduce_dtype)


_POSITIONS = ("positions", "embed")


def _at_positions(table: Float[Array, "p d"], positions: Int[Array, "b s"]) -> Array:
    return constrain(collectives.all_gather_weight(table, _POSITIONS), None, None)[positions]


class Block(nnx.Module):
    """Block x += attention(norm(x)); x += mlp(norm(x)), declared for all layers of a stack at once.

    Norms may instead follow attention and mlp (post-norm), or come before and after. With
    `parallel_residual`, attention and mlp read the same x, and with `shared_norm` also the same
    norm(x).

    Attributes:
        fp8_names: names of the linear layers in 8 bits in any stack, set by `fp8_layers.convert`.
            None: the model has none.
        records_amax: whether training records the amax of these layers.
    """

    def __init__(self, config: ModelConfig, declare: Declare, *, has_experts: bool = False) -> None:
        before = config.norm_placement != "post"
        after = config.norm_placement != "pre"
        separate = before and not config.shared_norm
        self.shared_norm = build_norm(config, declare) if config.shared_norm else None
        self.attention_norm = build_norm(config, declare) if separate else None
        self.attention = Attention(config, declare)
        self.attention_post_norm = build_norm(config, declare) if after else None
        self.mlp_norm = build_norm(config, declare) if separate else None
        self.mlp = MoE(config, declare) if has_experts else MLP(config, declare)
        self.mlp_post_norm = build_norm(config, declare) if after else None
        self.config = config
        self.fp8_names: tuple[str, ...] | None = None
        self.records_amax = False

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: KVCache | None = None,
        *,
        settings: LayerSettings,
        precision: LayerPrecision | None = None,
    ) -> tuple[Float[Array, "b s d"], LayerOut]:
        """Run one layer; `precision` is `self.precision(...)`, if a subclass has called it."""
        precision = precision or self.precision(settings.kind, context)
        run = functools.partial(self.attention, settings=settings, precision=precision)
        attend = remat.attention(settings.runtime.save, run)
        normed_BSD = _normed(self.shared_norm or self.attention_norm, x_BSD)
        attended = attend(normed_BSD, context, cache)
        if precision:
            precision.amax.update(attended.amax)
        y_BSD = self._residual_term(self.attention_post_norm, attended.y)
        if not self.config.parallel_residual:
            x_BSD = split_sequence(x_BSD + y_BSD)
        if not self.config.shared_norm:
            normed_BSD = _normed(self.mlp_norm, x_BSD)
        z_BSD, aux = self._feed_forward(normed_BSD, context, settings.runtime, precision)
        x_BSD = x_BSD + y_BSD + z_BSD if self.config.parallel_residual else x_BSD + z_BSD
        x_BSD = split_sequence(x_BSD)
        if precision and precision.records_amax:
            # Scan outputs of all layers need the same names; this layer may be in bf16, or belong
            # to a stack with other names.
            amax = {name: Max(jnp.zeros(2)) for name in self.fp8_names or ()} | precision.amax
            aux = aux._replace(statistics={**aux.statistics, "amax": amax})
        values = {
            "attention": y_BSD, "mlp": z_BSD, ATTENTION_WEIGHTS: attended.weights,
            MAX_LOGITS: attended.max_logits,
        }  # fmt: skip
        activations = settings.capture.collect(values)
        return x_BSD, LayerOut(attended.cache, aux, activations)

    def precision(self, kind: LayerKind, context: Context) -> LayerPrecision | None:
        """Return the precision of a layer of a kind; None if no layer is in 8 bits."""
        if self.fp8_names is None:
            return None
        if kind.in_bf16 is None or isinstance(kind.in_bf16, bool):
            in_8_bits: bool | Array = not kind.in_bf16
        else:
            in_8_bits = jnp.logical_not(kind.in_bf16)
        return LayerPrecision(in_8_bits, self.records_amax and context.loss_weights is not None)

    def _feed_forward(
        self,
        normed_BSD: Float[Array, "b s d"],
        context: Context,
        runtime: Runtime,
        precision: LayerPrecision | None,
    ) -> tuple[Float[Array, "b s d"], AuxOutputs]:
        aux = AuxOutputs()
        if isinstance(self.mlp, MoE):
            y_BSD, aux = self.mlp(
                normed_BSD, context.loss_weights, runtime.grouped, context.is_padding, precision
            )
        else:
            y_BSD = self.mlp(normed_BSD, precision)
            if self.config.is_moe and context.loss_weights is not None:
                aux = empty_expert_aux(self.config)  # same names as layers with experts
        return self._residual_term(self.mlp_post_norm, y_BSD), aux

    def _residual_term(
        self, norm: RMSNorm | LayerNorm | None, y_BSD: Float[Array, "b s d"]
    ) -> Float[Array, "b s d"]:
        """Return the term that is added to the residual stream."""
        y_BSD = y_BSD if norm is None else norm(split_sequence(y_BSD))
        return times(y_BSD, self.config.residual_multiplier)


class Transformer(nnx.Module):
    """Decoder: embedding, stacked blocks, final norm and output head."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        self.token_embedding = TokenEmbedding(config, declare)
        if config.embedding_norm:
            self.token_embedding_norm = build_norm(config, declare)
        if config.position_embedding == "learned":
            self.position_embedding = PositionEmbedding(config, declare)
        for name, rows in config.stacks.items():
            has_experts = config.has_experts[rows[0]]
            stack = Block(config, declare._replace(layers=len(rows)), has_experts=has_experts)
            setattr(self, name, stack)
        self.norm = build_norm(config, declare)
        if not config.tie_embeddings:
            self.output_head = OutputHead(config, declare)


def _normed(
    norm: RMSNorm | LayerNorm | None, x_BSD: Float[Array, "b s d"]
) -> Float[Array, "b s d"]:
    return gather_sequence(x_BSD if norm is None else norm(x_BSD))


def split_sequence(x_BSD: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
    """Split the sequence over `tp`, as the residual stream is between the parts of a block."""
    return constrain(x_BSD, "batch", "seq", None)


def gather_sequence(x_BSD: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
    """Gather the sequence over `tp`: attention and feed-forward need all tokens on each device."""
    return constrain(x_BSD, "batch", "context", None)
