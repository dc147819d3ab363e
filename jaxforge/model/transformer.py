"""The decoder as pure functions; by default Llama's shape (pre-norm, rotary, SwiGLU).

Shape suffixes used in all model code, one letter per dimension:

    B batch     S sequence (queries)   T keys      D model   L layers   V vocabulary
    H heads     K key/value heads      h head      F feed-forward

Modules declare parameters (`network.py`); `Model` splits the declaration once into a static
definition and a plain pytree, and everything below it is a pure function of that pytree. Layers
are stacked along a leading axis and run by `lax.scan`, so that compile time does not grow with
depth.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.aux_outputs import AuxOutputs, LossWeights
from jaxforge.config.job import JobConfig
from jaxforge.config.model import EXPERTS, LAYERS, MODELS, ModelConfig
from jaxforge.kernels.masking import padding_of, positions_in_documents
from jaxforge.kernels.scoring import soft_cap
from jaxforge.model import fp8_layers, moe, mup, remat
from jaxforge.model.attention import NO_CAPTURE, Capture, Context, KVCache, LayerOut, LayerSettings
from jaxforge.model.layer_scan import Layer, Rows, flattened, parts_of
from jaxforge.model.linear import Backward, Declare, Untrained, times
from jaxforge.model.network import Transformer, gather_sequence, split_sequence
from jaxforge.model.plan import LayerKind, plan_of
from jaxforge.model.rope import rotations
from jaxforge.model.runtime import Runtime, gpu_capability, runtime_for
from jaxforge.parallel.mesh import STAGES
from jaxforge.parallel.sharding import automatic_axes, constrain
from jaxforge.parallel.stages import Stack, forward_pipeline

_COMPUTE_DTYPES = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "fp8": jnp.bfloat16,
}

Params = dict[str, Any]
"""Parameters: nested dicts of arrays, keyed by module and parameter name."""

Batch = Mapping[str, Any]
"""A microbatch by field: `input_ids`, `labels` [b, s], and whatever else the data have."""


class Declared(NamedTuple):
    """Arrays of a model, before there are any.

    Attributes:
        abstract: shapes and dtypes, as `jax.ShapeDtypeStruct`.
        axes: the same tree with the logical axes of each.
    """

    abstract: Params
    axes: Params


class Model:
    """Decoder as pure functions of a plain pytree of parameters.

    Args:
        config: the `[model]` section.
        dtype: dtype of activations and matrix products.
        param_dtype: dtype that parameters are stored in.
        runtime: how the layers are run; by default as the tests' reference is.
        stack: which layers pipeline stages hold; by default there is one stage.
        recipe: of products in 8 bits; None: there are none.

    Attributes:
        runtime: how the layers are run.
        plan: the kind of each layer.
        stack: which layer each row of stacked parameters holds.
        abstract: parameters as `jax.ShapeDtypeStruct`.
        axes: the same tree with each parameter's logical axes.
        state: what is not trained; functions of parameters take both (`join`).
    """

    network: ClassVar[Callable[[ModelConfig, Declare], nnx.Module]] = Transformer
    """Declares the parameters. A subclass may have another one, of the same parts."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        runtime: Runtime | None = None,
        stack: Stack | None = None,
        recipe: fp8_layers.Recipe | None = None,
    ) -> None:
        self.recipe = recipe
        self.config, self.dtype, self.runtime = config, dtype, runtime or Runtime()
        self.plan, self.stack = plan_of(config), stack or Stack(config.n_layers)
        if recipe is not None:
            self.plan = fp8_layers.marked(self.plan, recipe)
        self._param_dtype = param_dtype
        module = nnx.eval_shape(lambda: self._declare(jax.random.key(0)))
        self._definitions = {
            name: nnx.split(getattr(module, name))[0]
            for name in ("token_embedding", "position_embedding", *config.stacks, "norm")
            if hasattr(module, name)
        }
        self.abstract, self.axes = self._declared(nnx.state(module, nnx.Param))
        self.state = self._declared(nnx.state(module, Untrained))

    def _declare(self, key: Array) -> nnx.Module:
        runtime = self.runtime
        backward = Backward(runtime.reduce_dtype, not remat.recomputes(runtime.save))
        declare = Declare(
            nnx.Rngs(params=key),
            self._param_dtype,
            backward=backward,
            init_factor=functools.partial(mup.init_factor, self.config),
            splits_sequences=runtime.splits_sequences,
        )
        module = type(self).network(self.config, declare)
        if self.recipe is not None:
            fp8_layers.convert(module, self.config, self.recipe, declare)
        return module

    def _declared(self, state: nnx.State) -> Declared:
        axes = jax.tree.map(
            lambda leaf: leaf.get_metadata("axes"),
            state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
        arrays = jax.eval_shape(self._stacked, nnx.to_pure_dict(state))
        return Declared(arrays, nnx.to_pure_dict(axes))

    def init(self, key: Array) -> Params:
        """Initial parameters: N(0, init_std), residual matrices N(0, init_std/√(2L)), norms 1.

        Of another width than muP's base, hidden matrices have another factor (`mup.init_factor`).
        """
        return self._stacked(nnx.to_pure_dict(nnx.state(self._declare(key), nnx.Param)))

    def initial_state(self) -> Params:
        """Return the initial non-trainable state."""
        if not self.state.abstract:
            return {}
        state = nnx.state(self._declare(jax.random.key(0)), Untrained)
        return self._stacked(nnx.to_pure_dict(state))

    @property
    def scales_loss(self) -> bool:
        """Return whether gradients would underflow in the compute dtype without loss scaling."""
        return self.dtype == jnp.float16

    def next_state(self, state: Params, stats: Params, progress: Float[Array, ""]) -> Params:
        """Return the non-trainable state after an update.

        Args:
            state: before it.
            stats: what its parts told; those of layers under LAYERS, by row.
            progress: the share of the run's steps that is behind, 0 to 1.
        """
        if self.config.has_router_state:
            state = moe.next_state(self.config, state, stats[LAYERS], progress)
        if self.remembers_amax:
            state = fp8_layers.next_histories(self.config, state, stats[LAYERS]["amax"])
        return state

    @property
    def remembers_amax(self) -> bool:
        """Return whether 8-bit products are scaled by the amax of earlier updates."""
        return self.recipe is not None and self.recipe.scaling == "delayed"

    def next_params(self, params: Params, state: Params, progress: Float[Array, ""]) -> Params:
        """Parameters after an update, moved by what is not trained.

        Args:
            params: as the optimizer leaves them.
            state: what is not trained, after the update.
            progress: as of `next_state`.
        """
        return moe.next_params(self.config, params, state, progress)

    def _stacked(self, arrays: Params) -> Params:
        layers = {name: arrays[name] for name in self.config.stacks if name in arrays}
        return {**arrays, **jax.tree.map(self.stack.stack, layers)}

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "b s"],
        segment_ids: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b s d"]:
        """Final hidden states of whole sequences. `segment_ids` keeps packed documents apart."""
        return self.forward(params, {"input_ids": tokens, "segment_ids": segment_ids})[0]

    def forward(
        self,
        params: Params,
        batch: Batch,
        loss_weights: LossWeights | None = None,
        cache: KVCache | None = None,
        lengths: Int[Array, "b 1"] | None = None,
        capture: Capture = NO_CAPTURE,
    ) -> tuple[Float[Array, "b s d"], LayerOut]:
        """Return final hidden states of a microbatch, and the stacked outputs of its layers.

        Args:
            params: the parameters, and what is not trained among them (`join`).
            batch: the microbatch.
            loss_weights: what terms of the loss count for; None where nothing is trained.
            cache: what came before the tokens, which then have "positions" in the batch.
            lengths: as of `context`.
            capture: the activations to return.
        """
        x_BSD = self.embed(params, batch)
        context = self.context_of(x_BSD, batch, lengths=lengths, loss_weights=loss_weights)
        layer = functools.partial(self._layer, context, capture)
        if self.stack.stages > 1 and STAGES in automatic_axes():
            kinds = jax.tree.map(jnp.asarray, self.plan.of_rows(self.stack))
            run = functools.partial(self._run_stage, capture)
            rows = kinds, params[LAYERS]
            x_BSD, cache, outputs = forward_pipeline(run, self.stack, rows, x_BSD, context, cache)
            out = LayerOut(cache, *outputs)
        elif self.plan.is_uniform:
            run_layer, rows = layer(self.plan.layers[0], LAYERS, True), (params[LAYERS], cache)
            x_BSD, out = jax.lax.scan(run_layer, x_BSD, rows, unroll=self.runtime.unroll)
        else:
            rows = Rows({name: params[name] for name in self.config.stacks}, cache)
            outs = []
            for part in parts_of(self.plan, layer, rows, self.runtime.unroll):
                x_BSD, out = part.run(x_BSD)
                outs.append(flattened(out) if part.is_scanned else out)
            out = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outs)
        return self.final_norm(params, x_BSD), out

    def extend(
        self,
        params: Params,
        tokens: Int[Array, "b s"],
        positions: Int[Array, "b s"],
        cache: KVCache,
        only: Int[Array, "b"] | None = None,
        is_padding: Bool[Array, "b s"] | None = None,
    ) -> tuple[Float[Array, "b s v"], KVCache]:
        """Logits (float32) of new tokens at `positions`, and the cache that now holds them.

        `only` names one of the new tokens in each row: no other token's logits are computed.
        Tokens of `is_padding` go to no expert.
        """
        last = positions[:, -1:]
        if only is not None:
            last = jnp.take_along_axis(positions, only[:, None], axis=1)
        batch = {"input_ids": tokens, "positions": positions, "is_padding": is_padding}
        hidden_BSD, out = self.forward(params, batch, cache=cache, lengths=last + 1)
        assert out.cache is not None
        if only is not None:
            hidden_BSD = jnp.take_along_axis(hidden_BSD, only[:, None, None], axis=1)
        return self.logits(params, hidden_BSD), out.cache

    def embed(self, params: Params, batch: Batch) -> Float[Array, "b s d"]:
        """Return the input of the first block for a microbatch.

        Where positions are learned, those of "positions", or else of each packed document from 0
        on, are added to the embeddings.
        """
        tokens = batch["input_ids"]
        x_BSD = self.embed_tokens(params, tokens)
        if self.config.position_embedding != "learned":
            return x_BSD
        positions = batch.get("positions")
        if positions is None:
            batch_size, length = tokens.shape
            positions = positions_in_documents(batch_size, length, batch.get("segment_ids"))
        position_embedding = self.module("position_embedding", params["position_embedding"])
        return split_sequence(x_BSD + position_embedding(positions, self.dtype))

    def embed_tokens(self, params: Params, tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """The embeddings of tokens."""
        token_embedding = self.module("token_embedding", params["token_embedding"])
        x_BSD = split_sequence(token_embedding.embedding(tokens, self.dtype))
        return times(x_BSD, self.config.embedding_multiplier)

    def context(
        self,
        x_BSD: Float[Array, "b s d"],
        *,
        positions: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        lengths: Int[Array, "b 1"] | None = None,
        loss_weights: LossWeights | None = None,
    ) -> Context:
        """Return the properties of the tokens `x` that all blocks share.

        `lengths` are those of whole sequences, by which some rotary positions go; by default, as
        many tokens as there are in `x`.
        """
        at = jnp.arange(x_BSD.shape[1])[None] if positions is None else positions
        turns = rotations(self.plan.ropes, self.config.rotary_size, at, lengths)
        return Context(positions, segment_ids, turns, loss_weights)

    def context_of(
        self,
        x_BSD: Float[Array, "b s d"],
        batch: Batch,
        *,
        lengths: Int[Array, "b 1"] | None = None,
        loss_weights: LossWeights | None = None,
    ) -> Context:
        """`context` of a microbatch, with the padding that experts must not see."""
        of_tokens = {name: batch.get(name) for name in ("positions", "segment_ids")}
        context = self.context(x_BSD, **of_tokens, lengths=lengths, loss_weights=loss_weights)
        return context._replace(is_padding=padding_of(batch)) if self.config.is_moe else context

    def _layer(
        self, context: Context, capture: Capture, kind: LayerKind, stack: str, in_loop: bool
    ) -> Layer:
        """Return the function of a layer of a stack, rematerialized as the runtime says."""
        settings = LayerSettings(kind, self.plan, self.runtime, capture)

        def run_layer(x_BSD: Array, row: tuple[Params, KVCache | None]) -> tuple[Array, LayerOut]:
            params, cache = row
            x_BSD = remat.name_input(x_BSD)
            x_BSD, out = self.module(stack, params)(x_BSD, context, cache, settings=settings)
            residual = capture.collect({"residual": x_BSD})
            return x_BSD, out._replace(activations={**out.activations, **residual})

        save, offload = self.runtime.save, self.runtime.offload
        return remat.block(save, run_layer, in_loop=in_loop, offload=offload)

    def _run_stage(
        self,
        capture: Capture,
        layers: tuple[LayerKind, Params],
        x: Array,
        context: Context,
        cache: KVCache | None,
    ) -> tuple[Array, KVCache | None, tuple[AuxOutputs, PyTree]]:
        def run_layer(x: Array, row: tuple[tuple[LayerKind, Params], KVCache | None]) -> Any:  # noqa: ANN401
            (kind, params), cache = row
            return self._layer(context, capture, kind, LAYERS, True)(x, (params, cache))

        x, (cache, *outputs) = jax.lax.scan(run_layer, x, (layers, cache))
        return x, cache, tuple(outputs)

    def final_norm(self, params: Params, x_BSD: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Return the scaled final norm of the last block's output, the input of `head`."""
        hidden_BSD = self.module("norm", params["norm"])(x_BSD)
        scale = mup.output_multiplier(self.config) / self.config.logits_scaling
        return gather_sequence(times(hidden_BSD, scale))

    def module(self, name: str, params: Params) -> Any:  # noqa: ANN401  # any of these
        """Return a module of the network with its parameters, such as a layer of `LAYERS`."""
        return nnx.merge(self._definitions[name], params)

    def head(self, params: Params) -> Float[Array, "v d"]:
        """The output projection: its own matrix, or the embedding where tied."""
        if self.config.tie_embeddings:
            return params["token_embedding"]["embedding"]["weight"]
        return params["output_head"]["proj"]["weight"]

    def logits(self, params: Params, hidden_BSD: Float[Array, "b s d"]) -> Float[Array, "b s v"]:
        """Next-token logits in float32, capped as the model has it.

        In a pipeline stage, `params` has a share of the head, and the logits are of that share.
        """
        return project(hidden_BSD, self.head(params), self.config.final_logit_softcap)

    def empty_cache(self, batch: int, length: int) -> KVCache:
        """A cache for `batch` sequences of up to `length` tokens, stacked as the layers are."""
        c, rows = self.config, len(self.stack.rows())
        shape = (rows, batch, length, c.kv_heads, c.head_size)
        return KVCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))


