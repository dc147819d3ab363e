"""Checks of devices and weights before the first evaluation and the first step of a start."""

from jaxforge.exit_codes import Exit
from jaxforge.parallel import compilation
from jaxforge.training.callbacks.speed import CollectiveHealth, DeviceSpeed
from jaxforge.training.callbacks.weight_hash import WeightHashes
from tests.processes.conftest import Run
from tests.training.looking import Checking
from tests.training.observers import run


def test_check_runs_once_before_first_step():
    events, reason, _ = run(steps=2, callbacks=[Checking])
    assert events.index("begin") < events.index("look 0") < events.index("launch 1")
    assert events.count("look 0") == 1
    assert reason is Exit.COMPLETED


def test_failed_check_ends_run_before_first_step():
    events, reason, _ = run(steps=2, callbacks=[lambda events: Checking(events, Exit.UNHEALTHY)])
    assert reason is Exit.UNHEALTHY
    assert not [event for event in events if event.startswith(("launch", "save"))]


def test_devices_and_weights_are_checked_before_compilation_of_each_start(tmp_path, monkeypatch):
    events = []

    def record(owner, function, name):
        original = getattr(owner, function)

        def recording(*arguments):
            events.append(name)
            return original(*arguments)

        monkeypatch.setattr(owner, function, recording)

    record(CollectiveHealth, "on_interval", "devices")
    record(WeightHashes, "on_interval", "weights")
    record(compilation, "compile_step", "compilation")
    record(DeviceSpeed, "on_interval", "speed")
    settings = ["--train.nccl_health_check_interval=2", "--model.n_layers=1", "--train.max_steps=3",
                "--train.check_weight_hash_across_dp_replicas_interval=3",
                "--metrics.straggler_report_interval=3"]  # fmt: skip
    Run(tmp_path, "run").finish_here(*settings, "--train.exit_interval=1", code=75)
    assert events == ["devices", "weights", "compilation"]
    events.clear()
    Run(tmp_path, "run").finish_here(*settings)
    assert events == ["devices", "weights", "compilation", "devices", "weights", "speed"]
    events.clear()
    Run(tmp_path, "run").finish_here(*settings)  # the run is complete
    assert events == []


def test_exit_message_follows_durable_checkpoint(tmp_path, capsys):
    Run(tmp_path, "run").finish_here("--model.n_layers=1", "--train.exit_interval=2", code=75)
    log = capsys.readouterr().err
    expected = "saved step 2 in ", "[exiting program at iteration 2] datetime: ", "total time: "
    positions = [log.index(text) for text in expected]
    assert positions == sorted(positions)
