"""Metrics of `metrics.collect` in the sinks."""

import numpy as np
import pytest

from jaxforge.state.progress import Progress
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.tracker import Tracker
from tests.telemetry.recording import RecordingSink, scalars

EXTRAS = {
    "params_norm": np.float32(3),
    "grad_norms_per_layer": {"layers": np.float32([1, 2]), "norm": np.float32(0.5)},
}


@pytest.mark.parametrize("asked", [(), tuple(EXTRAS)])
def test_collected_values_are_logged(asked):
    sink = RecordingSink()
    tracker = Tracker([MetricWriter("it", sink, 1)], StepCost(100), Progress(), 10**9, extras=asked)
    tracker.end_step(1, {**scalars(1), **EXTRAS})
    tracker.close()
    logged = {
        "train/params_norm": 3.0, "train/grad_norm/layers.0": 1.0, "train/grad_norm/layers.1": 2.0,
        "train/grad_norm/norm": 0.5,
    }  # fmt: skip
    assert logged.items() <= sink.lines[1].items() if asked else not logged.keys() & sink.lines[1]