def join(params: Params, state: Params) -> Params:
    """Parameters, and what is not trained in its places among them."""
    if not state:
        return params
    return unflatten_dict({**flatten_dict(params), **flatten_dict(state)})


AnyModel = TypeVar("AnyModel", bound=Model)


def build_model(
    config: JobConfig, platform: str | None = None, capability: str | None = None
) -> Model:
    """The model that `[model]` and `[train]` ask for, run as its platform likes it.

    Args:
        config: a validated config.
        platform: "cpu", "gpu" or "tpu"; by default that of JAX's first device.
        capability: compute capability of GPUs that are not here.

    Raises:
        UserError: a kernel asked for cannot serve.
    """
    if platform is None:
        platform, capability = jax.default_backend(), gpu_capability(jax.devices()[0])
    t, d = config.train, config.distributed
    dtype = _COMPUTE_DTYPES[t.mixed_precision]
    runtime = runtime_for(config, dtype, platform, capability)
    stack = Stack(config.model.n_layers, d.pp, d.chunks)
    build = MODELS[config.model.model_type]
    recipe = fp8_layers.Recipe.of(t)
    if recipe is not None:
        fp8_layers.describe_products(recipe, platform, capability, "")
    return build(config.model, dtype=dtype, param_dtype=jnp.dtype(t.param_dtype), runtime=runtime,
                 stack=stack, **({} if recipe is None else {"recipe": recipe}))  # fmt: skip


