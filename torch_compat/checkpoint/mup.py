"""Conversion of muP models (`jaxforge.model.mup`) to the standard parametrisation.

A standard model computes the same function if the multipliers are folded into its weights: those of
output matrices, and the extra factor of attention scores into the queries. Training does not carry
over: moments and learning rates per parameter have no counterpart.
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

_QUERIES = r"layers\.\d+\.(latent_)?attention\.q_(b_)?proj\.(weight|bias)"
_ROUTERS = r"layers\.\d+\.mlp\.(router\.gate|shared_expert_gate)\.weight"
_HEAD = r"output_head\.proj\.weight"


def is_standard(model: ModelConfig) -> bool:
    """Return whether a model is unchanged without its muP keys, because it has the base width."""
    return mup.width_ratio(model) == 1.0 and mup.score_scale(model) == model.attention_scale


def to_standard(model: ModelConfig) -> ModelConfig:
    """Return the config of the standard model for weights of `fold_multipliers`.

    Multipliers of a tied head (which is also the embedding) and of normalised queries (which have
    lost their scale) become keys of the model, which not every family has.
    """
    # A tied head cannot absorb the multiplier: the embedding shares its weights.
    tied = {"logits_scaling": model.logits_scaling * mup.width_ratio(model)}
    scores = {"attention_scale": mup.score_scale(model)}
    changed = {
        "mup_base_width": None,
        "mup_base_head_dim": None,
        **(tied if model.tie_embeddings else {}),
        **(scores if model.qk_norm else {}),
    }
    return model if model.mup_base_width is None else model.with_values(changed)


def fold_multipliers(params: Tensors, model: ModelConfig) -> Tensors:
    """Return weights multiplied by the muP multipliers; exact for powers of two.

    Args:
        params: parameters by our names, in the dtype in which they were trained.
        model: config of the model.
    """
    factors = _factors(model)
    return {
        name: _scale(
            tensor, next((f for names, f in factors.items() if re.fullmatch(names, name)), 1.0)
        )
        for name, tensor in params.items()
    }


def check_export(model: ModelConfig, *, weights_only: bool) -> None:
    """Check that a muP model is exported without its optimizer.

    Raises:
        UserError: the export includes the optimizer.
    """
    if not (weights_only or is_standard(model)):
        raise UserError(
            f"model.mup_base_width = {model.mup_base_width}: a torch job would continue with other "
            "learning rates and multipliers. Export with --weights-only, or to hf: multipliers are "
            "then folded into the weights"
        )


def check_import(model: ModelConfig, where: str) -> None:
    """Check that a model can take weights of the standard parametrisation.

    Raises:
        UserError: muP multipliers would change the function that the weights compute.
    """
    if not is_standard(model):
        raise UserError(
            f"{where} has weights of the standard parametrisation, and model.mup_base_width = "
            f"{model.mup_base_width} would compute something else with them: remove it (and "
            f"mup_base_head_dim), or set it to model.dim = {model.dim}"
        )


def _factors(model: ModelConfig) -> Mapping[str, float]:
    """Return regular expression of names -> factor of the weights."""
    output = mup.output_multiplier(model)
    share = (model.mup_base_head_dim or model.head_size) / model.head_size
    # Scores of muP are scaled by √base/head instead of 1/√head: a factor of √(base/head). A model
    # with a scale of its own multiplies that scale by base/head.
    queries = math.sqrt(share) if model.attention_scale is None else share
    factors = {_ROUTERS: output, _HEAD: output, _QUERIES: queries}
    # Norms would remove a factor of the queries. `to_standard` changes attention_scale.
    if model.qk_norm:
        del factors[_QUERIES]
    return {names: factor for names, factor in factors.items() if factor != 1.0}


def _scale(tensor: LazyTensor, factor: float) -> LazyTensor:
    if factor == 1.0:
        return tensor

    def read(index: Index) -> np.ndarray:
        # In float32, so that a factor that is not a power of two rounds only once.
        wide = tensor.read(index).astype(np.float32) * np.float32(factor)
        return wide.astype(tensor.dtype)

    return dataclasses.replace(tensor, read=read)
