"""Traces of a few steps for TensorBoard's profile plugin, xprof or Perfetto."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from jaxforge.config.metrics import ProfilingConfig
from jaxforge.errors import UserError

log = logging.getLogger(__name__)


class Profiler:
    """Traces the steps of `[profiling]` in the processes of `profiling.hosts`.

    Steps count over the whole run. A run that resumes within the window traces the remaining steps;
    a run that ends within it closes the trace. A failed trace does not stop the run.

    Args:
        config: the `[profiling]` section.
        run: the run directory.

    Raises:
        UserError: `profiling.hosts` names a process that does not exist.
    """

    def __init__(self, config: ProfilingConfig, run: Path) -> None:
        self._config, self._directory = config, (run / config.trace_dir).absolute()
        n = jax.process_count()
        if config.enable and (absent := [host for host in config.hosts if host >= n]):
            raise UserError(
                f"profiling.hosts = {list(config.hosts)}: process {absent[0]} does not exist. This "
                f"job has {n} process(es), numbered from 0"
            )
        self._enabled = config.enable and jax.process_index() in config.hosts
        self._running = False

    @contextlib.contextmanager
    def around(
        self, step: int, between_steps: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Annotate a step for any trace; start and end our own trace around it.

        Args:
            step: number of the step.
            between_steps: waits for launched steps and excludes the block from step times.
        """
        inside = self._config.start_step <= step < self._config.end_step
        if self._enabled and inside and not self._running:
            with between_steps():
                self._start(step)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        # `end_step` is exclusive.
        if self._running and step + 1 >= self._config.end_step:
            with between_steps():
                self.close()

    def close(self) -> None:
        """Stop the running trace, if any, and write it."""
        if not self._running:
            return
        # Before stopping: a trace that failed to stop is not started again.
        self._running = self._enabled = False
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:
            log.error("the trace is lost: %s", error)
        else:
            log.info("trace written to %s", self._directory)

    def _start(self, step: int) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python calls slow down the host, in large files
        try:
            jax.profiler.start_trace(self._directory, profiler_options=options)
        except (RuntimeError, OSError) as error:
            self._enabled = False
            log.error("cannot start the trace: %s", error)
        else:
            self._running = True
            log.info("trace started at step %d", step)
