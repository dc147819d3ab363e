"""Retention of freed memory: few page faults in a warm step."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from jaxforge.parallel.host_memory import keep_freed_memory

assert keep_freed_memory() == (sys.argv[1] == "retained")

@jax.jit
def step(x):
    for _ in range(4):  # each product is 64 MiB, more than malloc's largest threshold
        x = jnp.tanh(x @ x.T)[:, :16]
    return x

x = jnp.ones((4096, 16))
for _ in range(5):
    step(x).block_until_ready()
faults = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))  # a system that is short of memory may reclaim pages between steps
"""


def pages_per_step(kind, **env):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "XLA_FLAGS"))}
    command = [sys.executable, "-c", PROGRAM, kind]
    environ |= {"JAX_PLATFORMS": "cpu", **env}
    return int(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_memory_is_retained_without_malloc_settings():
    without_settings = pages_per_step("own", MALLOC_ARENA_MAX="8")
    assert without_settings > 10_000
    assert pages_per_step("retained") < without_settings / 10
