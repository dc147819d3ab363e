"""Decoder as pure functions; by default with Llama's structure (pre-norm, rotary, SwiGLU).

Shape suffixes of all model code, one letter per dimension:

    B batch     S sequence (queries)   T keys      D model   L layers   V vocabulary
    H heads     K key/value heads      h head      F feed-forward

Modules declare parameters (`network.py`). `Model` splits the declaration once into a static
definition and a plain pytree, and all functions below are pure functions of that pytree. Layers are
stacked along a leading axis and run by `lax.scan`, so that compile time does not grow with depth.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.aux_outputs import AuxOutputs, LossWeights
from jaxforge.config.fine_tuning import LoraConfig
from jaxforge.config.job import JobConfig
from jaxforge.config.model import EXPERTS, LAYERS, MODELS, MTP, ModelConfig
from jaxforge.kernels.masking import padding_of, positions_in_documents
from jaxforge.kernels.scoring import soft_cap
from jaxforge.model import fp8_layers, hyper_connections, lora, moe, mup, remat
from jaxforge.model.dropout import LAYER_NUMBER, MASK_KEYS, layer_keys
from jaxforge.model.layer import (
    NO_CAPTURE,
    Cache,
    Capture,
    Context,
    LayerOut,
    LayerSettings,
)
from jaxforge.model.layer_scan import (
    Layer,
    LayerGroup,
    LayerInputs,
    concatenate_outputs,
    join_periods,
    run_period,
    run_rows,
    run_unstacked,
    slice_layers,
    split_into_groups,
    split_periods,
    unstack,
)
from jaxforge.model.linear import (
    Backward,
    Declare,
    Untrained,
    is_decoding_step,
    parameter_keys,
    times,
)
from jaxforge.model.mixer import Mixer
from jaxforge.model.mixers import mixer_class
from jaxforge.model.network import Transformer
from jaxforge.model.plan import LayerKind, build_layer_plan
from jaxforge.model.rope import rotations
from jaxforge.model.runtime import Runtime, gpu_capability, runtime_for
from jaxforge.parallel import collectives
from jaxforge.parallel.mesh import STAGES
from jaxforge.parallel.sharding import automatic_axes, constrain, gather_over_tp, split_over_tp
from jaxforge.parallel.stages import Locations, Stack, forward_pipeline

_COMPUTE_DTYPES = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "fp8": jnp.bfloat16,
}

LAYER_EMBEDDINGS = "layer_embeddings"
"""Name of the parameter group of the embeddings that each layer has of tokens."""

EMBEDDINGS = ("token_embedding", "position_embedding", LAYER_EMBEDDINGS)
_STREAM_HEAD = "stream_head"
_EMBEDDING = "embedding of the tokens"  # among the inputs of a layer, next to its parameters

Params = dict[str, Any]
"""Parameters: nested dicts of arrays, keyed by module and parameter name."""

Batch = Mapping[str, Any]
"""Fields of a microbatch: `input_ids`, `labels` [b, s], and other fields of the data."""

FURTHER_TOKENS = "further_tokens"
"""Field of a batch: the tokens k = 1, 2, ... positions later, [b, s, depths] (`step.mtp`)."""


class Declared(NamedTuple):
    """Declared arrays of a model.

    Attributes:
        abstract: shapes and dtypes, as `jax.ShapeDtypeStruct`.
        axes: logical axes, in the same tree structure.
    """

    abstract: Params
    axes: Params


class Model:
    """Decoder as pure functions of a plain pytree of parameters.

    Args:
        config: the `[model]` section.
        dtype: dtype of activations and matrix products.
        param_dtype: dtype that parameters are stored in.
        runtime: execution choices; by default the reference of the tests.
        stack: layers of the pipeline stages; by default there is one stage.
        recipe: settings of products in 8 bits; None: there are none.
        adapters: settings of low-rank adapters; None: there are none.
        records_max_logits: whether training records the largest attention logit of each head, as
            the statistic `config.eval.MAX_LOGITS`.

    Attributes:
        runtime: execution choices.
        plan: kinds of the layers.
        stack: layer of each row of stacked parameters.
        abstract: parameters as `jax.ShapeDtypeStruct`.
        axes: logical axes of the parameters, in the same tree structure.
        state: declared non-trainable state; functions of parameters take both, joined by `join`.
    """

    network: ClassVar[Callable[[ModelConfig, Declare], nnx.Module]] = Transformer
    """Module that declares the parameters. A subclass may use another one with the same parts."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        runtime: Runtime | None = None,
        stack: Stack | None = None,
        recipe: fp8_layers.Recipe | None = None,
        adapters: LoraConfig | None = None,
        records_max_logits: bool = False,
    ) -> None:
        self.recipe, self.adapters = recipe, adapters
        self._records_max_logits = records_max_logits
        self.config, self.dtype, self.runtime = config, dtype, runtime or Runtime()
        self.plan = build_layer_plan(config)
        self.stack = (stack or Stack(config.n_layers))._replace(names=self.plan.stacks)
        if recipe is not None:
            self.plan = fp8_layers.mark_bf16_layers(self.plan, recipe)
        self._param_dtype = param_dtype
        # Shapes only. Functions of parameters merge the definition of a module with arrays.
        module = self._declare()
        self._definitions = {
            name: nnx.split(getattr(module, name))[0]
            for name in (*EMBEDDINGS, *config.stacks, _STREAM_HEAD, "norm")
            if hasattr(module, name)
        }
        if hasattr(module, MTP):  # all modules have the same definition
            self._definitions[MTP] = nnx.split(getattr(getattr(module, MTP), "0"))[0]
        self.abstract, self.axes = self._declared(nnx.state(module, nnx.Param))
        self.state = self._declared(nnx.state(module, Untrained))

    def _declare(self, key: Array | None = None) -> nnx.Module:
        runtime = self.runtime
        # Without recomputation, the backward pass gathers weights again, so as not to save them.
        regathers = not remat.recomputes(runtime.save)
        rounds = runtime.sent_dtype != runtime.reduce_dtype
        backward = Backward(runtime.reduce_dtype, regathers, rounds)
        declare = Declare(
            None if key is None else parameter_keys(key),
            self._param_dtype,
            backward=backward,
            init_factor=functools.partial(mup.init_factor, self.config),
            splits_sequences=runtime.splits_sequences,
            heads_in_products=runtime.heads_in_products,
            results_by_token=runtime.results_by_token,
        )
        module = type(self).network(self.config, declare)
        # Adapters come after the conversion to 8 bits: the base is converted, adapters are not.
        if self.recipe is not None:
            fp8_layers.convert(module, self.config, self.recipe, declare)
        if self.adapters is not None:
            lora.attach(module, self.config, self.adapters, declare)
        for stack in self.config.stacks:
            getattr(module, stack).records_max_logits = self._records_max_logits
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
        """Initialize parameters: N(0, init_std), residual matrices N(0, init_std/√(2L)), norms 1.

        Under muP, hidden matrices have a further factor (`mup.init_factor`).
        """
        return self._stacked(nnx.to_pure_dict(nnx.state(self._declare(key), nnx.Param)))

    def initial_state(self) -> Params:
        """Return the initial non-trainable state."""
        if not self.state.abstract:
            return {}
        state = nnx.state(self._declare(jax.random.key(0)), Untrained)
        return self._stacked(nnx.to_pure_dict(state))

    def with_frozen(self, paths: Set[tuple[str, ...]]) -> Self:
        """Return a view of the model that declares some parameters as non-trainable state.

        Args:
            paths: paths of these parameters.
        """
        view = copy.copy(self)
        trained, frozen = (
            Declared(*(_leaves_at(tree, paths, chosen) for tree in (self.abstract, self.axes)))
            for chosen in (False, True)
        )
        view.abstract, view.axes = trained
        # Frozen parameters are inputs like non-trainable state, so that no gradient is computed.
        view.state = Declared(*map(join, frozen, self.state))
        return view

    def with_layer_numbers(self) -> tuple[Self, Params]:
        """Return a view of the model for steps with dropout, and its further constant state.

        The state is the number of each layer (`LAYER_NUMBER`), on which masks depend. It is not
        part of the training state, and empty without dropout.
        """
        if self.adapters is None or not self.adapters.dropout:
            return self, {}
        numbers, axes = Params(), Params()
        for stack, layers in self.config.stacks.items():
            rows = self.stack.of(stack).rows()  # -1 in rows without a layer: any number will do
            numbers[stack] = {LAYER_NUMBER: np.asarray(layers, np.int32)[rows]}
            axes[stack] = {LAYER_NUMBER: (LAYERS,)}
        view = copy.copy(self)
        view.state = Declared(*map(join, self.state, (numbers, axes)))
        return view, numbers

    @property
    def declares_mtp(self) -> bool:
        """True if the network has modules of multi-token prediction, trained or frozen."""
        return MTP in self._definitions

    @property
    def scales_loss(self) -> bool:
        """True if gradients would underflow in the compute dtype without loss scaling."""
        return self.dtype == jnp.float16

    def next_state(self, state: Params, stats: Params, progress: Float[Array, ""]) -> Params:
        """Return the non-trainable state after an update.

        Args:
            state: non-trainable state before the update.
            stats: statistics of the model's parts; statistics of layers are under LAYERS, by row,
                those of modules of multi-token prediction under MTP, by depth.
            progress: completed fraction of the run's steps.
        """
        has_state = self.config.is_moe and self.config.bias_update != "none"
        # Biases of routers follow their loads, which mean nothing to routers that do not change.
        are_frozen = self.adapters is not None or self.config.latent_attention.index_warm_up
        if has_state and not are_frozen:
            state = moe.next_state(self.config, state, stats, self.stack, progress)
        if self.recipe is not None and self.recipe.scaling == "delayed":
            state = fp8_layers.next_histories(self.config, state, stats[LAYERS]["amax"], self.stack)
        return state

    def next_params(self, params: Params, state: Params, progress: Float[Array, ""]) -> Params:
        """Return the parameters after an update, adjusted by non-trainable state.

        Args:
            params: parameters after the optimizer's update.
            state: non-trainable state after the update.
            progress: completed fraction of the run's steps.
        """
        return moe.next_params(self.config, params, state, progress)

    def _stacked(self, arrays: Params) -> Params:
        stacks = [name for name in self.config.stacks if name in arrays]
        return arrays | {
            name: jax.tree.map(self.stack.of(name).stack, arrays[name]) for name in stacks
        }

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "b s"],
        segment_ids: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b s d"]:
        """Return final hidden states of sequences; `segment_ids` separates packed documents."""
        return self.forward(params, {"input_ids": tokens, "segment_ids": segment_ids})[0]

    def forward(
        self,
        params: Params,
        batch: Batch,
        loss_weights: LossWeights | None = None,
        cache: Cache | None = None,
        lengths: Int[Array, "b 1"] | None = None,
        capture: Capture = NO_CAPTURE,
    ) -> tuple[Float[Array, "b s d"], LayerOut]:
        """Return final hidden states of a microbatch, and the stacked outputs of its layers.

        Args:
            params: the parameters, joined with non-trainable state (`join`).
            batch: the microbatch.
            loss_weights: weights of the loss terms; None outside of training.
            cache: decoding state after earlier tokens; the batch then has "positions". A list by
                layer, if the parameters are those of `unstacked`.
            lengths: lengths of whole sequences, see `context`.
            capture: the activations to return.
        """
        x_BSD = self.embed(params, batch)
        context = self.batch_context(x_BSD, batch, lengths=lengths, loss_weights=loss_weights)
        if self.config.layer_embedding_dim:
            params = self._with_layer_embeddings(params, x_BSD, batch["input_ids"])
        # Four ways through the layers. In decoding, each layer has arrays of its own, because a
        # scan would copy the cache for each token. Stages run their rows in `shard_map`. Equal
        # layers are one scan; others are groups: leading layers, a scan over periods, later layers.
        # A layer whose keys later layers use runs on its own between groups.
        if isinstance(cache, list):
            apart, caches = list(zip(params[LAYERS], cache, strict=True)), list[PyTree]()
            for part in self.plan.parts():
                layer = functools.partial(self._layer, context, capture, part.passes_keys)
                x_BSD, outs = run_unstacked(part.plan, layer, apart[part.layers], x_BSD)
                context = context.with_keys(outs[-1].keys)
                caches += [out.cache for out in outs]
            out = LayerOut(caches)
        elif self.stack.stages > 1 and STAGES in automatic_axes():
            # None: all stages have the same layers. Otherwise a row says which layer it holds.
            locations = None if self.stack.has_equal_stages else self.stack.locations()
            rows = jax.tree.map(jnp.asarray, (self.plan.kinds_by_row(self.stack), locations))
            run = functools.partial(self._run_stage, capture)
            layers = *rows, {name: params[name] for name in self.config.stacks}
            x_BSD, cache, outputs = forward_pipeline(
                run, self.stack, layers, x_BSD, context, cache,
                is_recurrent=self.is_recurrent and cache is not None,
            )  # fmt: skip
            out = LayerOut(cache, *outputs)
        elif self.plan.is_uniform:
            layer = functools.partial(self._layer, context, capture, False)
            run_layer, states = layer(self.plan.layers[0], LAYERS, True), cache and cache[LAYERS]
            rows = params[LAYERS], states
            x_BSD, out = jax.lax.scan(run_layer, x_BSD, rows, unroll=self.runtime.unroll)
            out = out._replace(cache=cache and {LAYERS: out.cache})
        else:
            inputs = LayerInputs({name: params[name] for name in self.config.stacks}, cache)
            groups, outs = list[LayerGroup](), list[LayerOut]()
            for part in self.plan.parts():
                layer = functools.partial(self._layer, context, capture, part.passes_keys)
                rows = slice_layers(inputs, self.plan, part.layers)
                for group in split_into_groups(part.plan, layer, rows, self.runtime.unroll):
                    x_BSD, out = group.run(x_BSD)
                    context = context.with_keys(out.keys)
                    groups.append(group)
                    outs.append(out._replace(keys=None))
            out = concatenate_outputs(groups, outs)
        return self.final_norm(params, x_BSD), out

    def _with_layer_embeddings(
        self, params: Params, x_BSD: Float[Array, "b s d"], tokens: Int[Array, "b s"]
    ) -> Params:
        """Return parameters of layers together with the embeddings of tokens for each layer."""
        module = self.module(LAYER_EMBEDDINGS, params[LAYER_EMBEDDINGS])
        e_LBSP = module(x_BSD, tokens)
        if LAYERS in params and isinstance(params[LAYERS], list):
            layers = zip(params[LAYERS], e_LBSP, strict=True)
            return {**params, LAYERS: [{**layer, _EMBEDDING: e_BSP} for layer, e_BSP in layers]}
        rows = {name: e_LBSP[np.array(layers)] for name, layers in self.config.stacks.items()}
        return {**params, **{name: {**params[name], _EMBEDDING: e} for name, e in rows.items()}}

    def extend(
        self,
        params: Params,
        tokens: Int[Array, "b s"],
        positions: Int[Array, "b s"],
        cache: Cache,
        only: Int[Array, "b"] | None = None,
        is_padding: Bool[Array, "b s"] | None = None,
    ) -> tuple[Float[Array, "b s v"], Cache]:
        """Return logits (float32) of new tokens at `positions`, and the extended cache.

        `only` is the index of a new token in each row: logits are computed for this token only.
        Tokens of `is_padding` are routed to no expert.
        """
        last = positions[:, -1:]
        if only is not None:
            last = jnp.take_along_axis(positions, only[:, None], axis=1)
        batch = {"input_ids": tokens, "positions": positions, "is_padding": is_padding}
        hidden_BSD, out = self.forward(params, batch, cache=cache, lengths=last + 1)
        assert out.cache is not None
        if only is not None:
            # Before the head: logits [b, s, v] of a whole prompt may not fit.
            hidden_BSD = jnp.take_along_axis(hidden_BSD, only[:, None, None], axis=1)
        return self.logits(params, hidden_BSD), out.cache

    def embed(self, params: Params, batch: Batch) -> Float[Array, "b s d"]:
        """Return the input of the first block for a microbatch: the embeddings in all streams.

        Learned position embeddings are added. Positions are the batch's "positions", or else are
        counted from 0 in each packed document.
        """
        tokens = batch["input_ids"]
        x_BSD = self.embed_tokens(params, tokens)
        if self.config.position_embedding != "learned":
            return hyper_connections.expand(x_BSD, self.config)
        positions = batch.get("positions")
        if positions is None:
            batch_size, length = tokens.shape
            positions = positions_in_documents(batch_size, length, batch.get("segment_ids"))
        position_embedding = self.module("position_embedding", params["position_embedding"])
        x_BSD = split_over_tp(x_BSD + position_embedding(positions, self.dtype))
        return hyper_connections.expand(x_BSD, self.config)

    def embed_tokens(self, params: Params, tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """Return the embeddings of tokens, times `embedding_multiplier`."""
        token_embedding = self.module("token_embedding", params["token_embedding"])
        x_BSD = split_over_tp(token_embedding.embedding(tokens, self.dtype))
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

        `lengths` are the lengths of whole sequences, which some scalings of rotary positions depend
        on; by default the length of `x` on all devices that share a sequence.
        """
        at = jnp.arange(x_BSD.shape[1])[None] if positions is None else positions
        length = x_BSD.shape[1] * collectives.axis_size("context") if lengths is None else lengths
        angles = rotations(self.plan.ropes, at, length)
        return Context(positions, segment_ids, angles, loss_weights)

    def batch_context(
        self,
        x_BSD: Float[Array, "b s d"],
        batch: Batch,
        *,
        lengths: Int[Array, "b 1"] | None = None,
        loss_weights: LossWeights | None = None,
    ) -> Context:
        """Return the `context` of a microbatch, with padding that some layers must not see."""
        fields = {name: batch.get(name) for name in ("positions", "segment_ids")}
        context = self.context(x_BSD, **fields, lengths=lengths, loss_weights=loss_weights)
        context = context._replace(mask_keys=batch.get(MASK_KEYS))
        has_indexer = self.config.latent_attention.has_indexer
        needs_padding = self.config.is_moe or self.is_recurrent or has_indexer
        return context._replace(is_padding=padding_of(batch)) if needs_padding else context

    @functools.cached_property
    def is_recurrent(self) -> bool:
        """True if the decoding state of some layers summarizes all earlier tokens."""
        return any(mixer_class(name).is_recurrent for name in self.config.mixers)

    def _layer(
        self,
        context: Context,
        capture: Capture,
        passes_keys: bool,
        kind: LayerKind,
        stack: str,
        in_loop: bool,
    ) -> Layer:
        """Return the layer function of a stack, rematerialized according to the runtime."""
        settings = LayerSettings(kind, self.plan, self.runtime, capture, passes_keys)

        def run_layer(x_BSD: Array, row: tuple[Params, PyTree]) -> tuple[Array, LayerOut]:
            params, cache = row
            # The name by which a policy moves the inputs of layers to host memory.
            x_BSD = remat.name_input(x_BSD)
            own = {name: value for name, value in params.items() if name != _EMBEDDING}
            of_tokens = {"embedding": params[_EMBEDDING]} if _EMBEDDING in params else {}
            block = self.block(stack, own, context)
            x_BSD, out = block(x_BSD, context, cache, settings=settings, **of_tokens)
            residual = capture.collect({"residual": x_BSD})
            return x_BSD, out._replace(activations={**out.activations, **residual})

        save, offload = self.runtime.save, self.runtime.offload
        if save == "none" and self.runtime.saves_elementwise:
            return run_layer
        # An unrolled scan has no loop either: see `remat` for the barrier that it then needs.
        in_loop = in_loop and self.runtime.unroll == 1
        return remat.block(save, run_layer, in_loop=in_loop, offload=offload)

    def _run_stage(
        self,
        capture: Capture,
        layers: tuple[LayerKind, Locations | None, Params],
        x: Array,
        context: Context,
        cache: PyTree,
    ) -> tuple[Array, PyTree, tuple[AuxOutputs, PyTree]]:
        kinds, locations, stacks = layers
        layer = functools.partial(self._layer, context, capture, False)
        if locations is not None:
            names = self.stack.stack_names
            x, out = run_rows(names, layer, x, (kinds, locations), LayerInputs(stacks, cache))
            return x, out.cache, (out.aux, out.activations)
        # [rows, ...] of a stage become [repeats, layers of a period, ...] for the scan.
        period = self.plan.stage_period(self.stack)
        body = functools.partial(run_period, period, layer)
        repeats = self.stack.per_chunk // len(period)
        x, out = jax.lax.scan(
            body, x, split_periods(period, repeats, (kinds, LayerInputs(stacks, cache)))
        )
        cache, *outputs = join_periods(period, out)
        return x, cache, tuple(outputs)

    def final_norm(self, params: Params, x_BSD: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Return the scaled final norm of the last block's output, the input of `head`."""
        if _STREAM_HEAD in params:
            x_BSD = self.module(_STREAM_HEAD, params[_STREAM_HEAD])(x_BSD)
        elif self.config.n_streams > 1:
            x_BSD = hyper_connections.add_streams(x_BSD, self.config.n_streams)
        hidden_BSD = self.module("norm", params["norm"])(x_BSD)
        return gather_over_tp(times(hidden_BSD, self._head_scale))

    @property
    def _head_scale(self) -> float:
        """Factor of normalized hidden states before the output head."""
        return mup.output_multiplier(self.config) / self.config.logits_scaling

    def predict_further(
        self,
        params: Params,
        hidden_BSD: Float[Array, "b s d"],
        batch: Batch,
        loss_weights: LossWeights,
    ) -> Iterator[tuple[Float[Array, "b s d"], AuxOutputs]]:
        """Yield the input of `head` and auxiliary outputs of each module of multi-token prediction.

        Auxiliary outputs have the block's loss terms and statistics, without its metrics.

        Args:
            params: the parameters, joined with non-trainable state (`join`).
            hidden_BSD: final hidden states, the result of `forward`.
            batch: the microbatch, with `FURTHER_TOKENS`.
            loss_weights: weights of the loss terms.
        """
        context = self.batch_context(hidden_BSD, batch, loss_weights=loss_weights)
        run_block = self._layer(context, NO_CAPTURE, False, self.plan.layers[-1], MTP, False)
        # `final_norm` has scaled its result for the head; modules take the unscaled norm.
        x_BSD = times(hidden_BSD, 1 / self._head_scale)
        for depth in range(self.config.mtp_depth):
            depth_params = params[MTP][str(depth)]
            module = self.module(MTP, depth_params)
            embedding_BSD = self.embed_tokens(params, batch[FURTHER_TOKENS][..., depth])
            x_BSD, out = run_block(module.merge(embedding_BSD, x_BSD), (depth_params, None))
            head_input_BSD = times(module.output_norm(x_BSD), self._head_scale)
            yield gather_over_tp(head_input_BSD), out.aux._replace(metrics={})

    def module(self, name: str, params: Params) -> Any:  # noqa: ANN401  # any of these
        """Return a module of the network with its parameters, such as a layer of `LAYERS`."""
        return nnx.merge(self._definitions[name], params)

    def block(self, stack: str, params: Params, context: Context) -> Any:  # noqa: ANN401
        """Return a layer of a stack for a batch.

        Args:
            stack: name of the stack.
            params: parameters of the layer; with dropout, also `LAYER_NUMBER`.
            context: properties of the tokens.
        """
        number = params.get(LAYER_NUMBER)
        if number is None:
            return self.module(stack, params)
        assert context.mask_keys is not None
        block = self.module(stack, {name: params[name] for name in params if name != LAYER_NUMBER})
        lora.set_mask_keys(block, layer_keys(context.mask_keys, number))
        return block

    def head(self, params: Params) -> Float[Array, "v d"]:
        """Return the output projection: its own matrix, or the tied embedding."""
        if self.config.tie_embeddings:
            return params["token_embedding"]["embedding"]["weight"]
        return params["output_head"]["proj"]["weight"]

    def logits(self, params: Params, hidden_BSD: Float[Array, "b s d"]) -> Float[Array, "b s v"]:
        """Return next-token logits in float32, with the model's soft cap.

        In a pipeline stage, `params` contains a shard of the head, and logits are its share of the
        vocabulary.
        """
        if is_decoding_step(hidden_BSD):  # the head stays where it is: see `Linear`
            hidden_BSD = constrain(hidden_BSD, None, None, "embed")
        return project(hidden_BSD, self.head(params), self.config.final_logit_softcap)

    def unstacked_cache(self, cache: Cache) -> Cache:
        """Return a decoding state as a list by layer."""
        assert not isinstance(cache, list)
        return unstack(self.plan, cache)

    def unstacked(self, params: Params) -> Params:
        """Return parameters with a list of layers in place of the stacks, for decoding."""
        stacks = {name: params[name] for name in self.config.stacks}
        unstacked = {name: params[name] for name in params if name not in stacks}
        return {**unstacked, LAYERS: unstack(self.plan, stacks)}

    def empty_cache(self, batch: int, length: int) -> Cache:
        """Return the decoding state of `batch` sequences of up to `length` tokens, by stack."""

        def stacked(stack: str, layers: Sequence[int]) -> PyTree:
            mixer = mixer_class(self.config.layer_parts[layers[0]].mixer)
            state = mixer.empty_cache(self.config, batch, length, self.dtype)
            # Rows without a layer have a cache, too: all stages hold arrays of one shape.
            rows = len(self.stack.of(stack).rows())
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), state)

        return {name: stacked(name, layers) for name, layers in self.config.stacks.items()}

    def extend_cache(self, cache: Cache, tokens: int) -> Cache:
        """Return a decoding state with room for more tokens."""
        return self._by_mixer(lambda mixer, state: mixer.extend_cache(state, tokens), cache)

    def split_cache(self, cache: Cache) -> Cache:
        """Split a decoding state over devices: rows over the data axes, and heads over `tp`."""

        def split(mixer: type[Mixer], state: PyTree) -> PyTree:
            axes = mixer.cache_axes(self.config)  # with or without the dimension of layers
            return jax.tree.map(lambda x, a: constrain(x, *(LAYERS, *a)[-x.ndim :]), state, axes)

        return self._by_mixer(split, cache)

    def _by_mixer(self, change: Callable[[type[Mixer], PyTree], PyTree], cache: Cache) -> Cache:
        """Change the decoding state of each layer by a function of its mixer."""
        mixers = [mixer_class(parts.mixer) for parts in self.config.layer_parts]
        if isinstance(cache, list):
            return [change(mixer, state) for mixer, state in zip(mixers, cache, strict=True)]
        stacks = self.config.stacks
        return {name: change(mixers[stacks[name][0]], state) for name, state in cache.items()}


