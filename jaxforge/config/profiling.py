"""`[profiling]`: profiler trace of a few updates."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import NonNegativeInt

from jaxforge.config.facts import Flag, WithinRun
from jaxforge.config.section import RunPath, Section


class ProfilingConfig(Section):
    """Selection of the updates to trace."""

    enable: Annotated[bool, Flag.SIDE_EFFECT] = False
    """Write a profiler trace."""
    start_step: Annotated[NonNegativeInt, WithinRun()] = 5
    """First update of the trace."""
    end_step: NonNegativeInt = 8
    """Update before which the trace ends."""
    trace_dir: Annotated[RunPath, Flag.SIDE_EFFECT] = "profiler_traces"
    """Directory of the trace, relative to the run directory."""
    hosts: tuple[NonNegativeInt, ...] = (0,)
    """Indices of the processes that write a trace."""
    python_tracer: bool = False
    """Trace Python calls as well, which slows down the host and produces large files."""

    def problems(self) -> Iterator[str]:
        """Yield the broken rules between the keys of this section."""
        if self.end_step <= self.start_step:
            yield f"end_step = {self.end_step} must be greater than start_step = {self.start_step}"
