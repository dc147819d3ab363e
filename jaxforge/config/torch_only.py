"""Keys that have an effect only in PyTorch, and their replacement in jaxforge."""

_TEXT = "jaxforge trains text models"

TORCH_ONLY: dict[str, str] = {
    "model.attention_backend": "model.sdpa_backend chooses the kernel; all separate documents",
    "train.compile_model": "every update is a single compiled program",
    "optimizer.fused": "XLA fuses the update of all parameters",
    "data.pin_memory": "batches are transferred to the devices before the step that needs them",
    "data.hf_dataset_image_field": _TEXT,
    "data.hf_dataset_prompt_field": _TEXT,
    "data.hf_image_size": _TEXT,
    "distributed.backend": "XLA provides the collectives for each platform",
    "distributed.nccl_timeout_sec": "jax.distributed has its own timeouts between processes",
    "checkpoint.ignore_freeze_mismatch": f"{_TEXT}, which have no frozen parameters",
}
"""Replacement of each key without effect."""
