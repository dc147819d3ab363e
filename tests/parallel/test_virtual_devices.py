"""Size of the thread pool for virtual devices."""

import os
import subprocess
import sys

import pytest

from jaxforge.parallel.multihost import enlarge_thread_pool

PROGRAM = """
from pathlib import Path
from jaxforge.parallel import multihost

multihost.initialize()
import jax
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print(len(jax.devices()), sum(name.startswith("tf_XLAEigen") for name in names))
"""


@pytest.mark.parametrize(
    ("flags", "own", "expected"),
    [
        ("--xla_force_host_platform_device_count=8", {}, {"NPROC": "32"}),
        ("--xla_force_host_platform_device_count=8", {"NPROC": "3"}, {"NPROC": "3"}),
        ("--xla_force_host_platform_device_count=1", {}, {}),
        ("--xla_dump_to=x", {}, {}),
    ],
)
def test_thread_pool_has_four_threads_per_virtual_device(flags, own, expected):
    env = {"XLA_FLAGS": flags, **own}
    enlarge_thread_pool(env)
    assert env == {"XLA_FLAGS": flags, **expected}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_xla_starts_enlarged_thread_pool():
    """Otherwise programs with independent collectives deadlock (docs/upstream.md)."""
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    devices, threads = map(int, run.stdout.split())
    assert devices == 4
    assert threads >= 16
