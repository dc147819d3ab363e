"""`[train]`: batch size, length, precision and training loop."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.batch_ramp import BatchRamp, Stage
from jaxforge.config.duration import Every, PositiveSteps, Steps
from jaxforge.config.fine_tuning import Objective
from jaxforge.config.section import (
    AnyPath,
    BucketPath,
    Flag,
    Interval,
    Needs,
    Section,
    SplitBy,
    Words,
    WordTable,
)
from jaxforge.registry import Registry

CROSS_ENTROPIES = ("cross_entropy", "chunked_cross_entropy")
"""Losses equal to the loss that evaluation measures."""

LOSSES = Registry("train.loss_fn", *CROSS_ENTROPIES)
"""Registered losses (`step.losses`)."""

Dtype = Literal["float32", "bfloat16", "float16"]
"""Storage dtypes by their JAX names."""


EIGHT_BIT = "8bit"
"""Value of opt_state_dtype for blockwise 8-bit moments."""

COMPENSATION = "compensation"
"""Optimizer-state field of the rounding errors that param_rounding = "kahan" compensates."""


class BatchStage(Section):
    """`[[train.batch_ramp]]`: the batch size from a step onward."""

    start: Steps = 0
    """Updates before the stage begins; 0 in the first table."""
    grad_accum_steps: PositiveInt | None = None
    """Microbatches per update."""
    global_batch_size: PositiveInt | None = None
    """Sequences per update, if train.global_batch_size is set."""

    def _problems(self) -> Iterator[str]:
        if (self.grad_accum_steps is None) == (self.global_batch_size is None):
            yield "a stage requires either grad_accum_steps or global_batch_size"


SHORTEST_HANG_TIMEOUT = 10.0
"""Smallest value of hang_timeout other than 0, in seconds."""

_CAN_OFFLOAD = ("full", "dots_with_no_batch_dims_saveable")
"""Values of activation_checkpointing whose saved activations JAX can offload to the host."""


class TrainConfig(Section):
    """Settings of the training loop."""

    batch_size: PositiveInt = 8
    """Sequences per data-parallel rank and microbatch; derived from global_batch_size if set."""
    global_batch_size: PositiveInt | None = None
    """Sequences per update over all ranks and microbatches, independent of the mesh."""
    seq_len: Annotated[PositiveInt, SplitBy("cp tp")] = 2048
    """Tokens per sequence."""
    max_steps: PositiveSteps = 100000
    """Number of updates."""
    grad_accum_steps: PositiveInt = 1
    """Microbatches per update."""
    batch_ramp: tuple[BatchStage, ...] = ()
    """Stages of increasing batch size; the last stage has the batch size of this section."""
    grad_clip_norm: PositiveFloat = 1.0
    """Maximum global L2 norm of gradients; larger gradients are scaled down to it."""
    seed: Annotated[int, Flag.HOST_INTEGER] = 42
    """Seed of initial weights, and of the data order if data_seed is not set; 0 to 2^32 - 1."""
    data_seed: Annotated[int | None, Flag.HOST_INTEGER] = None
    """Seed of the data order; if not set, seed."""
    compilation_cache_dir: Annotated[AnyPath | None, Flag.SIDE_EFFECT, Flag.PER_HOST] = None
    """Cache of compiled programs; if not set, ~/.cache/jaxforge/xla, or no cache on CPUs."""
    executable: Annotated[BucketPath | None, Flag.SIDE_EFFECT, Flag.PER_HOST] = None
    """Compiled step from `plan --save-executable`, loaded instead of compiling."""
    xla_flags: WordTable = Field(default_factory=Words)
    """Compiler flags by name, which override docs/xla_flags.md; "default" removes a flag."""
    mixed_precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    """Dtype of the computation; norms, softmax and loss use float32."""
    fp8_scaling: Annotated[
        Literal["tensor", "block", "delayed"], Needs("mixed_precision", "fp8")
    ] = "tensor"
    """Granularity and basis of the scales of 8-bit products; see docs/precision.md."""
    fp8_amax_history_len: Annotated[PositiveInt, Needs("fp8_scaling", "delayed")] = 1024
    """Updates in the amax history that determines delayed scales."""
    fp8_exclude: Annotated[tuple[str, ...], Needs("mixed_precision", "fp8")] = ("expert",)
    """Substrings of names of linear layers that stay in bf16, such as "layers.mlp.up_proj"."""
    num_layers_at_start_in_bf16: Annotated[NonNegativeInt, Needs("mixed_precision", "fp8")] = 1
    """Number of first layers that stay in bf16."""
    num_layers_at_end_in_bf16: Annotated[NonNegativeInt, Needs("mixed_precision", "fp8")] = 1
    """Number of last layers that stay in bf16."""
    initial_loss_scale: Annotated[PositiveFloat, Needs("mixed_precision", "fp16")] = 65536.0
    """Initial loss scale, halved by each overflow down to 1."""
    loss_scale_window: Annotated[PositiveInt, Needs("mixed_precision", "fp16")] = 2000
    """Consecutive steps without overflow after which the loss scale doubles."""
    param_dtype: Dtype = "float32"
    """Storage dtype of parameters."""
    param_rounding: Literal["nearest", "stochastic", "kahan"] = "nearest"
    """Rounding of updates to bfloat16 parameters; see docs/precision.md."""
    opt_state_dtype: Dtype | Literal["8bit"] = "float32"
    """Storage dtype of optimizer moments; 8bit: blockwise for matrices, see docs/precision.md."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of the parameters; 0 disables it, see averaging.md."""
    ema_dtype: Annotated[Literal["float32", "bfloat16"], Needs("ema_decay")] = "float32"
    """Storage dtype of the average; bfloat16 is rounded stochastically, for short averages."""
    ema_interval: Annotated[PositiveInt, Interval(is_reported=False), Needs("ema_decay")] = 1
    """Updates between updates of the average."""
    ema_start: Annotated[Steps, Needs("ema_decay")] = 0
    """Updates during which the average equals the parameters."""
    activation_checkpointing: Literal[
        "auto",
        "none",
        "full",
        "selective",
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    ] = "auto"
    """Recompute blocks (full), only attention (selective), or follow a jax.checkpoint policy; auto:
    the fastest that fits, see docs/remat.md."""
    offload: tuple[Literal["activations", "optimizer"], ...] = ()
    """Arrays to offload to host memory: saved activations, optimizer moments; see docs/remat.md."""
    objective: Objective = "next_token"
    """Next tokens, preferences ([dpo]) or the logits of a teacher ([distillation])."""
    loss_fn: Annotated[str, LOSSES] = "cross_entropy"
    """Loss; the chunked loss computes logits for a part of the vocabulary, or of the tokens."""
    loss_norm: Literal["tokens", "microbatch"] = "tokens"
    """Normalise by all valid tokens of an update, or average the means of microbatches."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Weight of the penalty on the squared log-partition function of the logits."""
    mtp_loss_weight: Annotated[PositiveFloat, Needs("model.mtp_depth")] = 0.3
    """Weight of the mean loss of all depths of multi-token prediction."""
    ce_chunk_size: NonNegativeInt = 0
    """Tokens per device and chunk of the chunked loss; 0 chunks the vocabulary instead."""
    ce_vocab_chunk: NonNegativeInt = 0
    """Vocabulary entries per device and chunk; 0 selects chunks of 128 MiB of logits."""
    grad_sync: Literal["auto", "update", "microbatch"] = "auto"
    """Reduce gradients per update, or per microbatch (less memory); auto: the faster that fits."""
    reduce_dtype: Literal["float32", "compute", "rounded"] = "float32"
    """Dtype of gradient reduction; compute uses that of mixed_precision, with half the traffic;
    rounded sends it, and sums in float32."""
    outer_interval: Annotated[NonNegativeInt, Interval(is_reported=False)] = 0
    """Updates that the groups of distributed.dp_replicate make apart before they exchange their
    changes (DiLoCo); 0: all devices train together. See docs/diloco.md."""
    outer_dtype: Annotated[
        Literal["float32", "bfloat16", "int8", "int4"], Needs("outer_interval")
    ] = "float32"
    """Dtype in which groups send their changes; sums are in float32."""
    on_nonfinite: Literal["skip", "stop", "warn", "rollback"] = "skip"
    """Action on an update with a non-finite loss or gradient; see docs/reliability.md."""
    on_spike: Literal["off", "skip", "stop", "warn", "rollback"] = "off"
    """Action on an update whose loss is far above the previous losses."""
    spike_threshold: Annotated[PositiveFloat, Needs("on_spike")] = 10.0
    """Robust standard deviations above the median of good losses that make a loss a spike."""
    spike_warmup: Annotated[PositiveInt, Needs("on_spike")] = 100
    """Number of good updates before spikes are detected."""
    nan_consecutive_max: PositiveInt = 10
    """Consecutive skipped updates after which the run ends or rolls back."""
    max_rollbacks: NonNegativeInt = 3
    """Maximum number of rollbacks of the run; another one ends it."""
    rerun_bad_steps: bool = False
    """Rerun a skipped update to attribute its fault; the host then waits for each step."""
    verify_interval: Every = 0
    """Updates between steps that are executed twice to detect hardware faults; 0 disables it."""
    iterations_to_skip: tuple[PositiveInt, ...] = ()
    """Updates whose batch is drawn but skipped, counted from 1 as in Megatron-LM 0.18."""
    exit_interval: Every = 0
    """Stop the run resumably after steps that are a multiple of this value; 0 disables it."""
    exit_duration_in_mins: PositiveFloat | None = None
    """Stop the run resumably this many minutes after the command started."""
    shutdown_timeout_sec: NonNegativeFloat = 600.0
    """Seconds between a termination signal and a forced exit."""
    watchdog_setup_sec: Annotated[NonNegativeFloat, Flag.NO_RESULT] = 3600.0
    """Timeout for the first step, or for a save, in seconds, after which a hung process ends; 0
    disables it."""
    watchdog_step_sec: Annotated[NonNegativeFloat, Flag.NO_RESULT] = 1800.0
    """Timeout between steps in seconds; allow for 32 steps, as the host runs ahead of devices."""
    hang_timeout: Annotated[NonNegativeFloat, Flag.NO_RESULT] = 30.0
    """Seconds until a hanging job names the culprit, and ends if one is silent; 0 disables it."""
    nccl_health_check_interval: Every = 0
    """Updates between checks of the communication between devices; 0 disables them."""
    check_weight_hash_across_dp_replicas_interval: Every = 0
    """Updates between bitwise comparisons of parameter replicas; 0 disables them."""
    manual_gc_interval: Every = 0
    """Updates between garbage collections, synchronous on all hosts; 0 leaves them to Python."""
    train_sync_interval: Every = 0
    """Updates between synchronizations with the devices; 0 synchronizes only to log."""

    def _problems(self) -> Iterator[str]:
        for key in ("seed", "data_seed"):
            seed = getattr(self, key)
            if seed is not None and seed != seed % 2**32:
                yield (
                    f"{key} = {seed} must be from 0 to {2**32 - 1}, because seeds that differ by "
                    f"2^32 make the same random numbers: set {key} to {seed % 2**32}"
                )
        if self.batch_ramp:
            yield from self._ramp_problems()
        if 0 < self.hang_timeout < SHORTEST_HANG_TIMEOUT:
            yield (
                f"hang_timeout = {self.hang_timeout:g} must be 0 (off) or at least "
                f"{SHORTEST_HANG_TIMEOUT:g}: processes have a heartbeat per second"
            )
        if self.mixed_precision == "fp16" and self.param_dtype == "float16":
            yield (
                'mixed_precision = "fp16" with param_dtype = "float16" would lose small updates in '
                'the parameters: change param_dtype to "float32"'
            )
        if self.param_rounding != "nearest" and self.param_dtype != "bfloat16":
            yield (
                f'param_rounding = "{self.param_rounding}" requires param_dtype = "bfloat16", not '
                f'"{self.param_dtype}"'
            )
        if "activations" in self.offload and self.activation_checkpointing not in _CAN_OFFLOAD:
            yield (
                'offload = ["activations"] offloads what activation_checkpointing saves: '
                f'change activation_checkpointing from "{self.activation_checkpointing}" to '
                + " or ".join(f'"{saved}"' for saved in _CAN_OFFLOAD)
            )
        if "optimizer" in self.offload and self.opt_state_dtype == EIGHT_BIT:
            yield (
                'offload = ["optimizer"] requires moments of a floating-point dtype, not '
                'opt_state_dtype = "8bit": set it to "bfloat16"'
            )

    def _ramp_problems(self) -> Iterator[str]:
        starts = [stage.start for stage in self.batch_ramp]
        if starts[0] or any(later <= earlier for earlier, later in pairwise(starts)):
            yield f"start of batch_ramp must begin at 0 and increase: {starts}"
        key = "grad_accum_steps" if self.batch_ramp[0].grad_accum_steps else "global_batch_size"
        sizes = [getattr(stage, key) for stage in self.batch_ramp]
        whole = getattr(self, key)
        if None in sizes or whole is None:
            yield f"{key} is required in all stages of batch_ramp and in [train]"
            return
        if any(later <= earlier for earlier, later in pairwise(sizes)) or sizes[-1] != whole:
            yield f"{key} of batch_ramp must increase and end with {whole}: {sizes}"
        for size in sizes:
            if size * self.grad_accum_steps % whole:
                yield (
                    f"global_batch_size = {size} of batch_ramp must be a multiple of a microbatch, "
                    f"global_batch_size / grad_accum_steps = {whole} / {self.grad_accum_steps}"
                )

    @property
    def averages_weights(self) -> bool:
        """True if the state holds an exponential moving average of the parameters."""
        return self.ema_decay > 0

    @property
    def trains_apart(self) -> bool:
        """True if groups of devices train apart, and exchange their changes from time to time."""
        return self.outer_interval > 0

    def of_groups(self, n: int, count: int) -> Self:
        """Return the section of `n` of `count` groups that train apart: each keeps its batch."""

        def share(sequences: int | None) -> int | None:
            return sequences and sequences * n // count

        ramp = tuple(
            stage.with_values({"global_batch_size": share(stage.global_batch_size)})
            for stage in self.batch_ramp
        )
        return self.with_values(
            {"global_batch_size": share(self.global_batch_size), "batch_ramp": ramp}
        )

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of the batch size; a single stage without a ramp."""
        whole = self.global_batch_size or 0
        sizes = ((x.start, x.grad_accum_steps, x.global_batch_size) for x in self.batch_ramp)
        return tuple(
            Stage(start, accum or (batch or 0) * self.grad_accum_steps // whole)
            for start, accum, batch in sizes
        ) or (Stage(0, self.grad_accum_steps),)

    def ramp(self, dp: int) -> BatchRamp:
        """Return the batch ramp in sequences, on `dp` data-parallel ranks."""
        rows = self.microbatch_size(dp)
        size = self.update_sequences(self.grad_accum_steps * rows)
        # Only an elastic job that has lost processes pads its last microbatch.
        is_padded = size < self.grad_accum_steps * rows
        return BatchRamp(self.stages(), rows, size if is_padded else None)

    def microbatch_size(self, dp: int) -> int:
        """Return the sequences of one microbatch over all data-parallel ranks.

        A global batch that does not divide is rounded up. The rules allow this only for a job that
        has lost processes (`config.resolution`).

        Args:
            dp: Number of data-parallel ranks, dp_replicate * dp_shard * ep.
        """
        if self.global_batch_size is None:
            return self.batch_size * dp
        return -(-self.global_batch_size // (self.grad_accum_steps * dp)) * dp

    def update_sequences(self, rows: int) -> int:
        """Return the sequences of an update of `rows` rows, without padding."""
        return rows if self.global_batch_size is None else min(rows, self.global_batch_size)
