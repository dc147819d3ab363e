"""Axes of the device mesh, and the rules between a config and their sizes (`rules.py`)."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from jaxforge.config.eval import ATTENTION_WEIGHTS
from jaxforge.config.job import JobConfig
from jaxforge.config.mixers import GLOBAL_ATTENTION, LATENT_ATTENTION
from jaxforge.config.model import ATTENTION
from jaxforge.config.section import SplitBy, facts

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Mesh axes, slowest network first: devices adjacent along tp are adjacent in the machine."""

BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
"""Axes over which the sequences of a batch are sharded."""

DATA_AXES = ("dp_replicate", "dp_shard", "cp", "ep")
"""Axes over which devices hold different tokens: other sequences, or other parts of a sequence."""

Mesh = Mapping[str, int]
"""Size of each axis."""

Rule = Callable[[JobConfig, Mesh], Iterator[str]]
"""A rule yields a message for each violation (`rules.py`)."""


def declared_sizes(config: JobConfig) -> dict[str, int]:
    """Return the configured axis sizes, with 1 for an unresolved dp_shard (-1)."""
    return {axis: max(1, getattr(config.distributed, axis)) for axis in AXES}


def data_parallel(mesh: Mesh) -> int:
    """Return the number of device groups that process different sequences."""
    return math.prod(mesh[axis] for axis in BATCH_AXES)


def token_parallel(mesh: Mesh) -> int:
    """Return the number of device groups that process different tokens and have own gradients."""
    return math.prod(mesh[axis] for axis in DATA_AXES)


