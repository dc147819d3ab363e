"""Keys that mean something to PyTorch alone, and what does their job here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxforge.config.job import JobConfig

_TEXT = "jaxforge trains text models"

TORCH_ONLY: dict[str, str] = {
    "train.compile_model": "every update is one compiled program",
    "optimizer.fused": "XLA fuses the update of all parameters",
    "data.pin_memory": "batches go straight to the devices, ahead of the step that needs them",
    "data.hf_dataset_image_field": _TEXT,
    "data.hf_dataset_prompt_field": _TEXT,
    "data.hf_image_size": _TEXT,
    "distributed.backend": "XLA brings the collectives of each kind of device",
    "distributed.nccl_timeout_sec": "jax.distributed has its own time-outs between processes",
    "checkpoint.ignore_freeze_mismatch": f"{_TEXT}, in which nothing is frozen",
}
"""Key without effect -> what does its job."""


def is_kempnerforges(config: JobConfig) -> bool:
    """Whether a configuration is one of KempnerForge's, or is to do as it does.

    Nothing in a file says so for sure: these are marks. It has a key that means something to
    PyTorch alone, or follows KempnerForge's order of the data.

    Args:
        config: As read.
    """
    return config.data.order == "torch" or any(config.is_set(key) for key in TORCH_ONLY)


def answers(config: JobConfig) -> list[str]:
    """One line for each key that has no effect here, of those written, or another default.

    Args:
        config: A loaded configuration; it remembers which keys were written.
    """
    lines = [
        f"{key} has no effect: {answer}" for key, answer in TORCH_ONLY.items() if config.is_set(key)
    ]
    scheduler, usual = config.scheduler, config.usual_warmup(10**9)
    is_ours = not config.is_set("scheduler.warmup_steps") and scheduler.warmup_steps < usual
    if is_ours and scheduler.name != "none":
        lines.append(
            f"scheduler.warmup_steps is not set: {scheduler.warmup_steps:,} updates, a tenth of "
            f"the run (in KempnerForge {usual:,})"
        )
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        lines.append('checkpoint.async_mode = "async_with_pinned_mem" is the same as "async"')
    return lines
