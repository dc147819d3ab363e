"""Losses of `train.objective`, and the fields that a frozen model adds to batches for them.

    batch ─► frozen model (`frozen_model.py`) ─► batch with further fields ─► train step

The reference of DPO or the teacher of a distillation runs in a program of its own, before the step.
The step contains nothing of it: neither its parameters nor its forward pass.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.data.teacher_logits import TEACHER_IDS, TEACHER_LOGITS
from jaxforge.model.transformer import Model
from jaxforge.parallel.sharding import batch_shardings
from jaxforge.step.distillation import build_distillation
from jaxforge.step.dpo import PAIR_SCALE, REFERENCE_NLL, build_dpo
from jaxforge.step.losses import MicrobatchLoss, build_loss

_BUILDERS = {"dpo": build_dpo, "distillation": build_distillation}


def build_objective(config: JobConfig, model: Model) -> MicrobatchLoss:
    """Return the loss of `train.objective`; that of `train.loss_fn` for next tokens.

    Raises:
        UserError: the loss does not support the mesh.
    """
    build = _BUILDERS.get(config.train.objective)
    return build_loss(config.train, model) if build is None else build(config, model)


def with_frozen_fields(config: JobConfig, mesh: Mesh, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with shapes and shardings of the fields that the frozen model adds.

    Args:
        config: a validated config.
        mesh: mesh of the batch.
        batch: arrays, or their shapes and shardings.
    """
    tokens = batch["labels"].shape
    top = (*tokens, config.distillation.top_k)
    fields: dict[str, tuple[tuple[int, ...], Any]] = {
        "dpo": {REFERENCE_NLL: (tokens, jnp.float32), PAIR_SCALE: (tokens[:2], jnp.float32)},
        "distillation": {TEACHER_IDS: (top, jnp.int32), TEACHER_LOGITS: (top, jnp.float32)},
    }.get(config.train.objective, {})
    shapes = {name: jax.ShapeDtypeStruct(*field) for name, field in fields.items()}
    split = batch_shardings(mesh, {**batch, **shapes})
    return {**batch, **{name: x.update(sharding=split[name]) for name, x in shapes.items()}}
