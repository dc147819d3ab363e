"""Conversion of `CheckpointState` to the keys and files of a `torch_dist` checkpoint.

Optimizer state has the layout `fully_reshardable`, which every size of tensor, pipeline and data
parallelism can load.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import yaml

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from torch_compat.checkpoint import megatron_config, optimizer_state
from torch_compat.checkpoint.optimizer_state import STEP
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState, Tensors
from torch_compat.formats.dcp_writer import Entry
from torch_compat.formats.lazy import DTYPES, LazyTensor
from torch_compat.formats.pickles import Global, New
from torch_compat.names.megatron import MEGATRON, to_torch_dist
from torch_compat.names.translation import summarize_names

_FIELDS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_MASTER = "param"
_EMPTY = [None]  # `_extra_state` of a module without extra state
_MODULES = ("self_attention.linear_qkv", "self_attention.linear_proj",
            "self_attention.core_attention", "self_attention.q_layernorm",
            "self_attention.k_layernorm")  # fmt: skip
_DENSE_MODULES = ("mlp.linear_fc1", "mlp.linear_fc2")
_EXPERT_MODULES = ("pre_mlp_layernorm", "mlp.router", "mlp.shared_experts.linear_fc1",
               "mlp.shared_experts.linear_fc2")  # fmt: skip
_PREDICTION_MODULES = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "none": "constant",
              "wsd": "WSD"}  # fmt: skip
_ONE_RANK = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
_PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
_LAYOUT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def check(checkpoint: CheckpointState, target: AbstractTarget) -> None:
    """Check that a state has a counterpart in Megatron-Core.

    Raises:
        UserError: the model or the optimizer has no counterpart.
    """
    megatron_config.settings(target.config.model)
    if checkpoint.moments is None:
        return
    optimizer = target.config.optimizer
    if optimizer.name != "adamw":
        raise UserError(
            f'optimizer.name = "{optimizer.name}": its state has no counterpart in Megatron-Core. '
            "Convert with --weights-only"
        )
    if checkpoint.counts_experts:
        raise UserError(
            "optimizer.skip_idle_experts: each expert has its own number of updates, and "
            "Megatron-Core has only one. Convert with --weights-only"
        )
    if optimizer.freeze_patterns or optimizer.lr_patterns:
        raise UserError(
            "optimizer.freeze_patterns and optimizer.lr_patterns: Megatron-Core trains all "
            "parameters with one learning rate. Convert with --weights-only"
        )


def entries(checkpoint: CheckpointState, model: ModelConfig) -> dict[str, Entry]:
    """Return the entries of a `torch_dist` checkpoint by key."""
    written: dict[str, Any] = {
        **_stored(checkpoint.variables, model), **dict.fromkeys(_extra_states(model), _EMPTY)
    }  # fmt: skip
    if checkpoint.moments is not None:
        float32 = DTYPES["float32"]
        # Megatron-Core updates float32 copies, and rounds the weights from them.
        masters = {name: tensor.cast(float32) for name, tensor in checkpoint.params.items()}
        fields = {_MASTER: masters} | {
            theirs: checkpoint.moments[field] for field, theirs in _FIELDS.items()
        }
        written |= {
            f"optimizer.state.{field}.{key}": tensor
            for field, tensors in fields.items()
            for key, tensor in _stored(tensors, model).items()
        }
    return {key: Entry((key,), value) for key, value in written.items()}


def _stored(tensors: Tensors, model: ModelConfig) -> dict[str, LazyTensor]:
    return to_torch_dist(MEGATRON.to_dialect(tensors, model), model)


def _extra_states(model: ModelConfig) -> Iterator[str]:
    """Yield the keys of the extra state that TransformerEngine's modules store next to weights.

    A loader requests the keys of its own modules and ignores all others.
    """
    # Equal layers are stacked (`to_torch_dist`): a key then names one of `layers` shards.
    layers, experts, is_alike = model.n_layers, model.num_experts, len(model.stacks) == 1
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    for i, has_experts in enumerate(model.has_experts):
        prefix = "decoder.layers." if is_alike else f"decoder.layers.{i}."
        shard, n_shards = (i, layers) if is_alike else (0, 1)
        for module in (*_MODULES, *(_EXPERT_MODULES if has_experts else _DENSE_MODULES)):
            yield f"{prefix}{module}._extra_state/shard_{shard}_{n_shards}"
        for j in range(experts if has_experts else 0):
            suffix = f"{i}.{j}_{layers}.{experts}" if is_alike else f"{j}_{experts}"
            yield from _expert_extra_states(prefix, suffix)
    for depth in range(model.mtp_depth):
        prefix, has_experts = f"mtp.layers.{depth}.", model.has_experts[-1]
        within = f"{prefix}transformer_layer."
        modules = (*_MODULES, *(_EXPERT_MODULES if has_experts else _DENSE_MODULES))
        names = (*(f"{within}{m}" for m in modules), *(f"{prefix}{m}" for m in _PREDICTION_MODULES))
        yield from (f"{name}._extra_state/shard_0_1" for name in names)
        for j in range(experts if has_experts else 0):
            yield from _expert_extra_states(within, f"{j}_{experts}")


def _expert_extra_states(prefix: str, suffix: str) -> Iterator[str]:
    for module in ("linear_fc1", "linear_fc2"):
        yield f"{prefix}mlp.experts.experts.{module}._extra_state/shard_{suffix}"


def decay_notes(target: AbstractTarget) -> list[str]:
    """Return a note about parameters that decay in only one of the two frameworks.

    Megatron-Core chooses by shape: all parameters but vectors decay.
    """
    shapes = {target.stacking.array_of(name): shape for name, shape in target.params.items()}
    decays = target.config.optimizer.decays
    differ = [
        name
        for name, shape in shapes.items()
        if decays(name, is_matrix=len(shape) > 1) != (len(shape) > 1)
    ]
    if not differ:
        return []
    return [
        "Megatron-Core decays all parameters but vectors, which differs from this run for "
        f"{summarize_names(differ)}"
    ]


def common(config: JobConfig, progress: Progress, updates: int | None) -> dict[str, Any]:
    """Return the content of `common.pt`.

    Args:
        config: config of the run.
        progress: progress of the run.
        updates: number of updates of the optimizer; None without an optimizer.
    """
    has_optimizer = updates is not None
    layout = _LAYOUT if has_optimizer else {}
    state: dict[str, Any] = {
        "args": New(Global("argparse", "Namespace"), _arguments(config, progress, has_optimizer)),
        "checkpoint_version": 3.0,
        "iteration": progress.step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {
            "singleton_local_shards": False, "chained_optim_avoid_prefix": True, **layout
        },
    }  # fmt: skip
    if updates is None:
        return state
    return {
        **state,
        "optimizer": {
            "optimizer": {"param_groups": list(_groups(config, updates))},
            "param_state_sharding_type": _LAYOUT["distrib_optim_sharding_type"],
        },
        "opt_param_scheduler": _schedule(config, progress, updates),
    }


def train_state(progress: Progress) -> dict[str, np.ndarray]:
    """Return the content of Megatron-Bridge's `train_state.pt`."""
    counts = {
        "step": progress.step, "consumed_train_samples": progress.samples,
        "skipped_train_samples": 0, "consumed_valid_samples": 0,
    }  # fmt: skip
    return {
        **{key: np.asarray(value, np.int64) for key, value in counts.items()},
        "floating_point_operations_so_far": np.asarray(0.0, np.float64),
        **{key: np.asarray(False) for key in ("do_train", "do_valid", "do_test")},
    }


