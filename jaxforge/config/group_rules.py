"""Rules of groups that train apart, `train.outer_interval` (`rules.py`)."""

import json
from collections.abc import Iterator

from jaxforge.config.axes import Mesh
from jaxforge.config.job import JobConfig


def groups_exchange_in_time(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Require an interval that fits the fragments, and an overlap within it."""
    interval, outer = config.train.outer_interval, config.outer_optimizer
    if not interval:
        return
    if interval % outer.fragments:
        yield (
            f"train.outer_interval = {interval} must be a multiple of outer_optimizer.fragments = "
            f"{outer.fragments}, which are exchanged in turn: change one of them"
        )
    if outer.overlap >= interval:
        yield (
            f"outer_optimizer.overlap = {outer.overlap} must be less than train.outer_interval = "
            f"{interval}: lower it"
        )
    layers = config.model.n_layers // mesh["pp"]
    if outer.fragments > layers or (mesh["pp"] > 1 and layers % outer.fragments):
        whose = "of a pipeline stage " if mesh["pp"] > 1 else ""
        yield (
            f"outer_optimizer.fragments = {outer.fragments} must divide the {layers} layers "
            f"{whose}of model.n_layers = {config.model.n_layers}: change one of them"
        )


def groups_can_train_apart(config: JobConfig, mesh: Mesh) -> Iterator[str]:
    """Refuse what groups that train apart do not support."""
    train, d = config.train, config.distributed
    if not train.trains_apart:
        return
    where = f"is not supported with train.outer_interval = {train.outer_interval}"
    if config.lora.rank:
        yield (
            f"lora.rank = {config.lora.rank} {where}: adapters are small, so that their gradients "
            "can be exchanged in every update. Set outer_interval to 0"
        )
    if config.optimizer.name == "schedule_free_adamw":
        yield (
            f'optimizer.name = "schedule_free_adamw" {where}, because it keeps weights among its '
            "moments, which groups do not exchange: choose another optimizer"
        )
    if train.param_rounding == "kahan":
        yield (
            f'train.param_rounding = "kahan" {where}, because its rounding errors belong to '
            'weights that an exchange replaces: set it to "stochastic", or param_dtype to "float32"'
        )
    if train.offload:
        yield f"train.offload = {json.dumps(train.offload)} {where}: remove one of them"
    for key in ("rerun_bad_steps", "verify_interval"):
        if value := getattr(train, key):
            yield f"train.{key} = {json.dumps(value)} {where}: remove one of them"
    if mesh["pp"] > 1 and (d.chunks > 1 or config.model.n_layers % mesh["pp"]):
        yield (
            f"pipeline stages of different or several groups of layers {where}: set "
            'distributed.pp_schedule to "1f1b" or "gpipe", and model.n_layers to a multiple of '
            f"distributed.pp = {mesh['pp']}"
        )
    if train.global_batch_size and train.global_batch_size % mesh["dp_replicate"]:
        yield (
            f"train.global_batch_size = {train.global_batch_size} must be a multiple of "
            f"distributed.dp_replicate = {mesh['dp_replicate']}, the number of groups that train "
            "apart: change one of them"
        )