def with_equal_shards(config: JobConfig, mesh: Mesh) -> dict[str, int]:
    """Return the axis sizes with which every device holds an equal share of each parameter.

    Parameters are sharded along `model.dim`, those of some mixers also along the ranks of their
    latents, and those of experts along `model.moe_latent_dim`, if there is one. If dp_shard does
    not divide these, it keeps its largest factor that does, and the remaining factor moves to
    dp_replicate. Parameters are then sharded over the former and replicated over the latter. The
    split of the batch is unchanged.
    """
    ranks = (rank for table in config.model.mixer_tables.values() for rank in table.ranks)
    # Every matrix has an axis of one of these sizes, along which it is sharded.
    width = math.gcd(config.model.dim, *ranks)
    # cp and ep shard the same axis of the parameters.
    shards = math.gcd(mesh["dp_shard"], width // (mesh["cp"] * mesh["ep"]))
    if config.model.is_moe:  # ep splits experts, and not what they read
        shards = math.gcd(shards, config.model.expert_embed_dim // mesh["cp"])
    copies = mesh["dp_shard"] // shards
    return {**mesh, "dp_replicate": mesh["dp_replicate"] * copies, "dp_shard": shards}


def cp_strategy(config: JobConfig) -> str:
    """Return `distributed.cp_strategy`, with "auto" resolved."""
    d = config.distributed
    if d.cp_strategy != "auto":
        return d.cp_strategy
    return "ring" if config.model.n_heads % (d.cp * d.tp) else "ulysses"


def shares_are_equal(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require equal shares of what mesh axes split (`facts.SplitBy`).

    An indivisible dp_shard is reduced instead (`with_equal_shards`).
    """
    for key, split in facts(JobConfig, SplitBy):
        table, _, name = key.rpartition(".")
        value = getattr(attrgetter(table)(config), split.resolved or name)
        axes = {axis: mesh[axis] for axis in split.axes.split() if mesh[axis] > 1}
        size = math.prod(axes.values())
        # A key without effect may have any value.
        is_used = table == "train" or config.model.uses(key.removeprefix("model."))
        if not is_used or not value or value % size == 0:
            continue
        product = " * ".join(map(str, axes.values())) + (f" = {size}" if len(axes) > 1 else "")
        yield (
            f"{key} = {value} must be a multiple of distributed.{' * '.join(axes)} = {product}: "
            "change one of them"
        )


def heads_divide_by_cp(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require for "ulysses" that the heads of a tensor-parallel rank divide over cp."""
    n_heads, product = config.model.n_heads, mesh["cp"] * mesh["tp"]
    if cp_strategy(config) == "ulysses" and n_heads % mesh["tp"] == 0 and n_heads % product:
        yield (
            f'distributed.cp_strategy = "ulysses" splits heads: model.n_heads = {n_heads} must be '
            f"a multiple of distributed.cp * tp = {mesh['cp']} * {mesh['tp']} = {product}. Set "
            'cp_strategy to "ring", or lower cp'
        )


def seq_len_divides_by_ring_chunks(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require for "ring" that a sequence divides into two chunks per context-parallel rank."""
    # Two chunks per rank, one from each end, balance the causal mask.
    length, parts = config.train.seq_len, 2 * mesh["cp"]
    if mesh["cp"] > 1 and cp_strategy(config) == "ring" and length % parts:
        yield (
            f"train.seq_len = {length} must be a multiple of 2 * distributed.cp = {parts} with "
            'distributed.cp_strategy = "ring": change train.seq_len or distributed.cp'
        )


def convolutions_fit_parts(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require parts of sequences that are as long as the reach of the mixers' convolutions."""
    parts = mesh["cp"]
    if parts == 1:
        return
    # A convolution reads tokens of the preceding part only.
    parts *= 2 if cp_strategy(config) == "ring" else 1
    for mixer, table in config.model.mixer_tables.items():
        size = getattr(table, "conv_size", 1)  # some mixers have no convolution
        if config.train.seq_len // parts < size - 1:
            yield (
                f"train.seq_len = {config.train.seq_len} in {parts} parts is shorter than the "
                f"{size - 1} earlier tokens that model.{mixer}.conv_size = {size} reaches: raise "
                "it, or lower distributed.cp"
            )


def attention_weights_need_whole_sequences(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse to capture attention weights with cp, where no device has all keys of a query."""
    section = config.eval
    is_captured = section.activations_interval and ATTENTION_WEIGHTS in section.captured_points
    if is_captured and mesh["cp"] > 1:
        yield (
            f"eval.activations_points = {json.dumps(section.activations_points)} includes "
            f"{ATTENTION_WEIGHTS}, but with distributed.cp = {mesh['cp']} no device has all keys "
            "of a query: remove it, or set distributed.cp to 1"
        )


def global_batch_divides(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require a global batch that divides into microbatches and equal shares per rank.

    An elastic job that has lost processes pads its batches instead (`config.resolution`).
    """
    batch, accum = config.train.global_batch_size, config.train.grad_accum_steps
    dp = data_parallel(mesh)
    if batch and batch % (accum * dp) and not config.distributed.elastic_processes:
        axes = BATCH_AXES if mesh["ep"] > 1 else BATCH_AXES[:2]
        sizes = " * ".join(str(mesh[axis]) for axis in axes)
        yield (
            f"train.global_batch_size = {batch} must be a multiple of train.grad_accum_steps * "
            f"distributed.{' * '.join(axes)} = {accum} * {sizes} = {accum * dp}: change one of them"
        )


def batch_sizes_agree(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require that batch_size and global_batch_size agree if both are set."""
    train, dp = config.train, data_parallel(mesh)
    total = train.batch_size * dp * train.grad_accum_steps
    # The default of batch_size is not a wish.
    wrote_both = train.global_batch_size and config.is_set("train.batch_size")
    if wrote_both and total != train.global_batch_size:
        yield (
            f"train.global_batch_size = {train.global_batch_size}, but train.batch_size = "
            f"{train.batch_size} on {dp} data-parallel ranks with train.grad_accum_steps = "
            f"{train.grad_accum_steps} makes {total}: remove train.batch_size, which follows"
        )


def every_stage_has_layers(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require at least one layer per virtual stage."""
    layers, chunks = config.model.n_layers, config.distributed.chunks
    if layers < mesh["pp"] * chunks:
        product, lower = f" = {mesh['pp']}", "it"
        if chunks > 1:
            product = f" * pp_chunks = {mesh['pp']} * {chunks} = {mesh['pp'] * chunks}"
            lower = "one of them"
        yield f"model.n_layers = {layers} is less than distributed.pp{product}: lower {lower}"


def microbatches_fill_pipeline(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require enough microbatches for all stages, and a multiple of pp when interleaved."""
    pp, train = mesh["pp"], config.train
    sizes = {f"train.batch_ramp[{i}]": x.accum for i, x in enumerate(train.stages()[:-1])}
    sizes["train.grad_accum_steps"] = train.grad_accum_steps
    for key, accum in sizes.items() if pp > 1 else ():
        is_stage = not key.endswith("_steps")
        count = f"{key} = {accum}" + (" microbatches" if is_stage else "")
        if accum < pp:
            yield (
                f"{count} leaves some of the distributed.pp = {pp} stages idle all the time: set "
                f"it to {pp}"
            )
        elif config.distributed.chunks > 1 and accum % pp:
            yield (
                f"{count} must be a multiple of distributed.pp = {pp} with distributed.pp_schedule "
                f'= "interleaved_1f1b": set it to {math.ceil(accum / pp) * pp}'
            )


def different_stages_exchange_in_groups(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse neighbour exchanges over cp in stages with different layers.

    A permutation of XLA involves the devices of all stages, which then run different layers.
    """
    pp, cp, chunks = mesh["pp"], mesh["cp"], config.distributed.chunks
    # Stages with equal layers run one program, in which all exchange at the same time.
    if pp == 1 or cp == 1 or _stages_are_equal(config, pp * chunks):
        return
    where = (
        f"with distributed.cp = {cp} in {pp * chunks} pipeline stages of different layers: set "
        "distributed.pp or cp to 1"
    )
    recurrent = sorted({*config.model.mixers} - {ATTENTION, GLOBAL_ATTENTION, LATENT_ATTENTION})
    if recurrent:
        yield f"mixers {', '.join(recurrent)} are not supported {where}"
    elif cp_strategy(config) == "ring":
        yield (
            f'distributed.cp_strategy = "ring" is not supported {where}, or cp_strategy to '
            '"ulysses"'
        )


def _stages_are_equal(config: JobConfig, stages: int) -> bool:
    """Return whether virtual stages have the same mixers and feed-forwards, or all layers do."""
    parts = config.model.layer_parts
    length, longer = divmod(len(parts), stages)
    is_periodic = all(part == parts[i % max(1, length)] for i, part in enumerate(parts))
    return len(set(parts)) == 1 or (not longer and is_periodic)


def stages_share_nothing(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse pipelines in which later stages need values of the first layers."""
    for key in ("n_kv_shared_layers", "layer_embedding_dim"):
        if mesh["pp"] > 1 and (value := getattr(config.model, key)):
            yield (
                f"model.{key} = {value} is not supported with distributed.pp = {mesh['pp']}, whose "
                "stages exchange the residual stream only: set distributed.pp to 1"
            )


def biased_stages_have_equal_layers(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require equal layers per stage if the output of a layer has a bias.

    In a model of one kind of layers, a shorter stage is padded with a layer of zeros, whose output
    bias would receive gradients.
    """
    # Stages of different layers are not padded.
    if len(config.model.stacks) > 1:
        return
    model, parts = config.model, mesh["pp"] * config.distributed.chunks
    # A LayerNorm after a part has a bias in the output of the layer.
    after = model.norm_type == "layernorm" and model.norm_placement != "pre"
    biased = [name for name, table in model.mixer_tables.items() if table.has_output_bias]
    has_bias = model.o_bias or model.mlp_bias or biased
    # Coefficients of zeros would lose the residual.
    mixes = model.hyper_connections != "none" or model.layer_multipliers
    if mesh["pp"] > 1 and model.n_layers % parts and (has_bias or after or mixes):
        keys = f"biases in model.{biased[0]}" if biased else "model.o_bias or mlp_bias"
        mixing = "layer_multipliers" if model.layer_multipliers else "hyper_connections"
        what = mixing if mixes else "a layernorm after its parts" if after else keys
        yield (
            f"model.n_layers = {model.n_layers} must be a multiple of {parts} pipeline stages in a "
            f"model with {what}: change model.n_layers or distributed.pp"
        )


def ep_has_experts(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require experts if the mesh has an axis for them."""
    if mesh["ep"] > 1 and not config.model.is_moe:
        yield (
            f"distributed.ep = {mesh['ep']} requires a model with experts: set it to 1, or "
            "model.num_experts"
        )


def fp8_experts_have_no_stages(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse stages for 8-bit experts: the layers that stay in bf16 are known only at run time."""
    train = config.train
    stay = any(part in "layers.mlp.experts" for part in train.fp8_exclude)
    has_fp8_experts = config.model.is_moe and train.mixed_precision == "fp8" and not stay
    if mesh["pp"] > 1 and has_fp8_experts:
        yield (
            f'train.mixed_precision = "fp8" for experts with distributed.pp = {mesh["pp"]} is not '
            'supported: add "experts" to train.fp8_exclude, or set distributed.pp to 1'
        )


def pipeline_offloads_nothing(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse to offload with stages, whose ring buffer of activations stays on the device."""
    if mesh["pp"] > 1 and config.train.offload:
        yield (
            f"train.offload = {json.dumps(config.train.offload)} with distributed.pp = "
            f"{mesh['pp']} is not supported, as the arrays of a stage stay on its device: remove "
            "one of them"
        )