def run_config(config: JobConfig, *, has_optimizer: bool) -> str:
    """Return the content of Megatron-Bridge's `run_config.yaml`."""
    settings = _settings(config)
    name = settings["activation_func"]
    is_own = name == megatron_config.SQUARED_RELU
    activation = f"{'megatron.core.activations' if is_own else 'torch.nn.functional'}.{name}"
    sections = {
        "model": {
            **settings, **_ONE_RANK, "_target_": _PROVIDER, "seq_length": config.train.seq_len,
            "activation_func": {"_target_": activation, "_call_": False},
        },
        "checkpoint": {"ckpt_format": "torch_dist", "save_optim": has_optimizer, "save_rng": False},
        **{name: section(config) for name, section in _SECTIONS.items()},
    }  # fmt: skip
    return yaml.safe_dump(sections, sort_keys=True)


def _settings(config: JobConfig) -> dict[str, Any]:
    """Return the settings of the model, and the weight of the loss of its modules."""
    weight = {"mtp_loss_scaling_factor": config.train.mtp_loss_weight}
    settings = megatron_config.settings(config.model)
    return settings | (weight if config.model.mtp_depth else {})


def _optimizer(config: JobConfig) -> dict[str, Any]:
    o = config.optimizer
    return {
        "optimizer": "adam", "lr": o.lr, "min_lr": o.lr * config.scheduler.min_lr_ratio,
        "weight_decay": o.weight_decay, "adam_beta1": o.betas[0], "adam_beta2": o.betas[1],
        "adam_eps": o.eps, "use_distributed_optimizer": True,
    }  # fmt: skip


