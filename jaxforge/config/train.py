"""`[train]`: batch, length, precision and the loop."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.batch_ramp import BatchRamp, Stage
from jaxforge.config.duration import PositiveSteps, Steps
from jaxforge.config.problems import Problem, single_change
from jaxforge.config.section import PathText, Section, Words, WordTable
from jaxforge.registry import Registry

CROSS_ENTROPIES = ("cross_entropy", "chunked_cross_entropy")
"""Losses that are what evaluation measures anyway."""

LOSSES = Registry("train.loss_fn", *CROSS_ENTROPIES)
"""Losses: `step.losses`."""

Dtype = Literal["float32", "bfloat16", "float16"]
"""Storage types, by their JAX names."""


EIGHT_BIT = "8bit"
"""What opt_state_dtype may be besides a type of JAX."""

COMPENSATION = "compensation"
"""What the optimizer keeps of the digits that param_rounding = "kahan" has still to add."""


class BatchStage(Section):
    """`[[train.batch_ramp]]`: the size of updates from some step on."""

    start: Steps = 0
    """Updates before the first one of this size; 0 in the first table."""
    grad_accum_steps: PositiveInt | None = None
    """Microbatches per update."""
    global_batch_size: PositiveInt | None = None
    """Sequences per update instead, where train.global_batch_size is set."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this table."""
        if (self.grad_accum_steps is None) == (self.global_batch_size is None):
            yield "a stage needs either grad_accum_steps or global_batch_size"


_CAN_OFFLOAD = ("full", "dots_with_no_batch_dims_saveable")
"""Values of activation_checkpointing for which JAX can send what is saved to the host."""


