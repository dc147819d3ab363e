"""A small config with the structure of a large one, and the meshes on which to compare it.

What decides which code runs is kept: mixers and kinds of layers, ratios of heads, experts and their
groups, objective, adapters, optimizer, packing, reductions, pipeline schedule. Sizes, lengths and
numbers of layers shrink, computation and storage become float32, and axes of the mesh have two
devices or, while eight suffice, four.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxforge.config import rules
from jaxforge.config.axes import AXES, Mesh, cp_strategy, declared_sizes
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.errors import UserError
from jaxforge.tools.prove import MOST_DEVICES

_TOKENS, _ROWS, _VOCABULARY = 64, 8, 272
_WINDOW, _CHUNK, _FLOOR = 24, 16, 8  # tokens, less than a sequence
_MOST_RATIO = 8  # query heads of a key head
_LONGEST_PERIOD = 8  # layers
_CLIP_NORM, _LR = 0.1, 1e-2  # every update is clipped, and larger than its rounding
_CPU_KERNELS = ("auto", "reference", "blockwise", "math")

Table = dict[str, Any]


def smaller(config: JobConfig) -> JobConfig:
    """Return the small config, on one device.

    Raises:
        UserError: a rule refuses the small config.
    """
    sizes = _axis_sizes(config)
    values = config.model_dump(mode="json", exclude_unset=True)
    values = {
        "plugins": values.get("plugins", {}),
        "model": {**values.get("model", {}), **_model(config, sizes)},
        "lora": {**values.get("lora", {}), **_adapters(config)},
        "train": {**values.get("train", {}), **_train(config, sizes)},
        "dpo": {**values.get("dpo", {}), "reference": None},
        "distillation": {**values.get("distillation", {}), **_teacher(config)},
        "optimizer": {**values.get("optimizer", {}), **_optimizer(config)},
        "scheduler": _scheduler(config),
        "data": _data(config),
        "checkpoint": {"load_path": "unused", "async_mode": "disabled"},
        "metrics": {"collect": list(config.metrics.collect)},
        "distributed": {
            "dp_shard": 1,
            "cp_strategy": cp_strategy(config),
            "pp_schedule": config.distributed.pp_schedule,
            "pp_chunks": config.distributed.pp_chunks,
        },
    }
    values["train"].pop("batch_size", None)  # it follows from the global batch
    try:
        return JobConfig.model_validate(values)
    except ValueError as error:
        raise UserError(
            f"the config cannot be made smaller: {error}. Write a config of a few small layers "
            "with the same settings, and prove that one"
        ) from error


def meshes(config: JobConfig, small: JobConfig) -> list[JobConfig]:
    """Return the small config on each mesh that it must be compared on.

    Axes that together have more than eight devices are covered by several meshes, so that each pair
    of axes is on one of them.

    Args:
        config: the config of the user.
        small: result of `smaller`.

    Raises:
        UserError: a rule refuses the small config on one of the meshes.
    """
    sizes = _axis_sizes(config)
    used = [axis for axis in AXES if sizes[axis] > 1]
    pairs = {*itertools.combinations(used, 2)}
    groups: list[tuple[str, ...]] = [] if pairs else [tuple(used)]
    while pairs:
        size = min(3, len(used))
        best = max(
            itertools.combinations(used, size),
            key=lambda group: len(pairs & {*itertools.combinations(group, 2)}),
        )
        groups.append(best)
        pairs -= {*itertools.combinations(best, 2)}
    results = [on_mesh(small, {axis: sizes[axis] for axis in group}) for group in groups]
    for each in results:
        if problems := rules.broken(each, device_count(each)):
            raise UserError(
                "the small config does not fit its mesh: " + "; ".join(problems) + ". Write a "
                "config of a few small layers with the same settings, and prove that one"
            )
    return results


def transposed(small: JobConfig) -> JobConfig:
    """Return a config of a mesh on the mesh with other axes of the same number of devices.

    It is the first that the rules allow, of the sizes in reverse and of their rotations; one device
    if they allow none.
    """
    sizes = tuple(declared_sizes(small).values())
    for i in range(2 * len(sizes)):
        order = sizes[::-1] if i < len(sizes) else sizes
        k = i % len(sizes)
        turned = dict(zip(AXES, order[k:] + order[:k], strict=True))
        candidate = on_mesh(small, turned)
        if tuple(turned.values()) != sizes and not rules.broken(candidate, device_count(candidate)):
            return candidate
    return on_mesh(small, {})


def on_mesh(small: JobConfig, sizes: Mesh) -> JobConfig:
    """Return the small config on a mesh; axes that are not named have one device."""
    complete = {**dict.fromkeys(AXES, 1), **sizes}
    return small.with_values({f"distributed.{axis}": size for axis, size in complete.items()})


def describe(config: JobConfig, small: JobConfig) -> str:
    """Return the sizes that changed, such as "n_layers 32 -> 2, dim 4096 -> 64"."""
    before, after = config.settings, small.settings
    keys = (
        "model.n_layers", "model.dim", "model.n_heads", "model.n_kv_heads", "model.num_experts",
        "model.vocab_size", "train.seq_len", "train.grad_accum_steps",
    )  # fmt: skip
    changed = [key for key in keys if before[key] != after[key]]
    return ", ".join(f"{key.partition('.')[2]} {before[key]} -> {after[key]}" for key in changed)


def unproven(config: JobConfig) -> Iterator[str]:
    """Yield what the proof leaves out, a sentence each."""
    train, model = config.train, config.model
    if train.mixed_precision == "fp8" or train.opt_state_dtype not in ("float32", "bfloat16"):
        yield "8-bit products and moments: the proof computes in float32"
    if model.sdpa_backend not in _CPU_KERNELS or model.moe_backend not in ("auto", "blocks"):
        yield "kernels of accelerators: the proof runs those of CPUs"
    if train.trains_apart:
        yield "exchanges of groups that train apart: all devices train together"
    if train.offload:
        yield "offloading: arrays stay on the devices"
    if train.batch_ramp:
        yield "the batch ramp: all updates have the largest batch"


def device_count(config: JobConfig) -> int:
    """Return the number of devices of a small config's mesh."""
    return math.prod(declared_sizes(config).values())


