"""Modules of a decoder: declarations of the parameters, and the forward pass of a block."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.aux_outputs import AuxOutputs, Max, join
from jaxforge.config.eval import ATTENTION_WEIGHTS, MAX_LOGITS
from jaxforge.config.model import LayerParts, ModelConfig
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model import remat
from jaxforge.model.hyper_connections import CONNECTIONS, HyperConnection, Mixing, StreamHead
from jaxforge.model.layer import Capture, Context, LayerOut, LayerSettings
from jaxforge.model.layer_embeddings import LayerEmbedding, LayerEmbeddings
from jaxforge.model.linear import Declare, Embedding, Linear, look_up, normal, times
from jaxforge.model.mixer import MixerOut, add_outputs, states_by_mixer
from jaxforge.model.mixers import mixer_class
from jaxforge.model.mlp import MLP
from jaxforge.model.moe import MoE, empty_expert_aux
from jaxforge.model.norm import LayerNorm, RMSNorm, apply_norm, apply_output_norm, build_norm
from jaxforge.model.plan import LayerKind
from jaxforge.model.runtime import Runtime
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import constrain, gather_over_tp, split_over_tp


class TokenEmbedding(nnx.Module):
    """Token embedding, nested one level as in KempnerForge's parameter names."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = config
        self.embedding = Embedding(c.vocab_size, c.dim, std=c.init_std, declare=declare)


