"""Steps in traces of the profiler."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from jaxforge.config.metrics import ProfilingConfig
from jaxforge.errors import UserError
from jaxforge.telemetry.profiler import Profiler
from tests.telemetry.traces import steps_in


def run(directory, steps, **options):
    """Run tiny steps and return the steps in each trace."""
    options = {"enable": True, "start_step": 3, "end_step": 5, **options}
    profiler = Profiler(ProfilingConfig(**options), directory)
    step_function = jax.jit(lambda x: x + 1)

    @contextlib.contextmanager
    def between_steps():
        jax.block_until_ready(x)
        yield

    x = jnp.zeros(())
    for step in steps:
        with profiler.around(step, between_steps):
            x = step_function(x)
    profiler.close()
    return [steps_in(path) for path in directory.glob("traces/plugins/profile/*/*.xplane.pb")]


@pytest.mark.parametrize(
    ("steps", "traced"),
    [
        (range(1, 8), [[3, 4]]),
        (range(4, 8), [[4]]),  # resumed within the window
        (range(5, 8), []),
        (range(1, 4), [[3]]),  # ended within it
    ],
)
def test_window_counts_steps_of_whole_run(tmp_path, steps, traced):
    assert run(tmp_path, steps, trace_dir="traces") == traced


def test_unnamed_processes_write_no_trace(tmp_path):
    assert run(tmp_path, range(1, 8), trace_dir="traces", hosts=[]) == []


def test_unknown_process_raises(tmp_path):
    with pytest.raises(UserError, match=r"profiling.hosts = \[0, 3\]: process 3 does not exist"):
        Profiler(ProfilingConfig(enable=True, hosts=(0, 3)), tmp_path)


def test_failed_trace_does_not_stop_run(tmp_path):
    jax.profiler.start_trace(tmp_path / "theirs")  # only one trace can run
    try:
        assert run(tmp_path, range(1, 8), trace_dir="traces") == []
    finally:
        jax.profiler.stop_trace()
