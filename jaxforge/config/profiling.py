"""`[profiling]`: a trace of a few updates."""

from collections.abc import Iterator

from pydantic import NonNegativeInt

from jaxforge.config.section import PathText, Section


class ProfilingConfig(Section):
    """Selection of the updates to trace."""

    enable: bool = False
    """Write a trace."""
    start_step: NonNegativeInt = 5
    """First update of the trace."""
    end_step: NonNegativeInt = 8
    """Update that ends the trace, not part of it."""
    trace_dir: PathText = "profiler_traces"
    """Directory of the trace, seen from the run directory."""
    hosts: tuple[NonNegativeInt, ...] = (0,)
    """Processes that write a trace."""
    python_tracer: bool = False
    """Trace Python calls as well: more to see, but a slower host and large files."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this section."""
        if self.end_step <= self.start_step:
            yield f"end_step = {self.end_step} must be greater than start_step = {self.start_step}"