class OutputHead(nnx.Module):
    """Projection to logits; models with tied embeddings have none."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        out, inp = (config.vocab_size, "vocab"), (config.dim, "embed")
        self.proj = Linear(out, inp, std=config.init_std, declare=declare)


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
    """Block x += mixer(norm(x)); x += mlp(norm(x)), declared for all layers of a stack at once.

    The mixer is an attribute named after itself, such as `attention`. Several mixers are attributes
    each, and their outputs are added. Norms may instead follow the two parts (post-norm), or come
    before and after. With `parallel_residual`, mixer and mlp read the same x, and with
    `shared_norm` also the same norm(x). A block may lack one of its parts. With
    `hyper_connections`, x is several streams of the residual in one dimension. With
    `layer_embedding_dim`, a term of the tokens' embeddings for this layer follows the mlp, and with
    `layer_multipliers` a constant factor of the sum.

    Args:
        config: the model.
        declare: declares the parameters.
        parts: mixer and feed-forward of the layers; by default those of the first layer.

    Attributes:
        fp8_names: names of the linear layers in 8 bits in any stack, set by `fp8_layers.convert`.
            None: the model has none.
        records_amax: whether training records the amax of these layers.
        records_max_logits: whether training records the largest attention logit of each head.
    """

    def __init__(
        self, config: ModelConfig, declare: Declare, parts: LayerParts | None = None
    ) -> None:
        self.parts = parts or config.layer_parts[0]
        before = config.norm_placement != "post"
        after = config.norm_placement != "pre"
        has_mixer, has_mlp = bool(self.parts.mixers), self.parts.feed_forward != "none"
        has_experts = self.parts.feed_forward == "experts"
        separate = before and not config.shared_norm
        normalizes = separate and has_mlp and not (has_experts and config.moe_separate_norms)
        self.shared_norm = build_norm(config, declare) if config.shared_norm else None
        self.attention_norm = build_norm(config, declare) if separate and has_mixer else None
        for name in self.parts.mixers:
            setattr(self, name, mixer_class(name)(config, declare))
        self.attention_post_norm = build_norm(config, declare) if after and has_mixer else None
        self.mlp_norm = build_norm(config, declare) if normalizes else None
        self.mlp = _build_feed_forward(self.parts, config, declare)
        self.mlp_post_norm = build_norm(config, declare) if after and has_mlp else None
        connection = CONNECTIONS.get(config.hyper_connections)
        self.attention_connection, self.mlp_connection = (
            connection(config, declare, part) if connection and has_part else None
            for part, has_part in enumerate((has_mixer, has_mlp))
        )
        has_embedding = config.layer_embedding_dim is not None
        self.layer_embedding = LayerEmbedding(config, declare) if has_embedding else None
        if config.layer_multipliers:
            self.multiplier = declare.untrained((1,), (None,), jax.nn.initializers.ones)
        self.config = config
        self.fp8_names: tuple[str, ...] | None = None
        self.records_amax = self.records_max_logits = False

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: PyTree = None,
        *,
        settings: LayerSettings,
        precision: LayerPrecision | None = None,
        embedding: Float[Array, "b s p"] | None = None,
    ) -> tuple[Float[Array, "b s d"], LayerOut]:
        """Run one layer.

        Args:
            x_BSD: residual stream, or streams.
            context: properties of the tokens.
            cache: decoding state; None in training and evaluation.
            settings: settings of the layer.
            precision: `self.precision(...)`, if a subclass has called it.
            embedding: embeddings of the tokens for this layer, with `layer_embedding_dim`.
        """
        precision = precision or self.precision(settings.kind, context)
        is_parallel, normed_BSD = self.config.parallel_residual, x_BSD
        records_logits = self.records_max_logits and context.loss_weights is not None
        of_mixer = settings.with_point(MAX_LOGITS) if records_logits else settings
        mixed, y_BSD, mixing = MixerOut(x_BSD), None, None
        if mixers := self.parts.mixers:
            input_BSD, mixing = _read(self.attention_connection, x_BSD)
            normed_BSD = _normed(self.shared_norm or self.attention_norm, input_BSD)
            outs = {}
            for name, state in states_by_mixer(cache, mixers).items():
                mix = self._mixer(name, of_mixer, precision)
                outs[name] = mix(normed_BSD, context, state)
            mixed = add_outputs(outs, self.config.mixer_multipliers)
            y_BSD = self._residual_term(self.attention_post_norm, mixed.y)
        if not is_parallel:
            x_BSD = _write(self.attention_connection, x_BSD, y_BSD, mixing)
        entering, mixing = normed_BSD, None
        if self.shared_norm is None:
            entering, mixing = _read(self.mlp_connection, x_BSD)
        runtime = settings.runtime
        if cache is not None:  # tokens that extend a cache are in the order of the sequence
            runtime = runtime._replace(context="ulysses")
        z_BSD, of_experts = self._feed_forward(entering, context, runtime, precision)
        aux = join(of_experts, mixed.aux)
        if context.loss_weights is not None:  # all layers of a scan return the same names
            absent = set(self.config.mixers) - set(mixers)
            aux = join(aux, *(mixer_class(name).empty_aux(self.config) for name in sorted(absent)))
        x_BSD = _add(x_BSD, y_BSD if is_parallel else None)
        x_BSD = _write(self.mlp_connection, x_BSD, z_BSD, mixing)
        if self.layer_embedding is not None:
            assert embedding is not None
            x_BSD = x_BSD + self.layer_embedding(x_BSD, embedding, precision)
        if self.config.layer_multipliers:
            x_BSD = x_BSD * self.multiplier[...].astype(x_BSD.dtype)
        if precision and precision.records_amax:
            # Scan outputs of all layers need the same names; this layer may be in bf16, or belong
            # to a stack with other names.
            amax = {name: Max(jnp.zeros(2)) for name in self.fp8_names or ()} | precision.amax
            aux = aux._replace(statistics={**aux.statistics, "amax": amax})
        if records_logits:
            heads = jnp.zeros((1, self.config.n_heads))  # of a layer without logits
            largest = Max(jnp.max(mixed.captured.get(MAX_LOGITS, heads), axis=0, initial=0.0))
            aux = aux._replace(statistics={**aux.statistics, MAX_LOGITS: largest})
        values = {"attention": y_BSD, "mlp": z_BSD, **mixed.captured}
        captured = self._captured(values, x_BSD, settings.capture)
        keys = {self.parts.mixer: mixed.keys} if settings.passes_keys else None
        return x_BSD, LayerOut(mixed.cache, aux, captured, keys)

    def _mixer(
        self, name: str, settings: LayerSettings, precision: LayerPrecision | None
    ) -> Callable[..., MixerOut]:
        """Return a mixer, rematerialized if only its inside is."""
        save = settings.runtime.save
        mix = functools.partial(getattr(self, name), settings=settings)
        if precision and save == "selective":
            return functools.partial(_rematerialized, mix, precision)
        return remat.attention(save, functools.partial(mix, precision=precision))

    def _captured(
        self, values: Mapping[str, Array | None], x_BSD: Float[Array, "b s d"], capture: Capture
    ) -> dict[str, Array]:
        """Return the captured values; zeros for values that only other layers have."""
        batch, length, _ = x_BSD.shape
        heads, of_parts = (batch, self.config.n_heads), (batch, length, self.config.dim)
        shapes = {
            "attention": of_parts, "mlp": of_parts,
            ATTENTION_WEIGHTS: (*heads, length, length), MAX_LOGITS: heads,
        }  # fmt: skip
        zeros = {
            name: jnp.zeros(shape, x_BSD.dtype)
            for name, shape in shapes.items()
            if name in capture.points and values.get(name) is None
        }
        return capture.collect({**values, **zeros})

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
        x_BSD: Float[Array, "b s d"],
        context: Context,
        runtime: Runtime,
        precision: LayerPrecision | None,
    ) -> tuple[Float[Array, "b s d"] | None, AuxOutputs]:
        """Return the residual term and auxiliary outputs of the feed-forward, if there is one."""
        if isinstance(self.mlp, MoE):
            y_BSD, aux = self.mlp(
                _normed(self.mlp_norm, x_BSD), context.loss_weights, runtime.grouped,
                context.is_padding, precision, runtime.context,
            )  # fmt: skip
            return self._residual_term(self.mlp_post_norm, y_BSD), aux
        z_BSD, aux = None, AuxOutputs()
        if self.mlp is not None:
            y_BSD = self.mlp(_normed(self.mlp_norm, x_BSD), precision)
            z_BSD = self._residual_term(self.mlp_post_norm, y_BSD)
        if self.config.is_moe and context.loss_weights is not None:
            aux = empty_expert_aux(self.config)  # same names as layers with experts
        return z_BSD, aux

    def _residual_term(
        self, norm: RMSNorm | LayerNorm | None, y_BSD: Float[Array, "b s d"]
    ) -> Float[Array, "b s d"]:
        """Return the term that is added to the residual stream."""
        return times(apply_output_norm(norm, y_BSD), self.config.residual_multiplier)


class PredictionBlock(Block):
    """Module of multi-token prediction (arXiv:2412.19437, section 2.2): a block with other inputs.

        x_t = input_proj [embedding_norm(embedding of token t + k); hidden_norm(h_t of depth k - 1)]
        h_t of depth k = Block(x)_t,  input of the output head: output_norm(h_t)

    It has the parts `ModelConfig.mtp_parts`. The columns of `input_proj` have the order of
    DeepSeek-V3's files, the embedding first; the paper writes it second.
    """

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        super().__init__(config, declare, config.mtp_parts)
        out, inp = (config.dim, "embed"), (2 * config.dim, "mlp")
        self.embedding_norm = build_norm(config, declare)
        self.hidden_norm = build_norm(config, declare)
        self.input_proj = Linear(out, inp, std=config.init_std, declare=declare)
        self.output_norm = build_norm(config, declare)

    def merge(
        self, embedding_BSD: Float[Array, "b s d"], hidden_BSD: Float[Array, "b s d"]
    ) -> Float[Array, "b s d"]:
        """Return the input of the block.

        Args:
            embedding_BSD: embedding of the token k positions later.
            hidden_BSD: representation of depth k - 1.
        """
        parts = self.embedding_norm(embedding_BSD), self.hidden_norm(hidden_BSD)
        both = constrain(jnp.concatenate(parts, axis=-1), "batch", "context", "mlp")
        return split_over_tp(self.input_proj(both))


class PredictionModules(nnx.Module):
    """Modules of multi-token prediction: attribute "0" predicts the token after the next one."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        for depth in range(config.mtp_depth):
            setattr(self, str(depth), PredictionBlock(config, declare))


