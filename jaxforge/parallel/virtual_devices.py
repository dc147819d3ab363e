"""Threads for several virtual devices on one CPU (`--xla_force_host_platform_device_count`)."""

import os
import re
from collections.abc import MutableMapping

_THREADS = 4  # of XLA's pool for each device


def enlarge_thread_pool(env: MutableMapping[str, str] = os.environ) -> None:
    """Give XLA:CPU more threads than can wait for each other at the same time.

    By default, its pool has one thread for each device. A device may be in several collectives at
    once, and each blocks a thread. Programs with independent collectives, such as pipelines,
    deadlocked (docs/upstream.md). Must be called before JAX opens its devices.

    Args:
        env: environment variables with XLA's flags. `NPROC`, the size of the pool, is set unless it
            exists.
    """
    counted = re.findall(r"xla_force_host_platform_device_count=(\d+)", env.get("XLA_FLAGS", ""))
    if counted and int(counted[-1]) > 1:
        env.setdefault("NPROC", str(_THREADS * int(counted[-1])))