def _leaves_at(tree: Params, paths: Set[tuple[str, ...]], chosen: bool) -> Params:
    """Return the leaves of a tree at the paths, or all others."""
    flat = flatten_dict(tree)
    return unflatten_dict({path: x for path, x in flat.items() if (path in paths) == chosen})


def join(params: Params, state: Params) -> Params:
    """Merge parameters and non-trainable state into one tree."""
    if not state:
        return params
    return unflatten_dict({**flatten_dict(params), **flatten_dict(state)})


AnyModel = TypeVar("AnyModel", bound=Model)


def build_model(
    config: JobConfig, platform: str | None = None, capability: str | None = None
) -> Model:
    """Build the model of `[model]` and `[train]`, with the kernels chosen for the platform.

    Args:
        config: a validated config.
        platform: "cpu", "gpu" or "tpu"; by default that of JAX's first device.
        capability: compute capability of GPUs to compile for, if `platform` is given.

    Raises:
        UserError: a configured kernel is not supported.
    """
    # The first device stands for all: meshes of several kinds are not supported.
    if platform is None:
        platform, capability = jax.default_backend(), gpu_capability(jax.devices()[0])
    t, d = config.train, config.distributed
    dtype = _COMPUTE_DTYPES[t.mixed_precision]
    runtime = runtime_for(config, dtype, platform, capability)
    stack = Stack(config.model.n_layers, d.pp, d.chunks)
    build = MODELS[config.model.model_type]
    recipe = fp8_layers.Recipe.of(t)
    if recipe is not None:
        fp8_layers.describe_products(recipe, platform, capability, "")  # raises on old GPUs
    options: dict[str, Any] = {} if recipe is None else {"recipe": recipe}
    options |= {"adapters": config.lora} if config.lora.rank else {}
    options |= {"records_max_logits": True} if config.optimizer.qk_clip else {}
    return build(
        config.model, dtype=dtype, param_dtype=jnp.dtype(t.param_dtype), runtime=runtime,
        stack=stack, **options,
    )  # fmt: skip


