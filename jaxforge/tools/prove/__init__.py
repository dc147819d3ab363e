"""Proof that a config computes the same on its mesh as on one device (`jaxforge prove`)."""

from importlib.metadata import version

MOST_DEVICES = 8
"""Virtual devices."""

COLLECTIVE_SEC = 900
"""Time in seconds that a collective may take: a busy machine delays single devices."""

# Compilation with few LLVM optimizations takes half the time, and another eighth less without
# splitting a program into 32 parts.
_FLAGS = [
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    f"--xla_cpu_collective_call_terminate_timeout_seconds={COLLECTIVE_SEC}",
]
if version("jaxlib").startswith("0.10."):  # removed in later versions; halves the time again
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")


def xla_flags(devices: int) -> str:
    """Return `XLA_FLAGS` with which virtual CPU devices compile quickly and compute slowly."""
    return " ".join([f"--xla_force_host_platform_device_count={devices}", *_FLAGS])
