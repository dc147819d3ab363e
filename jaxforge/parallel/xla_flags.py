"""XLA's flags: one table, each with its reason, passed to the compiler together with the step.

Nothing global is touched, so initialisation and evaluation compile as ever. What the user names
wins: `XLA_FLAGS` and `LIBTPU_INIT_ARGS` over `train.xla_flags` over the table. docs/xla_flags.md
shows the table, and what is left out of it.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import jax

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError

Option = Any
"""What the compiler takes as the value of a flag: text, a truth value, or the number of a level."""

DEFAULT = "default"
"""The value in `train.xla_flags` that takes a flag of the table away: XLA's own default."""

LEVELS = ("optimization_level", "memory_fitting_level")
"""Levels of effort: compiler options, but no flags of `XLA_FLAGS`."""


EXPERTS, CONTEXT = "experts", "context parallelism"


def traits(config: JobConfig) -> tuple[str, ...]:
    """Return the traits of a step that flags apply to."""
    has = {EXPERTS: config.model.is_moe, CONTEXT: config.distributed.cp > 1}
    return tuple(name for name, is_so in has.items() if is_so)


class Flag(NamedTuple):
    """One row of the table.

    Attributes:
        platform: where it is used.
        name: as `XLA_FLAGS` would have it, without dashes.
        value: as text.
        why: what it is good for.
        source: where that is said.
        devices: values of `jax.Device.device_kind`; empty means all.
        only_with: what a step must have one of, as of `traits`; empty: it is for all steps.
    """

    platform: Literal["gpu", "tpu"]
    name: str
    value: str
    why: str
    source: str
    devices: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()

    def fits(self, platform: str, kind: str, has: Collection[str]) -> bool:
        """Return whether the flag applies to this platform, device kind and step."""
        is_for_step = not self.only_with or any(trait in has for trait in self.only_with)
        is_for_device = not self.devices or kind in self.devices
        return platform == self.platform and is_for_device and is_for_step


_XLA = "https://openxla.org/xla/"
_NVIDIA = "https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/GPU_performance.md"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main/benchmarks/xla_flags_library.py"
_V5P_AND_V6E = ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")


def _gather_beside_work(name: str, why: str) -> Flag:
    """One of five that go together; without them v5p and v6e wait for every all-gather."""
    return Flag("tpu", name, "true", why, _MAXTEXT, _V5P_AND_V6E)


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
        "xla_gpu_enable_while_loop_unrolling",
        "WHILE_LOOP_UNROLLING_NO_UNROLL",
        "XLA ends the process where it unrolls some loops over layers with experts",
        "upstream.md",
        only_with=(EXPERTS,),
    ),
    Flag(
        "gpu",
        "xla_gpu_enable_command_buffer",
        "FUSION,CUSTOM_CALL",
        "CUDA graphs of these alone launch with the least work for the CPU on Blackwell",
        _NVIDIA,
        ("NVIDIA B200", "NVIDIA GB200"),
    ),
    Flag(
        "tpu",
        "xla_tpu_enable_async_all_to_all",
        "true",
        "rows travel to their experts and back, and heads to where all tokens are, beside other "
        "work; v5e cannot do it",
        "experts.md",
        _V5P_AND_V6E,
        only_with=(EXPERTS, CONTEXT),
    ),
    _gather_beside_work("xla_enable_async_all_gather", "all-gathers may start early and end late"),
    _gather_beside_work(
        "xla_tpu_enable_async_collective_fusion", "collectives are fused with the work beside them"
    ),
    _gather_beside_work(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather", "all-gathers are among these"
    ),
    _gather_beside_work(
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "one collective may span several pieces of work",
    ),
    _gather_beside_work(
        "xla_tpu_overlap_compute_collective_tc", "the matrix unit works while data moves"
    ),
)
"""The table. A test compiles with each row, and another holds docs/xla_flags.md to it."""


def compiler_options(
    device: jax.Device,
    own: Mapping[str, str],
    env: Mapping[str, str] = os.environ,
    *,
    has: Collection[str] = (),
) -> dict[str, Option]:
    """Return the compiler options of the step.

    Args:
        device: any device of the mesh.
        own: `train.xla_flags`.
        env: where `XLA_FLAGS` and `LIBTPU_INIT_ARGS` are looked up; flags in them are left alone.
        has: what the step has, as of `traits`.

    Raises:
        UserError: a level of effort is no number.
    """
    at = device.platform, device.device_kind
    table = {f.name: f.value for f in FLAGS if f.fits(*at, has)}
    named = _named_in(env)
    return {
        name: _typed(name, value)
        for name, value in {**table, **own}.items()
        if value != DEFAULT and name not in named
    }


def _named_in(env: Mapping[str, str]) -> set[str]:
    words = f"{env.get('XLA_FLAGS', '')} {env.get('LIBTPU_INIT_ARGS', '')}".split()
    return {word.lstrip("-").partition("=")[0] for word in words}


def _typed(name: str, value: str) -> Option:
    """XLA takes text for everything but truth values and levels, whose numbers are its own."""
    if name in LEVELS:
        if value not in ("0", "1", "2", "3"):
            raise UserError(f"train.xla_flags.{name} = {value}: expected one of 0, 1, 2, 3")
        return 10 * int(value) + 9  # `EFFORT_O1 = 19` in xla.proto; JAX 0.12 takes no others
    return {"true": True, "false": False}.get(value.lower(), value)