class Transformer(nnx.Module):
    """Decoder: embedding, stacked blocks, final norm and output head."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        self.token_embedding = TokenEmbedding(config, declare)
        if config.position_embedding == "learned":
            self.position_embedding = PositionEmbedding(config, declare)
        if config.layer_embedding_dim:
            self.layer_embeddings = LayerEmbeddings(config, declare)
        for name, rows in config.stacks.items():
            stack_of_layers = declare._replace(layers=len(rows))
            setattr(self, name, Block(config, stack_of_layers, config.layer_parts[rows[0]]))
        self.norm = build_norm(config, declare)
        if not config.tie_embeddings:
            self.output_head = OutputHead(config, declare)
        if config.hyper_connections == "manifold":
            self.stream_head = StreamHead(config, declare)
        if config.mtp_depth:  # last, so that the other initial values do not depend on it
            self.mtp = PredictionModules(config, declare)


def _rematerialized(
    mix: Callable[..., MixerOut], precision: LayerPrecision, *inputs: PyTree
) -> MixerOut:
    """Run a mixer that records amax in `jax.checkpoint`, which values leave only as outputs."""

    def record(*inputs: PyTree) -> tuple[MixerOut, dict[str, Max]]:
        recorded = dataclasses.replace(precision, amax={})
        return mix(*inputs, precision=recorded), recorded.amax

    mixed, amax = remat.attention("selective", record)(*inputs)
    precision.amax.update(amax)
    return mixed


def _build_feed_forward(
    parts: LayerParts, config: ModelConfig, declare: Declare
) -> MoE | MLP | None:
    if parts.feed_forward == "none":
        return None
    if parts.feed_forward == "experts":
        return MoE(config, declare)
    return MLP(config, declare, width=config.dense_width(parts))


def _add(
    x_BSD: Float[Array, "b s d"], y_BSD: Float[Array, "b s d"] | None
) -> Float[Array, "b s d"]:
    return x_BSD if y_BSD is None else x_BSD + y_BSD


def _read(
    connection: HyperConnection | None, x_BSD: Float[Array, "b s d"]
) -> tuple[Float[Array, "b s d"], Mixing | None]:
    """Return the input of a part, and how its streams are mixed; one stream is read as it is."""
    return (x_BSD, None) if connection is None else connection.read(x_BSD)


def _write(
    connection: HyperConnection | None,
    x_BSD: Float[Array, "b s d"],
    y_BSD: Float[Array, "b s d"] | None,
    mixing: Mixing | None,
) -> Float[Array, "b s d"]:
    """Add the result of a part to the stream or streams; None: the layer lacks the part."""
    if connection is None or y_BSD is None:
        return split_over_tp(_add(x_BSD, y_BSD))
    assert mixing is not None
    return split_over_tp(connection.write(x_BSD, y_BSD, mixing))


def _normed(
    norm: RMSNorm | LayerNorm | None, x_BSD: Float[Array, "b s d"]
) -> Float[Array, "b s d"]:
    return gather_over_tp(apply_norm(norm, x_BSD))
