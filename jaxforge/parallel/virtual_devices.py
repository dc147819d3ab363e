"""Several devices on one CPU: `--xla_force_host_platform_device_count`."""

import os
import re
from collections.abc import MutableMapping

_THREADS = 4  # of XLA's pool for each device


def enlarge_thread_pool(env: MutableMapping[str, str] = os.environ) -> None:
    """Gives XLA:CPU more threads than may ever wait for each other at a time.

    Its pool has one for each device, and a device may be in several collectives at once, each of
    which blocks a thread: programs with independent ones, as pipelines have them, came to a stop
    (docs/upstream.md). To be called before JAX opens its devices.

    Args:
        env: where XLA reads its flags and `NPROC`, the size of the pool; a user's own is left.
    """
    counted = re.findall(r"xla_force_host_platform_device_count=(\d+)", env.get("XLA_FLAGS", ""))
    if counted and int(counted[-1]) > 1:
        env.setdefault("NPROC", str(_THREADS * int(counted[-1])))
