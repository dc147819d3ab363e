"""Energy of GPUs, read from a fake NVML."""

import sys
import types

import jax
import pytest

from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from jaxforge.telemetry.energy import EnergyMeter
from jaxforge.telemetry.line_formats import Megatron, RunFacts
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.telemetry.tracker import Tracker
from tests.telemetry.recording import RecordingSink, scalars


class NVMLError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """Two GPUs of 300 W and 500 W, whose counters follow a clock."""

    NVMLError = NVMLError

    def __init__(self):
        super().__init__("pynvml")
        self.watts = {0: 100.0, 1: 300.0, "GPU-5": 500.0}
        self.seconds, self.is_lost = 1000.0, False

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.is_lost:
            raise NVMLError("GPU is lost")
        return round(1000 * self.watts[handle] * self.seconds)


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    devices = [types.SimpleNamespace(platform="gpu", local_hardware_id=i) for i in (0, 1)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-5")
    clock = types.SimpleNamespace(perf_counter=lambda: fake.seconds)
    monkeypatch.setattr("jaxforge.telemetry.goodput.time", clock)
    return fake


def test_energy_of_step_excludes_pauses(nvml, monkeypatch):
    monkeypatch.setattr("jaxforge.telemetry.tracker.memory", lambda devices: {})
    sink = RecordingSink()
    writers = [MetricWriter("a", sink, 4)]
    tracker = Tracker(writers, StepCost(100), Progress(), 10**9, energy=EnergyMeter())
    tracker.start_clock()
    for step in range(1, 6):
        tracker.end_step(step, scalars(step))
        nvml.seconds += 2.0
        if step == 2:
            with tracker.paused():
                nvml.seconds += 100.0
    line = sink.lines[4]
    # Steps 2 to 4 take 2 s each, at (300 W + 500 W) / 2.
    assert line["train/step_time_sec"] == 2.0
    assert line["gpu/energy_joules"] == pytest.approx(800.0)
    assert line["gpu/power_watts"] == pytest.approx(400.0)
    text = Megatron(RunFacts(9, 100, 1, StepCost(100, 1))).train(4, line)
    expected = (
        " | energy per GPU (J/iter/GPU): 800.0 | power per GPU (W/GPU): 400.0 | learning rate: "
    )
    assert expected in text


def test_lost_counter_warns_once_and_keeps_the_run(nvml, messages):
    meter = EnergyMeter()
    before = meter.joules()
    nvml.is_lost = True
    assert [meter.joules(), meter.joules()] == [before, before]
    assert messages.messages == ["the energy of the GPUs can no longer be read: GPU is lost"]


def test_gpu_without_counter_is_refused(nvml):
    nvml.is_lost = True
    with pytest.raises(UserError, match="the energy of the GPUs cannot be read: GPU is lost"):
        EnergyMeter()


def test_missing_library_and_other_devices_are_refused(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match="needs pynvml: pip install nvidia-ml-py"):
        EnergyMeter()
    monkeypatch.undo()
    with pytest.raises(UserError, match="needs NVIDIA GPUs, but the devices are cpus"):
        EnergyMeter()
