"""Checks that a checkpoint matches a model config, and that it was written correctly."""

from collections.abc import Iterator, Mapping
from operator import attrgetter

from jaxforge.config.model import MIXER_TABLES, ModelConfig
from jaxforge.errors import StorageError, UserError
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.formats.lazy import LazyTensor
from torch_compat.names.table import differences
from torch_compat.names.translation import shorten_problems

_STRUCTURE = ("n_heads", "kv_heads", "activation", "norm_unit_offset", "parallel_residual",
              "position_embedding", "qk_norm_type", "qk_norm_scope", "qk_l2_norm", "moe_router",
              "moe_score_inputs", "latent_attention", "gated_delta_net.key_heads",
              "mamba2.groups")  # fmt: skip
_CONSTANTS = ("norm_eps", "rope_theta", "rope_scaling", "qk_norm_eps", "partial_rotary_factor",
              "attention_chunk_size", "local_rope_theta", "rope_pattern", "attention_scale",
              "attn_logit_softcap", "final_logit_softcap", "embedding_multiplier",
              "residual_multiplier", "logits_scaling", "moe_top_k", "moe_norm_topk",
              "moe_routed_scaling", "moe_groups", "moe_top_k_groups", "moe_group_score",
              "moe_capacity_factor", "bias_update", "swiglu_limit", "clip_qkv", "alibi_max_bias",
              "attn_temperature_scale", "attn_temperature_floor",
              "mup_base_width", "mup_base_head_dim", "mamba2.time_step_min",
              "mamba2.time_step_max")  # fmt: skip
INVISIBLE_KEYS = (*_STRUCTURE, *_CONSTANTS)
"""Keys of `[model]` that do not affect the shapes of the weights."""


def check_fits(
    checkpoint: CheckpointState, target: AbstractTarget, trained: ModelConfig, where: str
) -> None:
    """Check that the state of a run matches a config that the user may have changed.

    Args:
        checkpoint: the state.
        target: state that the config declares.
        trained: model section of the run's own config.
        where: path of the checkpoint, for messages.

    Raises:
        UserError: the config is of another model or optimizer; the message lists the differences.
    """
    wanted = {**target.params, **(target.model_state if checkpoint.model_state else {})}
    problems = list(
        differences(wanted, checkpoint.variables, checkpoint.variables.keys() - wanted.keys())
    )
    problems += invisible_differences(trained, target.config.model, _STRUCTURE)
    if checkpoint.moments is not None and checkpoint.moments.keys() != target.moments.keys():
        fields = [", ".join(sorted(moments)) for moments in (checkpoint.moments, target.moments)]
        name = target.config.optimizer.name
        problems.append(f'its optimizer has {fields[0]}; optimizer.name = "{name}" has {fields[1]}')
    if problems:
        listed = "\n  ".join(shorten_problems(problems))
        raise UserError(
            f"{where} does not match this config; the config that is stored in it does:\n  {listed}"
        )


def invisible_differences(
    trained: ModelConfig, model: ModelConfig, keys: tuple[str, ...] = _CONSTANTS
) -> Iterator[str]:
    """Yield the differences of two models that do not affect the shapes of their weights.

    Args:
        trained: model in which the weights were trained.
        model: model that will use the weights.
        keys: keys of `[model]` to compare; by default constants that a user may change.
    """
    for key in keys:
        was, now = map(attrgetter(key), (trained, model))
        if was != now and has_effect(key, model):
            yield f"model.{key} is {now} and the weights were trained with {was}"


def has_effect(key: str, model: ModelConfig) -> bool:
    """Return whether a key of `INVISIBLE_KEYS` affects a model."""
    if key in ("qk_norm_type", "qk_norm_scope"):
        return model.qk_norm
    if key == "qk_norm_eps":
        return model.qk_norm or model.qk_l2_norm
    if key == "attn_temperature_floor":
        return model.attn_temperature_scale is not None
    if (table := key.partition(".")[0]) in MIXER_TABLES:
        return table in model.mixers
    return model.is_moe or not key.startswith("moe_")


def check_written(
    opened: Mapping[str, LazyTensor], written: Mapping[str, LazyTensor], where: str
) -> None:
    """Check that a checkpoint has the names, shapes and dtypes that were written.

    Args:
        opened: tensors read from the checkpoint.
        written: tensors that were written.
        where: path of the checkpoint, for messages.

    Raises:
        StorageError: a tensor differs or is missing.
    """
    specs = [{n: (t.shape, t.dtype) for n, t in each.items()} for each in (opened, written)]
    if wrong := sorted(name for name, _ in specs[0].items() ^ specs[1].items()):
        raise StorageError(f"{where}: {wrong[0]} differs from what was written")
