"""Keys that mean something to PyTorch alone, and what does their job here."""

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
