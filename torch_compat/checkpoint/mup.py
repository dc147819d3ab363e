"""Conversion of muP models (`jaxforge.model.mup`) to the standard parametrisation.

What a trained model computes, a standard one computes with other weights: output matrices times
their multiplier, queries times the extra factor of their scores. Its training is
another one there: moments, and rates by parameter, have no counterpart.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model import mup
from torch_compat.checkpoint.state import Tensors
from torch_compat.formats.lazy import Index, LazyTensor

_QUERIES = r"layers\.\d+\.attention\.q_proj\.(weight|bias)"
_ROUTERS = r"layers\.\d+\.mlp\.(router\.gate|shared_expert_gate)\.weight"
_HEAD = r"output_head\.proj\.weight"


def is_standard(model: ModelConfig) -> bool:
    """Return whether a model is unchanged without its muP keys, because it has the base width."""
    return mup.width_ratio(model) == 1.0 and mup.score_scale(model) == model.attention_scale


def to_standard(model: ModelConfig) -> ModelConfig:
    """The standard model that computes the same from `folded` weights.

    A tied head is the embedding, too, and normalised queries have lost their scale: there, keys of
    the model say it, which not every family has.
    """
    tied = {"logits_scaling": model.logits_scaling * mup.width_ratio(model)}
    scores = {"attention_scale": mup.score_scale(model)}
    changed = {
        "mup_base_width": None,
        "mup_base_head_dim": None,
        **(tied if model.tie_embeddings else {}),
        **(scores if model.qk_norm else {}),
    }
    return model if model.mup_base_width is None else model.model_copy(update=changed)


def fold_multipliers(params: Tensors, model: ModelConfig) -> Tensors:
    """Weights with the multipliers in them: exact where these are powers of two.

    Args:
        params: by our names, in the dtype that they were trained in.
        model: that they are of.
    """
    factors = _factors(model)
    return {
        name: _times(tensor, next((f for of, f in factors.items() if re.fullmatch(of, name)), 1.0))
        for name, tensor in params.items()
    }


def check_export(model: ModelConfig, *, weights_only: bool) -> None:
    """Refuses what cannot be exported.

    Raises:
        UserError: an optimizer goes with the weights.
    """
    if not (weights_only or is_standard(model)):
        raise UserError(
            f"model.mup_base_width = {model.mup_base_width}: a torch job would go on with another "
            "learning rate for each matrix and other multipliers. Export with --weights-only, or "
            "to hf: multipliers are folded into the weights"
        )


def check_import(model: ModelConfig, where: str) -> None:
    """Refuses weights of the standard parametrisation for a model of another one.

    Raises:
        UserError: muP's multipliers would change what they compute.
    """
    if not is_standard(model):
        raise UserError(
            f"{where} has weights of the standard parametrisation, and model.mup_base_width = "
            f"{model.mup_base_width} would compute something else with them: remove it (and "
            f"mup_base_head_dim), or set it to model.dim = {model.dim}"
        )


def _factors(model: ModelConfig) -> Mapping[str, float]:
    """By regular expressions of names."""
    output = mup.output_multiplier(model)
    share = (model.mup_base_head_dim or model.head_size) / model.head_size
    # Relative to the usual 1/√head, scores have √base/head; relative to a set scale, its share.
    queries = math.sqrt(share) if model.attention_scale is None else share
    factors = {_ROUTERS: output, _HEAD: output, _QUERIES: queries}
    if model.qk_norm:
        del factors[_QUERIES]
    return {names: factor for names, factor in factors.items() if factor != 1.0}


def _times(tensor: LazyTensor, factor: float) -> LazyTensor:
    if factor == 1.0:
        return tensor

    def read(index: Index) -> np.ndarray:
        wide = tensor.read(index).astype(np.float32) * np.float32(factor)
        return wide.astype(tensor.dtype)

    return dataclasses.replace(tensor, read=read)