def register_model(name: str) -> Callable[[type[AnyModel]], type[AnyModel]]:
    """Register the decorated subclass of `Model` as `model.model_type = name`.

    Training, evaluation and generation call `embed`, `context`, the layers of `network`,
    `final_norm`, and `head` for the matrix that computes logits .
    """
    return MODELS.register(name)


register_model("transformer")(Model)


def matmul_precision(config: JobConfig) -> contextlib.AbstractContextManager[None]:
    """Return a context in which float32 products are exact, not tf32 (GPU) or bfloat16 (TPU)."""
    exact = config.train.mixed_precision == "fp32"
    return jax.default_matmul_precision("highest" if exact else "default")


def project(
    hidden: Float[Array, "*t d"], head_VD: Float[Array, "v d"], softcap: float | None
) -> Float[Array, "*t v"]:
    """Compute logits hidden · headᵀ: operands in the dtype of `hidden`, result in float32.

    Args:
        hidden: final hidden states.
        head_VD: the output projection, or some of its rows.
        softcap: `model.final_logit_softcap`.
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
    """Return the number of parameters, each counted once."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract))


def active_parameter_count(model: Model) -> int:
    """Return the number of parameters that a token uses: of experts, only those it is routed to."""
    c, axes = model.config, flatten_dict(model.axes)
    return sum(
        leaf.size * c.moe_top_k // c.num_experts if EXPERTS in axes[path] else leaf.size
        for path, leaf in flatten_dict(model.abstract).items()
    )