class TrainConfig(Section):
    """Settings of the training loop."""

    batch_size: PositiveInt = 8
    """Sequences per data-parallel rank and microbatch; follows from global_batch_size when set."""
    global_batch_size: PositiveInt | None = None
    """Sequences per update, over all ranks and microbatches; the mesh may then change freely."""
    seq_len: PositiveInt = 2048
    """Tokens per sequence."""
    max_steps: PositiveSteps = 100000
    """Updates to train for."""
    grad_accum_steps: PositiveInt = 1
    """Microbatches per update."""
    batch_ramp: tuple[BatchStage, ...] = ()
    """Smaller batches to begin with; the last stage is that of grad_accum_steps."""
    grad_clip_norm: PositiveFloat = 1.0
    """Largest global L2 norm of a gradient; larger ones are scaled down to it."""
    seed: int = 42
    """Seed of initial weights and, without data_seed, of the data order."""
    data_seed: int | None = None
    """Seed of the data order alone; not set means seed."""
    compile_model: bool = True
    """Without effect: an update is always compiled."""
    compilation_cache_dir: PathText | None = None
    """Keeps compiled programs for later starts; not set: ~/.cache/jaxforge/xla, none on CPUs."""
    executable: PathText | None = None
    """File that `plan --save-executable` wrote: the run starts with its step, compiling none."""
    xla_flags: WordTable = Field(default_factory=Words)
    """Compiler flags by name, over those of docs/xla_flags.md; "default" takes one of them away."""
    mixed_precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    """Type of the computation; norms, softmax and loss stay in float32."""
    fp8_scaling: Literal["tensor", "block", "delayed"] = "tensor"
    """With mixed_precision = "fp8", what shares a scale, and what it goes by: docs/precision.md."""
    fp8_amax_history_len: PositiveInt = 1024
    """Updates whose largest amax delayed scales go by."""
    fp8_exclude: tuple[str, ...] = ("expert",)
    """Linear layers with any of these in their name, such as "layers.mlp.up_proj", stay in bf16."""
    num_layers_at_start_in_bf16: NonNegativeInt = 1
    """With mixed_precision = "fp8", so many first layers stay in bf16."""
    num_layers_at_end_in_bf16: NonNegativeInt = 1
    """The same of the last ones."""
    initial_loss_scale: PositiveFloat = 65536.0
    """With mixed_precision = "fp16", what the loss is multiplied by to begin with."""
    min_loss_scale: PositiveFloat = 1.0
    """A scale that goes no lower; overflows at it are bad steps, as of on_nonfinite."""
    loss_scale_window: PositiveInt = 2000
    """Steps in a row without an overflow after which the scale grows."""
    loss_scale_growth_factor: PositiveFloat = 2.0
    """By how much it then grows."""
    loss_scale_backoff_factor: PositiveFloat = 0.5
    """What it is multiplied by after an overflow."""
    param_dtype: Dtype = "float32"
    """Type that parameters are stored in."""
    param_rounding: Literal["nearest", "stochastic", "kahan"] = "nearest"
    """How parameters in bfloat16 take updates below their last digit: docs/precision.md."""
    opt_state_dtype: Dtype | Literal["8bit"] = "float32"
    """Type that optimizer moments are stored in; 8bit: matrices by blocks, docs/precision.md."""
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
    offload: tuple[Literal["activations", "optimizer"], ...] = ()
    """What waits in the memory of the host: what blocks save, moments; docs/remat.md."""
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
    grad_sync: Literal["auto", "update", "microbatch"] = "auto"
    """Reduce gradients per update, or per microbatch: more traffic, less memory; auto: as fits."""
    reduce_dtype: Literal["float32", "compute"] = "float32"
    """Type in which devices add up gradients; "compute": that of mixed_precision, half the size."""
    on_nonfinite: Literal["skip", "stop", "warn", "rollback"] = "skip"
    """What to do about an update whose loss or gradient is not finite; see docs/reliability.md."""
    on_spike: Literal["off", "skip", "stop", "warn", "rollback"] = "off"
    """What to do about an update whose loss is far above those before it."""
    spike_threshold: PositiveFloat = 10.0
    """A loss is a spike so many (robust) standard deviations above the median of good ones."""
    spike_warmup: PositiveInt = 100
    """Good updates before which no loss is a spike."""
    nan_consecutive_max: PositiveInt = 10
    """So many skipped updates in a row end the run, or roll it back."""
    max_rollbacks: NonNegativeInt = 3
    """Rollbacks of the whole run after which the next one ends it."""
    rerun_bad_steps: bool = False
    """Run a skipped update again, to tell whose fault it is; the host then waits for each step."""
    iterations_to_skip: tuple[PositiveInt, ...] = ()
    """Updates, counted from 1 as in Megatron-LM 0.18, whose batch is drawn and left out."""
    exit_interval: NonNegativeInt = 0
    """The run stops, to be continued, after steps that are a multiple of it; 0 never."""
    exit_duration_in_mins: PositiveFloat | None = None
    """The run stops, to be continued, so many minutes after the command was started."""
    shutdown_timeout_sec: NonNegativeFloat = 600.0
    """Seconds from a termination signal to a forced exit."""
    watchdog_setup_sec: NonNegativeFloat = 3600.0
    """Seconds without a first step after which the process counts as hung and ends; 0 never."""
    watchdog_step_sec: NonNegativeFloat = 1800.0
    """The same between steps; launches run ahead of the devices, so let it cover 32 steps."""
    watchdog_checkpoint_sec: NonNegativeFloat = 1800.0
    """The same for a checkpoint that is being saved."""
    nccl_health_check_interval: NonNegativeInt = 0
    """Updates between checks that the devices still talk to one another; 0 never checks."""
    health_check_timeout_sec: PositiveFloat = 10.0
    """Seconds in which that check must have its answer, slower processes waited for included."""
    check_weight_hash_across_dp_replicas_interval: NonNegativeInt = 0
    """Updates between comparisons of the copies of each parameter, bit for bit; 0 compares none."""
    manual_gc_interval: NonNegativeInt = 0
    """Updates between garbage collections, at the same ones on all hosts; 0 lets Python choose."""
    train_sync_interval: NonNegativeInt = 0
    """Updates between waits for the devices; 0 lets the host run ahead until it logs."""

    def problems(self) -> Iterator[str | Problem]:
        """Yields the broken rules between the keys of this section."""
        if not -(2**63) <= self.seed < 2**63:
            yield f"seed must be {-(2**63)} to {2**63 - 1}, as a key of JAX takes it"
        if self.batch_ramp:
            yield from self._ramp_problems()
        if self.mixed_precision == "fp16":
            yield from self._loss_scale_problems()
        if self.param_rounding != "nearest" and self.param_dtype != "bfloat16":
            yield Problem(
                f'param_rounding = "{self.param_rounding}" is for parameters in bfloat16, and '
                f'param_dtype = "{self.param_dtype}"',
                (
                    single_change("param_rounding", "nearest"),
                    single_change("param_dtype", "bfloat16"),
                ),
            )
        if "activations" in self.offload and self.activation_checkpointing not in _CAN_OFFLOAD:
            yield (
                'offload = ["activations"] moves what activation_checkpointing chooses to save: '
                f'change activation_checkpointing from "{self.activation_checkpointing}" to '
                + " or ".join(f'"{saved}"' for saved in _CAN_OFFLOAD)
            )

        if "optimizer" in self.offload and self.opt_state_dtype == EIGHT_BIT:
            yield Problem(
                'offload = ["optimizer"] is for moments in a floating-point type, and '
                'opt_state_dtype = "8bit"',
                (single_change("opt_state_dtype", "bfloat16"),),
            )

    def _loss_scale_problems(self) -> Iterator[str]:
        if self.param_dtype == "float16":
            yield (
                'mixed_precision = "fp16" with param_dtype = "float16" would lose small updates in '
                'the parameters: change param_dtype to "float32"'
            )
        if self.initial_loss_scale < self.min_loss_scale:
            yield (
                f"initial_loss_scale = {self.initial_loss_scale:g} must be at least "
                f"min_loss_scale = {self.min_loss_scale:g}"
            )
        if self.loss_scale_growth_factor <= 1 or self.loss_scale_backoff_factor >= 1:
            yield (
                f"loss_scale_growth_factor = {self.loss_scale_growth_factor:g} must be above 1, "
                f"and loss_scale_backoff_factor = {self.loss_scale_backoff_factor:g} below"
            )

    def _ramp_problems(self) -> Iterator[str]:
        starts = [stage.start for stage in self.batch_ramp]
        if starts[0] or any(later <= earlier for earlier, later in pairwise(starts)):
            yield f"the start of batch_ramp must be 0, then increase, not go {starts}"
        key = "grad_accum_steps" if self.batch_ramp[0].grad_accum_steps else "global_batch_size"
        sizes = [getattr(stage, key) for stage in self.batch_ramp]
        whole = getattr(self, key)
        if None in sizes or whole is None:
            yield f"all stages of batch_ramp need {key}, and so does [train]"
            return
        if any(later <= earlier for earlier, later in pairwise(sizes)) or sizes[-1] != whole:
            yield f"{key} of batch_ramp must increase and end with {whole}, not go {sizes}"
        for size in sizes:
            if size * self.grad_accum_steps % whole:
                yield (
                    f"global_batch_size = {size} of batch_ramp is no multiple of a microbatch, "
                    f"global_batch_size / grad_accum_steps = {whole} / {self.grad_accum_steps}"
                )

    def stages(self) -> tuple[Stage, ...]:
        """The batch over the run; a single stage where there is no ramp."""
        return tuple(Stage(stage.start, self._accum_of(stage)) for stage in self.batch_ramp) or (
            Stage(0, self.grad_accum_steps),
        )

    def _accum_of(self, stage: BatchStage) -> int:
        if stage.grad_accum_steps is not None:
            return stage.grad_accum_steps
        assert stage.global_batch_size
        assert self.global_batch_size
        return stage.global_batch_size * self.grad_accum_steps // self.global_batch_size

    def ramp(self, dp: int) -> BatchRamp:
        """The batch over the run, in sequences.

        Args:
            dp: Number of data-parallel ranks, dp_replicate * dp_shard * ep.
        """
        return BatchRamp(self.stages(), self.microbatch_size(dp))

    def microbatch_size(self, dp: int) -> int:
        """Sequences of one microbatch over all data-parallel ranks.

        Args:
            dp: Number of data-parallel ranks, dp_replicate * dp_shard * ep.
        """
        if self.global_batch_size is None:
            return self.batch_size * dp
        return self.global_batch_size // self.grad_accum_steps
