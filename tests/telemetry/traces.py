"""Reader of traces of the profiler."""

from pathlib import Path

import jax


def steps_in(trace: Path) -> list[int]:
    data = jax.profiler.ProfileData.from_file(str(trace))
    events = (event for plane in data.planes for line in plane.lines for event in line.events)
    return [dict(event.stats)["step_num"] for event in events if event.name == "train"]
