"""Table of XLA flags for the train step, with the reason for each.

Flags are compiler options of the step, so that initialisation and evaluation are compiled without
them. `XLA_FLAGS` and `LIBTPU_INIT_ARGS` take precedence over `train.xla_flags`, and that over the
table. docs/xla_flags.md shows the table, and flags that were tried and left out.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import jax

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError

Option = Any
"""Value of a compiler option: a string, a bool, or the number of an effort level."""

DEFAULT = "default"
"""Value in `train.xla_flags` that removes a flag of the table: XLA's own default applies."""

LEVELS = ("optimization_level", "memory_fitting_level")
"""Effort levels: compiler options that are not flags of `XLA_FLAGS`."""


EXPERTS, CONTEXT, RECURRENT = "experts", "context parallelism", "recurrent layers"
UNROLLED = "several microbatches of unrolled layers"


def traits(config: JobConfig, unroll: int = 1) -> tuple[str, ...]:
    """Return the traits of a step that flags apply to.

    Args:
        config: config of the step.
        unroll: layers per iteration of the loop over layers (`model.runtime.Runtime`).
    """
    has = {
        EXPERTS: config.model.is_moe,
        CONTEXT: config.distributed.cp > 1,
        RECURRENT: any(table.has_chunks for table in config.model.mixer_tables.values()),
        UNROLLED: unroll > 1 and config.train.grad_accum_steps > 1,
    }
    return tuple(name for name, is_so in has.items() if is_so)


class Flag(NamedTuple):
    """A flag of the table.

    Attributes:
        platform: platform of the flag.
        name: name of the flag without dashes, as in `XLA_FLAGS`.
        value: value as a string.
        reason: effect of the flag.
        source: page that documents or recommends the flag.
        devices: values of `jax.Device.device_kind`; empty: all devices.
        only_with: `traits`; the step must have at least one of them. Empty: all steps.
    """

    platform: Literal["gpu", "tpu"]
    name: str
    value: str
    reason: str
    source: str
    devices: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()

    def applies_to(self, platform: str, kind: str, has: Collection[str]) -> bool:
        """Return whether the flag applies to this platform, device kind and step."""
        matches_step = not self.only_with or any(trait in has for trait in self.only_with)
        matches_device = not self.devices or kind in self.devices
        return platform == self.platform and matches_device and matches_step


_XLA = "https://openxla.org/xla/"
_NVIDIA = "https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/GPU_performance.md"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main/benchmarks/xla_flags_library.py"
_V5P_AND_V6E = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")


def _async_gather_flag(name: str, reason: str) -> Flag:
    """Return one of five related flags; without them, v5p and v6e wait for every all-gather."""
    return Flag("tpu", name, "true", reason, _MAXTEXT, _V5P_AND_V6E)


FLAGS: tuple[Flag, ...] = (
    Flag(
        "gpu",
        "optimization_level",
        "1",
        "latency-hiding scheduler, pipelined collectives, loops unrolled by two: communication "
        "runs beside computation, for a longer compilation",
        f"{_XLA}effort_levels",
    ),
    Flag(
        "gpu",
        "optimization_level",
        DEFAULT,
        "at level 1 XLA ends the process, or computes parts of microbatches twice to pipeline "
        "collectives of the loop over them",
        "upstream.md",
        only_with=(UNROLLED,),
    ),
    Flag(
        "gpu",
        "xla_gpu_enable_latency_hiding_scheduler",
        "true",
        "the part of level 1 that such steps need",
        f"{_XLA}effort_levels",
        only_with=(UNROLLED,),
    ),
    Flag(
        "gpu",
        "xla_gpu_enable_while_loop_unrolling",
        "WHILE_LOOP_UNROLLING_NO_UNROLL",
        "XLA ends the process where it unrolls some loops over layers with experts or chunks",
        "upstream.md",
        only_with=(EXPERTS, RECURRENT),
    ),
    Flag(
        "gpu",
        "xla_gpu_enable_command_buffer",
        "FUSION,CUSTOM_CALL",
        "CUDA graphs of these alone launch with the least work for the CPU on Blackwell",
        _NVIDIA,
        ("NVIDIA B200", "NVIDIA GB200", "NVIDIA GB300"),
    ),
    Flag(
        "tpu",
        "xla_tpu_enable_async_all_to_all",
        "true",
        "rows travel to their experts and back, and heads to where all tokens are, beside other "
        "work; v5e cannot do it",
        "experts.md",
        (*_V5P_AND_V6E, "TPU7x"),
        only_with=(EXPERTS, CONTEXT),
    ),
    _async_gather_flag("xla_enable_async_all_gather", "all-gathers may start early and end late"),
    _async_gather_flag(
        "xla_tpu_enable_async_collective_fusion", "collectives are fused with the work beside them"
    ),
    _async_gather_flag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather", "all-gathers are among these"
    ),
    _async_gather_flag(
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "one collective may span several pieces of work",
    ),
    _async_gather_flag(
        "xla_tpu_overlap_compute_collective_tc", "the matrix unit works while data moves"
    ),
)
"""The table. Of rows with the same flag, the last one that applies counts. Tests compile with each
flag, and compare docs/xla_flags.md with the table."""


def compiler_options(
    device: jax.Device,
    user_flags: Mapping[str, str],
    env: Mapping[str, str] = os.environ,
    *,
    has: Collection[str] = (),
) -> dict[str, Option]:
    """Return the compiler options of the step.

    Args:
        device: any device of the mesh.
        user_flags: value of `train.xla_flags`.
        env: environment variables. Flags in `XLA_FLAGS` and `LIBTPU_INIT_ARGS` are not returned.
        has: `traits` of the step.

    Raises:
        UserError: an effort level is not one of 0, 1, 2 and 3.
    """
    kind = device.device_kind
    table = {f.name: f.value for f in FLAGS if f.applies_to(device.platform, kind, has)}
    named = _flags_in_environment(env)
    return {
        name: _typed(name, value)
        for name, value in {**table, **user_flags}.items()
        if value != DEFAULT and name not in named
    }


def _flags_in_environment(env: Mapping[str, str]) -> set[str]:
    flags = f"{env.get('XLA_FLAGS', '')} {env.get('LIBTPU_INIT_ARGS', '')}".split()
    return {flag.lstrip("-").partition("=")[0] for flag in flags}


def _typed(name: str, value: str) -> Option:
    """Convert a value to the type that XLA expects: a bool, the number of a level, or a string."""
    if name in LEVELS:
        if value not in ("0", "1", "2", "3"):
            raise UserError(f"train.xla_flags.{name} = {value}: must be one of 0, 1, 2, 3")
        return 10 * int(value) + 9  # `EFFORT_O1 = 19` in xla.proto; JAX 0.12 accepts no other form
    return {"true": True, "false": False}.get(value.lower(), value)
