"""`[profiling]`: a trace of a few updates."""

from collections.abc import Iterator

from pydantic import NonNegativeInt

from jaxforge.config.section import Section


class ProfilingConfig(Section):
    """Which updates to trace."""

    enable: bool = False
    """Write a trace."""
    start_step: NonNegativeInt = 5
    """First update of the trace."""
    end_step: NonNegativeInt = 8
    """Update that ends the trace, not part of it."""
    trace_dir: str = "profiler_traces"
    """Directory of the trace."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this section."""
        if self.end_step <= self.start_step:
            yield f"end_step = {self.end_step} must be greater than start_step = {self.start_step}"
