"""Freed memory stays with the process: a warm step takes hardly a page from the system."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from jaxforge.parallel.host_memory import keep_freed_memory

assert keep_freed_memory() == (sys.argv[1] == "kept"), "not what was asked for"

@jax.jit
def step(x):
    for _ in range(4):  # each product is 64 MiB, beyond what malloc can be told to keep
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
print(min(faults))  # a system that is short of memory takes pages away in between
"""


def pages_per_step(kind, **env):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "XLA_FLAGS"))}
    command = [sys.executable, "-c", PROGRAM, kind]
    environ |= {"JAX_PLATFORMS": "cpu", **env}
    return int(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_freed_memory_stays_unless_the_user_set_malloc_otherwise():
    given_back = pages_per_step("own", MALLOC_ARENA_MAX="8")
    assert given_back > 10_000
    assert pages_per_step("kept") < given_back / 10
