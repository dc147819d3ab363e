"""PyTorch checkpoints that a run starts from. Only these functions import `torch_compat`."""

from pathlib import Path

from jaxforge.checkpoint.restore import Source
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig


def open_foreign(path: str, config: JobConfig) -> Source:
    """Open a PyTorch checkpoint that a run starts from."""
    from torch_compat.checkpoint import restore

    return restore.open_foreign(path, config)


def foreign_model(path: str) -> ModelConfig | None:
    """Return the `[model]` section of a PyTorch checkpoint; None if the checkpoint has no config.

    Raises:
        UserError: there is no checkpoint, or its config is invalid or not supported.
    """
    from torch_compat.checkpoint import checkpoints

    config = checkpoints.find(path).config(None)
    return None if config is None else config.model


def counts_experts(path: str, config: JobConfig) -> bool:
    """Return whether the optimizer of a PyTorch checkpoint skipped experts without tokens."""
    from torch_compat.checkpoint import restore

    return restore.counts_experts(path, config)


def keep_documents(load_path: str, run: Path) -> None:
    """Copy the files of a Hugging Face model that later exports of the run need."""
    from torch_compat.checkpoint import restore

    restore.copy_documents(load_path, run)
