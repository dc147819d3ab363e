"""Connection of the processes of a job: environment variables, timeouts and lost processes."""

import logging
import os
import socket
import threading

import jax
import pytest

from jaxforge.errors import PeerLostError, UserError
from jaxforge.exit_codes import Exit
from jaxforge.parallel import multihost
from tests.machine import PATIENCE

EXPLICIT = {
    "JAX_COORDINATOR_ADDRESS": "node1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "2",
}
TORCHRUN = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2"}


def arguments(address):
    return {"coordinator_address": address, "num_processes": 4, "process_id": 2}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        (EXPLICIT, arguments("node1:1234")),
        (TORCHRUN, arguments("node1:29500")),
        ({**TORCHRUN, "LOCAL_RANK": "0"}, arguments("node1:29500")),  # of a node, not of the job
        ({**EXPLICIT, **TORCHRUN}, arguments("node1:1234")),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, {}),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # sbatch without srun: one process
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "host-0,host-1"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "JAX_PLATFORMS": "cpu"}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({**TORCHRUN, "WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "8"}, None),
        ({"MASTER_PORT": "29500"}, None),
        ({"SLURM_STEP_NUM_TASKS": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, {}),
        ({"SLURM_STEP_NUM_TASKS": "8", **TORCHRUN}, arguments("node1:29500")),
    ],
)
def test_distributed_arguments_follow_environment(env, expected, monkeypatch):
    monkeypatch.setattr(multihost, "on_tpu_vm", lambda: False)
    assert multihost.distributed_arguments(env) == expected


AGENT = {
    **TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7f",
    "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1",
}  # fmt: skip


def test_job_of_torchrun_leaves_port_to_its_agent():
    """The agent listens on MASTER_PORT. A restart takes a new port, which is free again."""

    def address(**env):
        return multihost.distributed_arguments({**AGENT, **env})["coordinator_address"]

    host, port = address().split(":")
    assert (host, 20_000 <= int(port) < 30_000) == ("node1", True)
    assert address(RANK="3", LOCAL_RANK="0", GROUP_RANK="1") == f"node1:{port}"
    assert address(TORCHELASTIC_RESTART_COUNT="1") != f"node1:{port}"
    assert address(TORCHELASTIC_USE_AGENT_STORE="False") == "node1:29500"


def test_process_of_torchrun_has_one_device_of_its_node():
    assert multihost.distributed_arguments(AGENT)["local_device_ids"] == [1]
    for env in ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {"JAX_LOCAL_DEVICE_IDS": "2,3"}):
        assert "local_device_ids" not in multihost.distributed_arguments({**AGENT, **env})


def test_cloud_tpu_leaves_arguments_to_jax(monkeypatch):
    monkeypatch.setattr(multihost, "on_tpu_vm", lambda: True)
    assert multihost.distributed_arguments({}) == {}
    assert multihost.distributed_arguments({"JAX_PLATFORMS": "cpu"}) is None


HALVES = [
    *[(names, {missing}) for names in (EXPLICIT, TORCHRUN) for missing in names],
    (TORCHRUN, set(TORCHRUN) - {"WORLD_SIZE"}),
    (TORCHRUN, set(TORCHRUN) - {"MASTER_ADDR", "MASTER_PORT"}),
    (EXPLICIT, set(EXPLICIT) - {"JAX_PROCESS_ID"}),
]


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize(("names", "missing"), HALVES)
def test_incomplete_variables_raise_with_missing_names(names, missing, value):
    """An empty variable counts as missing, such as `RANK=$SLURM_PROCID` outside of a job."""
    present = [name for name in names if name not in missing]
    env = {name: names[name] if name in present else value for name in names}
    env = {name: value for name, value in env.items() if value is not None}
    absent = ", ".join(name for name in names if name in missing)
    message = rf"set {absent} too: .* For a single process unset {', '.join(present)}$"
    with pytest.raises(UserError, match=message):
        multihost.distributed_arguments(env)


@pytest.mark.parametrize("index", ["4", "-1"])
def test_process_index_beyond_count_raises(index):
    with pytest.raises(UserError, match=f"index {index} must be at least 0 and below the count, 4"):
        multihost.distributed_arguments({**TORCHRUN, "RANK": index})


def test_non_numeric_task_count_raises():
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_SIZE=two must be an integer"):
        multihost.distributed_arguments({"OMPI_COMM_WORLD_SIZE": "two"})


BROKEN = (
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:538] "
    "Read error [127.0.0.1]:50583: Connection reset by peer"
)


