"""`[metrics]`: what is logged where."""

from pydantic import PositiveInt

from jaxforge.config.section import Section


class MetricsConfig(Section):
    """Logging of the run."""

    log_interval: PositiveInt = 10
    """Updates between log lines; the first update always has one."""
    enable_wandb: bool = False
    """Log to Weights & Biases."""
    enable_tensorboard: bool = False
    """Log to TensorBoard."""
    wandb_project: str = "jaxforge"
    """Project in Weights & Biases."""
    wandb_run_name: str | None = None
    """Name of the run in Weights & Biases; not set lets it choose."""
    wandb_run_id: str = ""
    """Run to continue in Weights & Biases; empty means the one in the checkpoint, or a new one."""
    tensorboard_dir: str = "tb_logs"
    """Directory of TensorBoard's files."""
