"""`[train]`: batch, length, precision and the loop."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.section import Section, Words, WordTable
from jaxforge.registry import Registry

LOSSES = Registry("train.loss_fn", "cross_entropy", "chunked_cross_entropy")
"""Losses: `training.losses`."""

Dtype = Literal["float32", "bfloat16", "float16"]
"""Storage types, by their JAX names."""


class TrainConfig(Section):
    """How the training loop runs."""

    batch_size: PositiveInt = 8
    """Sequences per data-parallel rank and microbatch; follows from global_batch_size when set."""
    global_batch_size: PositiveInt | None = None
    """Sequences per update, over all ranks and microbatches; the mesh may then change freely."""
    seq_len: PositiveInt = 2048
    """Tokens per sequence."""
    max_steps: PositiveInt = 100000
    """Updates to train for."""
    grad_accum_steps: PositiveInt = 1
    """Microbatches per update."""
    grad_clip_norm: PositiveFloat = 1.0
    """Largest global L2 norm of a gradient; larger ones are scaled down to it."""
    seed: int = 42
    """Seed of initial weights and, without data_seed, of the data order."""
    data_seed: int | None = None
    """Seed of the data order alone; not set means seed."""
    compile_model: bool = True
    """Without effect: an update is always compiled."""
    compilation_cache_dir: str | None = None
    """Keeps compiled programs for later starts; not set: ~/.cache/jaxforge/xla, none on CPUs."""
    xla_flags: WordTable = Field(default_factory=Words)
    """Compiler flags by name, over those of docs/xla_flags.md; "default" takes one of them away."""
    mixed_precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    """Type of the computation; norms, softmax and loss stay in float32."""
    param_dtype: Dtype = "float32"
    """Type that parameters are stored in."""
    opt_state_dtype: Dtype = "float32"
    """Type that optimizer moments are stored in."""
    activation_checkpointing: Literal[
        "none",
        "full",
        "selective",
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    ] = "none"
    """Recompute blocks (full), attention only (selective), or by a policy of jax.checkpoint."""
    loss_fn: Annotated[str, LOSSES] = "cross_entropy"
    """Loss; the chunked one holds the logits of a part of the vocabulary, or of ce_chunk_size."""
    loss_norm: Literal["tokens", "microbatch"] = "tokens"
    """Mean over all valid tokens of an update, or mean of the microbatches' means."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Weight of the penalty on the squared log-partition of the logits."""
    ce_chunk_size: NonNegativeInt = 0
    """Tokens per device and chunk of the chunked loss; 0 means chunks of the vocabulary."""
    ce_vocab_chunk: NonNegativeInt = 0
    """Vocabulary entries per device and chunk; 0 means as many as give 128 MiB of logits."""
    grad_sync: Literal["update", "microbatch"] = "update"
    """Reduce gradients once per update, or per microbatch: more traffic for less memory."""
    on_nonfinite: Literal["skip", "stop", "warn", "rollback"] = "skip"
    """What to do about an update whose loss or gradient is not finite."""
    nan_consecutive_max: PositiveInt = 10
    """So many non-finite updates in a row end the run."""
    shutdown_timeout_sec: NonNegativeFloat = 600.0
    """Seconds from a termination signal to a forced exit."""
    nccl_health_check_interval: NonNegativeInt = 0
    """Updates between checks that the devices still talk to one another; 0 never checks."""

    def microbatch_size(self, dp: int) -> int:
        """Sequences of one microbatch over all data-parallel ranks.

        Args:
            dp: Number of data-parallel ranks, dp_replicate * dp_shard.
        """
        if self.global_batch_size is None:
            return self.batch_size * dp
        return self.global_batch_size // self.grad_accum_steps
