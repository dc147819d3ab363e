"""The modules that declare a decoder's parameters, and what a block does with them."""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxforge.aux_outputs import AuxOutputs
from jaxforge.config.model import ModelConfig
from jaxforge.config.points import ATTENTION_WEIGHTS
from jaxforge.kernels import fp8
from jaxforge.model import capture, remat
from jaxforge.model.attention import Attention, Context, KVCache, LayerOut
from jaxforge.model.linear import Declare, Embedding, Linear, look_up, normal, times
from jaxforge.model.mlp import MLP
from jaxforge.model.moe import MoE, empty_expert_aux
from jaxforge.model.norm import LayerNorm, RMSNorm, norm_of
from jaxforge.model.plan import LayerKind, LayerPlan
from jaxforge.model.runtime import Runtime
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import constrain


class TokenEmbedding(nnx.Module):
    """The embedding table, one level down as in KempnerForge's parameter names."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = config
        self.embedding = Embedding(c.vocab_size, c.dim, std=c.init_std, declare=declare)


class OutputHead(nnx.Module):
    """The projection to logits, absent when it is tied to the embedding."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        out, inp = (config.vocab_size, "vocab"), (config.dim, "embed")
        self.proj = Linear(out, inp, std=config.init_std, declare=declare)


class PositionEmbedding(nnx.Module):
    """The table of learned positions."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        shape, self.reduce_dtype = (config.max_seq_len, config.dim), declare.backward.dtype
        self.weight = declare(shape, _POSITIONS, normal(config.init_std))

    def __call__(self, positions: Int[Array, "b s"], dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Looks up positions; those beyond the table get its last row."""
        table = self.weight[...]
        return look_up(_at_positions, table, positions, _POSITIONS, dtype, self.reduce_dtype)


_POSITIONS = ("positions", "embed")


def _at_positions(table: Float[Array, "p d"], positions: Int[Array, "b s"]) -> Array:
    return constrain(collectives.all_gather_weight(table, _POSITIONS), None, None)[positions]


class Block(nnx.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). Declares all layers at once, runs one of them.

    Norms may come after attention and mlp instead, or on both sides; and both may read the same x.
    """

    def __init__(self, config: ModelConfig, declare: Declare, *, has_experts: bool = False) -> None:
        before = config.norm_placement != "post"
        after = config.norm_placement != "pre"
        self.attention_norm = norm_of(config, declare) if before else None
        self.attention = Attention(config, declare)
        self.attention_post_norm = norm_of(config, declare) if after else None
        self.mlp_norm = norm_of(config, declare) if before else None
        self.mlp = MoE(config, declare) if has_experts else MLP(config, declare)
        self.mlp_post_norm = norm_of(config, declare) if after else None
        self.config = config

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: KVCache | None = None,
        *,
        kind: LayerKind,
        plan: LayerPlan,
        runtime: Runtime,
    ) -> tuple[Float[Array, "b s d"], LayerOut]:
        """One layer."""
        attention = functools.partial(self.attention, kind=kind, plan=plan, runtime=runtime)
        # What is kept inside of attention does not leave a `jax.checkpoint` of its own.
        save = "none" if capture.is_wanted(ATTENTION_WEIGHTS) else runtime.save
        attend = remat.attention(save, fp8.telling(attention))
        (y_BSD, cache), told = attend(_normed(self.attention_norm, x_BSD), context, cache)
        fp8.tell(told)
        y_BSD = self._added(self.attention_post_norm, y_BSD, "attention")
        if self.config.parallel_residual:
            z_BSD, aux = self._feed_forward(x_BSD, context, runtime)
            return split_sequence(x_BSD + y_BSD + z_BSD), LayerOut(cache, aux)
        x_BSD = split_sequence(x_BSD + y_BSD)
        z_BSD, aux = self._feed_forward(x_BSD, context, runtime)
        return split_sequence(x_BSD + z_BSD), LayerOut(cache, aux)

    def _feed_forward(
        self, x_BSD: Float[Array, "b s d"], context: Context, runtime: Runtime
    ) -> tuple[Float[Array, "b s d"], AuxOutputs]:
        normed_BSD = _normed(self.mlp_norm, x_BSD)
        if isinstance(self.mlp, MoE):
            y_BSD, aux = self.mlp(
                normed_BSD, context.loss_weights, runtime.grouped, context.is_padding
            )
        else:
            y_BSD, aux = self.mlp(normed_BSD), self._empty_aux(context)
        return self._added(self.mlp_post_norm, y_BSD, "mlp"), aux

    def _empty_aux(self, context: Context) -> AuxOutputs:
        """What a layer without experts tells: zeros, where others have some."""
        is_told = self.config.is_moe and context.loss_weights is not None
        return empty_expert_aux(self.config) if is_told else AuxOutputs()

    def _added(
        self, norm: RMSNorm | LayerNorm | None, y_BSD: Float[Array, "b s d"], name: str
    ) -> Float[Array, "b s d"]:
        """What is added to the residual stream."""
        y_BSD = y_BSD if norm is None else norm(split_sequence(y_BSD))
        y_BSD = times(y_BSD, self.config.residual_multiplier)
        capture.point(name, y_BSD)
        return y_BSD


class Transformer(nnx.Module):
    """Declares the parameters: embedding, blocks, final norm, output head."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        self.token_embedding = TokenEmbedding(config, declare)
        if config.position_embedding == "learned":
            self.position_embedding = PositionEmbedding(config, declare)
        for name, rows in config.stacks.items():
            has_experts = config.has_experts[rows[0]]
            stack = Block(config, declare._replace(layers=len(rows)), has_experts=has_experts)
            setattr(self, name, stack)
        self.norm = norm_of(config, declare)
        if not config.tie_embeddings:
            self.output_head = OutputHead(config, declare)


def _normed(
    norm: RMSNorm | LayerNorm | None, x_BSD: Float[Array, "b s d"]
) -> Float[Array, "b s d"]:
    return gather_sequence(x_BSD if norm is None else norm(x_BSD))


def split_sequence(x_BSD: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
    """The residual stream as it lies between the parts of a block: tokens split over `tp`, too."""
    return constrain(x_BSD, "batch", "seq", None)


def gather_sequence(x_BSD: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
    """As attention and feed-forward take it: all tokens that the devices of `tp` share, on each."""
    return constrain(x_BSD, "batch", "context", None)
