"""`[metrics]`: what is logged where."""

from typing import Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt

from jaxforge.config.section import PathText, Section

Extra = Literal["grad_norms_per_layer", "num_zeros_in_grad", "params_norm", "update_norm"]
EXTRAS: tuple[str, ...] = get_args(Extra)
"""What can be computed in each step besides its loss: `step.collect`."""


class MetricsConfig(Section):
    """Logging of the run."""

    log_interval: PositiveInt = 10
    """Updates between lines on the console and in metrics.jsonl; first and last have one too."""
    log_format: Literal[
        "kempnerforge", "megatron", "torchtitan", "mindspeed", "textbook", "json"
    ] = "kempnerforge"
    """Whose console lines these are, so that existing parsers of logs go on working."""
    log_progress: bool = False
    """Keep progress.txt, Megatron's log of jobs, checkpoints and their throughput."""
    log_straggler: bool = False
    """Compare the time that each host spends on its own, and name the slow ones."""
    straggler_report_interval: PositiveInt = 100
    """Updates between these comparisons."""
    straggler_threshold: float = Field(default=0.7, gt=0, lt=1)
    """A host is slow if the fastest host's time, divided by its own, is less."""
    stop_if_detected_straggler: bool = False
    """Save and end the run when a host is slow, so that it can start again elsewhere."""
    tensorboard_interval: PositiveInt | None = None
    """Updates between points in TensorBoard; not set means log_interval."""
    wandb_interval: PositiveInt | None = None
    """Updates between points in Weights & Biases; not set means log_interval."""
    collect: tuple[Extra, ...] = ()
    """More to compute in every step and to log where it is due; docs/metrics.md explains each."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one device, for MFU; not set means the data sheet's, where it is known."""
    enable_wandb: bool = False
    """Log to Weights & Biases."""
    enable_tensorboard: bool = False
    """Log to TensorBoard."""
    wandb_project: str = "jaxforge"
    """Project in Weights & Biases."""
    wandb_run_name: str | None = None
    """Name of the run in Weights & Biases; not set lets it choose."""
    wandb_run_id: str = ""
    """Id of the run in Weights & Biases; empty means the one in the checkpoint, or a new one."""
    tensorboard_dir: PathText = "tb_logs"
    """Directory of TensorBoard's files, seen from the run directory."""