def _axis_sizes(config: JobConfig) -> dict[str, int]:
    """Return the size of each axis: 2, or 4 for the first axes while eight devices suffice."""
    d = config.distributed
    # An open dp_shard has several devices on every machine that needs a mesh.
    declared = {axis: getattr(d, axis) for axis in AXES}
    declared["dp_shard"] = 4 if d.dp_shard == -1 else d.dp_shard
    sizes = {axis: min(2, size) for axis, size in declared.items()}
    # With two devices, a ring and a pipeline cannot tell their directions apart.
    for axis in ("cp", "pp", "dp_shard", "ep", "tp", "dp_replicate"):
        if declared[axis] >= 4 and 2 * math.prod(sizes.values()) <= MOST_DEVICES:
            sizes[axis] = 4
    return sizes


def _model(config: JobConfig, sizes: Mesh) -> Table:
    model = config.model
    heads, kv_heads = _heads(config, sizes)
    head = _head_size(model)
    fills = heads * head if model.n_heads * model.head_size == model.dim else 0
    # Each axis that splits the width divides 32.
    dim = fills if fills and model.head_dim is None else 64
    while dim % 32:
        head, dim = 2 * head, 2 * dim
    table: Table = {
        "dim": dim, "n_heads": heads, "vocab_size": min(model.vocab_size, _VOCABULARY),
        "max_seq_len": _TOKENS, "init_std": dim**-0.5, "ffn_hidden_dim": 3 * dim // 2,
        "mtp_depth": min(model.mtp_depth, 2),
        "sdpa_backend": model.sdpa_backend if model.sdpa_backend in _CPU_KERNELS else "auto",
        "moe_backend": "auto",
    }  # fmt: skip
    table |= {"attn_temperature_floor": _FLOOR} if model.attn_temperature_scale else {}
    table |= {"n_kv_heads": kv_heads} if model.n_kv_heads is not None else {}
    table |= {"head_dim": head} if model.head_dim is not None else {}
    table |= {"layer_embedding_dim": 8} if model.layer_embedding_dim is not None else {}
    table |= {"kv_shared_ffn_dim": 2 * dim} if model.kv_shared_ffn_dim is not None else {}
    table |= {"sliding_window": _WINDOW} if model.sliding_window is not None else {}
    table |= {"attention_chunk_size": _CHUNK} if model.attention_chunk_size is not None else {}
    for key, before, after in (
        ("mup_base_width", model.dim, dim), ("mup_base_head_dim", model.head_size, head)
    ):  # fmt: skip
        if (base := getattr(model, key)) is not None:
            table[key] = max(1, base * after // before)
    table |= _rotary(model, head) | _layers(config, sizes)
    return table | _experts(model, dim) | _mixers(model, sizes)


def _heads(config: JobConfig, sizes: Mesh) -> tuple[int, int]:
    """Return query heads and key heads: their ratio is kept, up to 8."""
    model, tp = config.model, sizes["tp"]
    ratio = min(_MOST_RATIO, model.n_heads // model.kv_heads)
    has_several = model.kv_heads > max(1, config.distributed.tp)
    kv_heads = tp * (2 if has_several else 1)
    # Ulysses splits the heads of a device further.
    split = tp * (sizes["cp"] if cp_strategy(config) == "ulysses" else 1)
    while kv_heads * ratio % split:
        kv_heads += tp
    return kv_heads * ratio, kv_heads


def _head_size(model: ModelConfig) -> int:
    """Return the smallest width of a head with at least two pairs of rotated channels."""
    head = 8
    while int(head * model.partial_rotary_factor) % 2 or head * model.partial_rotary_factor < 4:
        head *= 2
    return head


def _rotary(model: ModelConfig, head: int) -> Table:
    scaling = model.rope_scaling
    if scaling is None:
        return {}
    table = scaling.model_dump(mode="json", exclude_unset=True)
    original = scaling.original_max_seq_len * _TOKENS // model.max_seq_len
    table["original_max_seq_len"] = max(4, original)
    pairs = int(head * model.partial_rotary_factor) // 2
    for key in ("short_factor", "long_factor"):
        if getattr(scaling, key):
            table[key] = list(getattr(scaling, key)[:pairs])
    return {"rope_scaling": table}


def _experts(model: ModelConfig, dim: int) -> Table:
    if not model.num_experts:
        return {}
    groups = min(model.moe_groups, 4)
    top_k = min(model.moe_top_k, 4)
    experts = 8 if groups == 1 else 16
    return {
        "num_experts": experts,
        "moe_top_k": top_k,
        "moe_groups": groups,
        "moe_top_k_groups": max(1, model.moe_top_k_groups * groups // model.moe_groups),
        "moe_expert_dim": dim // 2,
        **({"moe_latent_dim": dim // 2} if model.moe_latent_dim else {}),
        **({"moe_shared_expert_dim": dim} if model.moe_shared_experts else {}),
    }


def _mixers(model: ModelConfig, sizes: Mesh) -> Table:
    """Return the tables of the mixers."""
    return {
        name: {
            **table.model_dump(mode="json", exclude_unset=True), **table.smaller(sizes["tp"])
        }
        for name, table in model.mixer_tables.items()
    }  # fmt: skip


def _layers(config: JobConfig, sizes: Mesh) -> Table:
    """Return the number of layers, whole periods of their kinds, and patterns of the same period.

    A pattern without a short period is cut to the shortest stretch with each pair of kinds that
    follow each other.
    """
    model = config.model
    kinds = [*zip(model.layer_parts, model.windows, model.chunks, model.ropes, strict=True)]
    dense = min(model.moe_first_dense_layers, 1)
    period = _period(kinds[dense and model.moe_first_dense_layers :])
    table: Table = {"moe_first_dense_layers": dense}
    n_layers = 2 * period  # a loop over periods, as in the whole model
    if period > _LONGEST_PERIOD:
        begin, end = _stretch(kinds)
        n_layers = period = end - begin
        for key in ("mixer_pattern", "feed_forward_pattern", "attention_pattern", "rope_pattern"):
            if pattern := getattr(model, key):
                table[key] = [pattern[i % len(pattern)] for i in range(begin, end)]
        first = model.n_layers - model.n_kv_shared_layers
        table["n_kv_shared_layers"] = max(0, end - max(begin, first))
    d = config.distributed
    if sizes["pp"] > 1:
        stages, before = sizes["pp"] * d.chunks, d.pp * d.chunks
        if period == 1:
            # Stages of unequal length stay so.
            n_layers = max(2, stages) + bool(model.n_layers % before)
        elif model.n_layers % (before * period) == 0:
            n_layers = period * stages  # stages of equal layers stay so
        else:
            n_layers = period * math.ceil(stages / period)
    return {**table, "n_layers": dense + n_layers}


def _period(kinds: Sequence[object]) -> int:
    """Return the shortest period of a sequence, at most its length."""
    return next(
        n for n in range(1, len(kinds) + 1)
        if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
    )  # fmt: skip


def _stretch(kinds: Sequence[object]) -> tuple[int, int]:
    """Return the bounds of the shortest stretch with each pair of consecutive kinds."""
    pairs = {*itertools.pairwise(kinds)}
    n = len(kinds)
    stretches = ((i, i + length) for length in range(2, n + 1) for i in range(n - length + 1))
    return next((i, end) for i, end in stretches if {*itertools.pairwise(kinds[i:end])} == pairs)


def _adapters(config: JobConfig) -> Table:
    rank = min(config.lora.rank, 4)
    return {"rank": rank, "adapter": None} if rank else {}


def _teacher(config: JobConfig) -> Table:
    if config.train.objective != "distillation":
        return {}
    return {"teacher": "unused", "logits": None, "top_k": min(config.distillation.top_k, 8)}


def _train(config: JobConfig, sizes: Mesh) -> Table:
    train, pp = config.train, sizes["pp"]
    accum = min(train.grad_accum_steps, 2)
    if pp > 1:  # more microbatches than stages, as of the whole run
        accum = pp * (2 if train.grad_accum_steps > config.distributed.pp else 1)
    recompute = train.activation_checkpointing
    table: Table = {
        "global_batch_size": _ROWS * accum, "grad_accum_steps": accum, "seq_len": _TOKENS,
        "batch_ramp": [], "max_steps": 100, "grad_clip_norm": min(train.grad_clip_norm, _CLIP_NORM),
        "mixed_precision": "fp32", "param_dtype": "float32", "param_rounding": "nearest",
        "opt_state_dtype": "float32", "offload": [], "outer_interval": 0, "iterations_to_skip": [],
        # The layers are then a loop, as on accelerators.
        "activation_checkpointing": "full" if recompute == "auto" else recompute,
        "executable": None, "compilation_cache_dir": None, "xla_flags": {},
        "ce_chunk_size": min(train.ce_chunk_size, 40), "ce_vocab_chunk": 0,
        "on_spike": "off", "on_nonfinite": "skip",
    }  # fmt: skip
    if train.loss_fn == "chunked_cross_entropy" and not train.ce_chunk_size:
        table["ce_vocab_chunk"] = 24  # several chunks; the last is shorter
    if train.averages_weights:
        table |= {"ema_dtype": "float32", "ema_start": 0, "ema_interval": 1}
    for key in ("fp8_scaling", "fp8_amax_history_len", "fp8_exclude"):
        table[key] = type(train).model_fields[key].default
    return table


def _optimizer(config: JobConfig) -> Table:
    section = config.optimizer
    table: Table = {"lr_scale_rule": "none"}
    # Other optimizers may define the rate differently.
    if section.name in OPTIMIZERS.built_in:
        table["lr"] = _LR
    tables: Mapping[str, Table] = {
        "muon": {"adam_lr": _LR if section.muon.adam_lr else None},
        "soap": {"precondition_frequency": min(section.soap.precondition_frequency, 2)},
        "schedule_free_adamw": {"warmup_steps": 0},
    }
    if section.name in tables:
        set_ = getattr(section, section.name).model_dump(mode="json", exclude_unset=True)
        table[section.name] = {**set_, **tables[section.name]}
    return table


def _scheduler(config: JobConfig) -> Table:
    keys = ("name", "min_lr_ratio", "wsd_decay_type", "rex_alpha")
    return {**{key: getattr(config.scheduler, key) for key in keys}, "warmup_steps": 0}


def _data(config: JobConfig) -> Table:
    data = config.data
    sources = [{"path": str(i), "weight": s.weight} for i, s in enumerate(data.datasets)]
    return {"dataset_path": "unused", "datasets": sources, "pack_sequences": data.pack_sequences}
