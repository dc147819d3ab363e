"""Checks that a checkpoint matches a model config, and that it reads as it was written."""

from collections.abc import Iterator, Mapping

from jaxforge.config.model import ModelConfig
from jaxforge.errors import StorageError, UserError
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.formats.lazy import LazyTensor
from torch_compat.names.table import differences
from torch_compat.names.translation import shorten_problems

_STRUCTURE = ("n_heads", "kv_heads", "activation", "norm_unit_offset", "parallel_residual",
              "moe_router")  # fmt: skip
_CONSTANTS = ("norm_eps", "rope_theta", "rope_scaling", "qk_norm_eps", "partial_rotary_factor",
              "attention_chunk_size", "local_rope_theta", "rope_pattern", "attention_scale",
              "attn_logit_softcap", "final_logit_softcap", "embedding_multiplier",
              "residual_multiplier", "logits_scaling", "moe_top_k", "moe_norm_topk",
              "moe_routed_scaling", "moe_groups", "moe_top_k_groups", "moe_capacity_factor",
              "bias_update", "swiglu_limit", "mup_base_width", "mup_base_head_dim")  # fmt: skip
UNSEEN = (*_STRUCTURE, *_CONSTANTS)
"""Keys of `[model]` that do not show in the shapes of the weights."""


def check_fits(
    checkpoint: CheckpointState, target: AbstractTarget, trained: ModelConfig, where: str
) -> None:
    """Check that the state of a run is that of a config, which the user may have changed.

    Args:
        checkpoint: the state.
        target: what the config declares.
        trained: the model in the run's own config.
        where: the checkpoint, for the message.

    Raises:
        UserError: the config is of another model or optimizer; the differences are listed.
    """
    wanted = {**target.params, **(target.model_state if checkpoint.model_state else {})}
    problems = list(
        differences(wanted, checkpoint.variables, checkpoint.variables.keys() - wanted.keys())
    )
    problems += unseen(trained, target.config.model, _STRUCTURE)
    if checkpoint.moments is not None and checkpoint.moments.keys() != target.moments.keys():
        fields = [", ".join(sorted(moments)) for moments in (checkpoint.moments, target.moments)]
        name = target.config.optimizer.name
        problems.append(f'its optimizer has {fields[0]}; optimizer.name = "{name}" has {fields[1]}')
    if problems:
        listed = "\n  ".join(shorten_problems(problems))
        raise UserError(
            f"{where} is not of this config; the one that is stored in it is:\n  {listed}"
        )


def unseen(
    trained: ModelConfig, model: ModelConfig, keys: tuple[str, ...] = _CONSTANTS
) -> Iterator[str]:
    """Yield the differences of two models that do not show in the shapes of their weights.

    Args:
        trained: the model that the weights were trained in.
        model: the model that is to have them.
        keys: of `[model]`; by default constants that a user may change.
    """
    for key in keys:
        was, now = getattr(trained, key), getattr(model, key)
        if was != now and matters(key, model):
            yield f"model.{key} is {now} and the weights were trained with {was}"


def matters(key: str, model: ModelConfig) -> bool:
    """Return whether a key of `UNSEEN` has an effect in a model."""
    if key == "qk_norm_eps":
        return model.qk_norm
    return model.is_moe or not key.startswith("moe_")


def check_written(
    opened: Mapping[str, LazyTensor], written: Mapping[str, LazyTensor], where: str
) -> None:
    """Check that an opened checkpoint has every name that was written, with its shape and dtype.

    Args:
        opened: tensors of the checkpoint.
        written: tensors that it should have.
        where: the checkpoint, for the message.

    Raises:
        StorageError: it has not.
    """
    forms = [{n: (t.shape, t.dtype) for n, t in each.items()} for each in (opened, written)]
    if wrong := sorted(name for name, _ in forms[0].items() ^ forms[1].items()):
        raise StorageError(f"{where}: {wrong[0]} does not read as it was written")
