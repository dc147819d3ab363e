"""Threads for devices that wait for each other."""

import os
import subprocess
import sys

import pytest

from jaxforge.parallel.virtual_devices import enlarge_thread_pool

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
def test_virtual_device_gets_four_unless_the_user_says_how_many(flags, own, expected):
    env = {"XLA_FLAGS": flags, **own}
    enlarge_thread_pool(env)
    assert env == {"XLA_FLAGS": flags, **expected}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_xla_takes_as_many():
    """Else programs with independent collectives stop for good (docs/upstream.md)."""
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    devices, threads = map(int, run.stdout.split())
    assert devices == 4
    assert threads >= 16
