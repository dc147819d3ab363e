"""Split of a checkpoint into one directory per pipeline stage, as KempnerForge writes them."""

import dataclasses
from collections.abc import Sequence

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.checkpoint.stacking import layer_of
from torch_compat.checkpoint.state import CheckpointState, Tensors
from torch_compat.formats.dcp_reader import stage_name
from torch_compat.names.table import EMBEDDING, NameMap


def check(stages: int, dialect: NameMap, model: ModelConfig) -> None:
    """Check that a model can be split into a number of stages.

    Args:
        stages: number of stages.
        dialect: dialect of the checkpoint.
        model: the model.

    Raises:
        UserError: the dialect has no stages, or does not support them for this model.
    """
    if stages == 1:
        return
    if not dialect.has_stages:
        raise UserError(
            f"--stages {stages}: {dialect.name} has no checkpoints per pipeline stage: leave "
            "--stages out, or export --to dcp --dialect kempnerforge"
        )
    if not 1 <= stages <= model.n_layers:
        raise UserError(
            f"--stages {stages}: each stage needs at least one layer, and model.n_layers = "
            f"{model.n_layers}: give a number from 1 to {model.n_layers}"
        )
    if model.mtp_depth:
        raise UserError(
            f"--stages {stages}: KempnerForge has no multi-token prediction: export with "
            "--model.mtp_depth=0"
        )
    if model.tie_embeddings or model.is_moe:
        what = "tie_embeddings = true" if model.tie_embeddings else "num_experts > 0"
        raise UserError(
            f"--stages {stages}: KempnerForge refuses model.{what} with distributed.pp > 1: leave "
            "--stages out, and resume with distributed.pp = 1 there"
        )


def split(checkpoint: CheckpointState, layers: int, stages: int) -> dict[str, CheckpointState]:
    """Return the parts of a checkpoint by stage directory; "" is the whole state for one stage.

    Args:
        checkpoint: the whole state.
        layers: number of layers of the model.
        stages: number of stages.
    """
    if stages == 1:
        return {"": checkpoint}
    from jaxforge.parallel.stages import Stack  # here, as it imports JAX

    # [stages, layers of a stage]
    rows = Stack(layers, stages).rows().reshape(stages, -1).tolist()

    def part(tensors: Tensors, stage: int) -> Tensors:
        return {n: tensor for n, tensor in tensors.items() if _stage_of(n, rows) == stage}

    return {
        stage_name(stage): dataclasses.replace(
            checkpoint,
            params=part(checkpoint.params, stage),
            model_state=part(checkpoint.model_state, stage),
            moments=checkpoint.moments
            and {f: part(t, stage) for f, t in checkpoint.moments.items()},
        )
        for stage in range(stages)
    }


def _stage_of(name: str, rows: Sequence[Sequence[int]]) -> int:
    """Return the stage of an array of the model.

    Args:
        name: our name of the array.
        rows: layers of each stage.
    """
    if name == EMBEDDING:
        return 0
    layer = layer_of(name)
    if layer is None:
        return len(rows) - 1
    return next(stage for stage, layers in enumerate(rows) if layer in layers)