def register_model(name: str) -> Callable[[type[AnyModel]], type[AnyModel]]:
    """Decorates the subclass of `Model` that `model.model_type` calls `name`.

    Training, evaluation and generation call `embed` and `context`, the layers of `network`,
    `final_norm` for their output, and `head` for the matrix that computes logits.
    """
    return MODELS.register(name)


register_model("transformer")(Model)


def matmul_precision(config: JobConfig) -> contextlib.AbstractContextManager[None]:
    """float32 means float32: by default GPUs would multiply in tf32, and TPUs in bfloat16."""
    exact = config.train.mixed_precision == "fp32"
    return jax.default_matmul_precision("highest" if exact else "default")


def project(
    hidden: Float[Array, "*t d"], head_VD: Float[Array, "v d"], softcap: float | None
) -> Float[Array, "*t v"]:
    """Multiplies hidden · headᵀ: operands in the dtype of `hidden`, result in float32.

    Args:
        hidden: final hidden states.
        head_VD: the output projection, or some rows of it.
        softcap: `model.final_logit_softcap`, which nobody who makes logits may forget.
    """
    logits = jnp.einsum(
        "...d,vd->...v",
        hidden,
        head_VD.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    tokens = ("tokens",) if logits.ndim == 2 else ("batch", "context")
    return soft_cap(constrain(logits, *tokens, "vocab"), softcap)


def parameter_count(abstract: PyTree) -> int:
    """Number of parameters, each counted once."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract))


def active_parameter_count(model: Model) -> int:
    """Number of parameters that a token meets: of experts, those that it goes to."""
    c, axes = model.config, flatten_dict(model.axes)
    return sum(
        leaf.size * c.moe_top_k // c.num_experts if EXPERTS in axes[path] else leaf.size
        for path, leaf in flatten_dict(model.abstract).items()
    )