@pytest.mark.parametrize(
    ("count", "peer", "error"),
    [
        (2, "process 0", jax.errors.JaxRuntimeError),
        (3, "another process", jax.errors.JaxRuntimeError),
        (2, "process 0", ValueError),  # if the collective runs in the call that starts it
    ],
)
def test_broken_connection_reports_lost_process(monkeypatch, count, peer, error):
    registered = []
    monkeypatch.setattr(multihost.atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    reason = r"\(Read error \[127.0.0.1\]:50583: Connection reset by peer\)"
    with (
        pytest.raises(PeerLostError, match=rf"^{peer} of the job is gone, or cut off {reason}\."),
        multihost.exit_at_once_on_failure(),
    ):
        raise error(BROKEN)
    assert registered == [(multihost.end_now, Exit.ABORTED.code)]
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"),
        multihost.exit_at_once_on_failure(),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
    assert registered[1:] == [(multihost.end_now, Exit.ERROR.code)]


def test_non_numeric_process_count_raises():
    with pytest.raises(UserError, match="'four'"):
        multihost.distributed_arguments({**EXPLICIT, "JAX_NUM_PROCESSES": "four"})


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(multihost, "JOIN_SEC", 0.05)
    monkeypatch.setattr(multihost, "CONNECT_SEC", 0.05)


@pytest.fixture
def port():
    """Return a port of this host on which no process listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


def environment(address, index):
    return {
        "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": str(index),
    }  # fmt: skip


@pytest.mark.usefixtures("impatient")
def test_unreachable_host_raises_after_timeout(port, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    caplog.set_level(logging.INFO, "jaxforge")
    whom = f"process 0 of 3 at 127.0.0.1:{port}"
    with pytest.raises(UserError, match=rf"waited 0.05 s for {whom}: .*\. Check that all"):
        multihost.initialize(env=environment(f"127.0.0.1:{port}", 1))
    assert set(caplog.messages) == {f"waiting for {whom}, up to 0.05 s"}


def test_address_without_port_raises():
    with pytest.raises(UserError, match="coordinator address 'node1' must be a host and a port"):
        multihost.initialize(env=environment("node1", 1))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("index", [0, 1])
def test_missing_processes_end_the_wait_before_jax_aborts(index, monkeypatch, capsys):
    has_ended = threading.Event()

    def wait_for_processes(**arguments):
        assert arguments["initialization_timeout"] > multihost.JOIN_SEC
        assert has_ended.wait(PATIENCE)
        raise InterruptedError

    monkeypatch.setattr(multihost, "end_now", lambda code, flush: has_ended.set())
    monkeypatch.setattr(jax.distributed, "initialize", wait_for_processes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InterruptedError):
            multihost.initialize(env=environment(address, index))
    whom = "process 0 of 3 at" if index else "processes 1 to 2 to come to process 0 at"
    assert f"error: waited 0.05 s for {whom} {address}: some did not" in capsys.readouterr().err


def test_empty_variables_are_hidden_from_jax(monkeypatch):
    """Templates of manifests and scripts leave variables empty where the scheduler knows better."""
    for name in multihost._EXPLICIT:
        monkeypatch.setenv(name, "")
    seen = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: seen.update(os.environ))
    multihost.initialize(
        env={**dict.fromkeys(multihost._EXPLICIT, ""), "SLURM_STEP_NUM_TASKS": "2"}
    )
    assert seen
    assert not seen.keys() & set(multihost._EXPLICIT)


def test_port_in_use_raises(monkeypatch):
    def fails(**_):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(UserError, match="cannot listen at here:80: the port is in use"):
        multihost.initialize(env=environment("here:80", 0))


def test_host_without_address_is_named(monkeypatch):
    error = RuntimeError("[enforce fail at external/gloo/gloo/transport/tcp/device.cc:99] rv == 0")
    monkeypatch.setattr(jax, "devices", raises(error))
    monkeypatch.setattr(socket, "gethostname", lambda: "name.invalid")
    with pytest.raises(UserError, match=r"^name\.invalid, the name of this host, has no address"):
        multihost.initialize(env={})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Unable to: ['cpu']. (set JAX_PLATFORMS='' to)"), "Unable to: ['cpu']. Inst"),
        (AssertionError(), "the platform does not exist on this machine. Inst"),
    ],
)
def test_missing_platform_raises(error, reason, monkeypatch):
    monkeypatch.setattr(jax, "devices", raises(error))
    with pytest.raises(UserError) as caught:
        multihost.initialize(env={"JAX_PLATFORMS": "cuda"})
    assert f"JAX_PLATFORMS=cuda: JAX finds no devices: {reason}" in str(caught.value)


def test_devices_in_use_keep_the_original_error(monkeypatch):
    monkeypatch.setattr(jax, "devices", raises(RuntimeError("The TPU is already in use")))
    with pytest.raises(RuntimeError, match="already in use"):
        multihost.initialize(env={})


def raises(error):
    def function(*_):
        raise error

    return function