def _scheduler(config: JobConfig) -> dict[str, Any]:
    warmup, _, end = config.scheduler.boundaries(config.train.max_steps)
    style = _SCHEDULES.get(config.scheduler.name, "cosine")
    return {"lr_decay_style": style, "lr_warmup_iters": warmup, "lr_decay_iters": end}


def _train(config: JobConfig) -> dict[str, Any]:
    return {
        "global_batch_size": config.train.global_batch_size, "train_iters": config.train.max_steps
    }  # fmt: skip


_SECTIONS = {"optimizer": _optimizer, "scheduler": _scheduler, "train": _train}
"""Sections of `run_config.yaml` whose keys are also arguments of Megatron-LM."""


def _arguments(config: JobConfig, progress: Progress, has_optimizer: bool) -> dict[str, Any]:
    """Return Megatron-LM's arguments of the model, the optimizer and the loader."""
    settings = _settings(config)
    is_silu = settings["activation_func"] == "silu"
    # In their place Megatron-LM has `swiglu` and `untie_embeddings_and_output_weights`.
    args = {key: v for key, v in settings.items() if not key.startswith(("activation_", "share_"))}
    args |= {
        "norm_epsilon": args.pop("layernorm_epsilon"),
        "apply_layernorm_1p": args.pop("layernorm_zero_centered_gamma"),
        "num_experts": args.pop("num_moe_experts", None),
        "bias_gelu_fusion": args.pop("bias_activation_fusion") and not is_silu,
        "rotary_seq_len_interpolation_factor": args.pop("seq_len_interpolation_factor", None),
        "use_rope_scaling": "scale_factor" in args,
        "rope_scaling_factor": args.pop("scale_factor", 8.0),
        "swiglu": is_silu and args.pop("gated_linear_unit"),
        "group_query_attention": config.model.kv_heads != config.model.n_heads,
        "untie_embeddings_and_output_weights": not config.model.tie_embeddings,
        "padded_vocab_size": config.model.vocab_size, "make_vocab_size_divisible_by": 128,
        "add_position_embedding": True, "rotary_interleaved": False,
        "squared_relu": settings["activation_func"] == megatron_config.SQUARED_RELU,
        "no_save_rng": True, "no_save_optim": not has_optimizer, "ckpt_format": "torch_dist",
        "iteration": progress.step, "consumed_train_samples": progress.samples,
        "skipped_train_samples": 0, "consumed_valid_samples": 0, **_ONE_RANK,
    }  # fmt: skip
    for section in _SECTIONS.values():
        args |= section(config)
    return {**args, "seq_length": config.train.seq_len}


def _groups(config: JobConfig, updates: int) -> Iterator[Mapping[str, Any]]:
    """Yield Megatron-Core's two parameter groups: matrices decay, vectors and biases do not."""
    groups = optimizer_state.groups(config, updates, {})
    for group, multiplier in zip(groups, (1.0, 0.0), strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        yield {
            **settings, STEP: updates, "wd_mult": multiplier, "lr_mult": 1.0,
            "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True,
            "max_lr": config.optimizer.lr,
            "min_lr": config.optimizer.lr * config.scheduler.min_lr_ratio,
        }  # fmt: skip


def _schedule(config: JobConfig, progress: Progress, updates: int) -> dict[str, Any]:
    """Return the state of Megatron-Core's scheduler, whose steps are sequences."""
    # Mean number of sequences per step, since a ramp of batch sizes has no single one.
    o, batch = config.optimizer, max(1, progress.samples // max(1, progress.step))
    warmup, _, end = config.scheduler.boundaries(config.train.max_steps)
    return {
        "max_lr": o.lr, "min_lr": o.lr * config.scheduler.min_lr_ratio,
        "lr_warmup_steps": warmup * batch, "lr_decay_steps": end * batch,
        "num_steps": updates * batch,
        "lr_decay_style": _SCHEDULES.get(config.scheduler.name, "cosine"),
        "start_wd": o.weight_decay, "end_wd": o.weight_decay, "wd_incr_steps": 0,
        "wd_incr_style": "constant",
    }  # fmt: skip
