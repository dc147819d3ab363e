"""How the environment says that this process is one of several."""

import logging
import socket
import threading

import jax
import pytest

from jaxforge.errors import UserError
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
    ],
)
def test_what_the_environment_means(env, expected, monkeypatch):
    monkeypatch.setattr(multihost, "_on_tpu_vm", lambda: False)
    assert multihost.distributed_arguments(env) == expected


def test_a_cloud_tpu_asks_its_metadata_server(monkeypatch):
    monkeypatch.setattr(multihost, "_on_tpu_vm", lambda: True)
    assert multihost.distributed_arguments({}) == {}
    assert multihost.distributed_arguments({"JAX_PLATFORMS": "cpu"}) is None


@pytest.mark.parametrize("missing", EXPLICIT)
def test_half_a_set_of_variables_is_an_error(missing):
    env = {name: value for name, value in EXPLICIT.items() if name != missing}
    with pytest.raises(UserError, match=f"set {missing} too"):
        multihost.distributed_arguments(env)


def test_a_process_count_that_is_no_number():
    with pytest.raises(UserError, match="'four'"):
        multihost.distributed_arguments({**EXPLICIT, "JAX_NUM_PROCESSES": "four"})


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(multihost, "JOIN_SEC", 0.05)
    monkeypatch.setattr(multihost, "_KNOCK_SEC", 0.05)


@pytest.fixture
def port():
    """A port of this host where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


def environment(address, index):
    return {
        "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": str(index),
    }  # fmt: skip


@pytest.mark.usefixtures("impatient")
def test_a_host_that_does_not_answer_is_named(port, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    caplog.set_level(logging.INFO, "jaxforge")
    whom = f"process 0 of 3 at 127.0.0.1:{port}"
    with pytest.raises(UserError, match=rf"waited 0.05 s for {whom}: .*\. Is it running"):
        multihost.initialize(env=environment(f"127.0.0.1:{port}", 1))
    assert set(caplog.messages) == {f"waiting for {whom}, up to 0.05 s"}


def test_an_address_without_a_port():
    with pytest.raises(UserError, match="no host and port: coordinator address 'node1'"):
        multihost.initialize(env=environment("node1", 1))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("index", [0, 1])
def test_who_is_alone_gives_up_before_jax_aborts(index, monkeypatch, capsys):
    given_up = threading.Event()

    def waits_for_the_others(**arguments):
        assert arguments["initialization_timeout"] > multihost.JOIN_SEC
        assert given_up.wait(PATIENCE)
        raise InterruptedError

    monkeypatch.setattr(multihost, "end_now", lambda code, flush: given_up.set())
    monkeypatch.setattr(jax.distributed, "initialize", waits_for_the_others)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InterruptedError):
            multihost.initialize(env=environment(address, index))
    whom = "process 0 of 3 at" if index else "processes 1 to 2 to come to process 0 at"
    assert f"error: waited 0.05 s for {whom} {address}: some did not" in capsys.readouterr().err


def test_a_port_in_use_is_named(monkeypatch):
    def fails(**_):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    with pytest.raises(UserError, match="cannot listen at here:80: the port is in use"):
        multihost.initialize(env=environment("here:80", 0))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Unable to: ['cpu']. (set JAX_PLATFORMS='' to)"), "Unable to: ['cpu']. Inst"),
        (AssertionError(), "there is no such platform here. Install"),
    ],
)
def test_a_platform_that_is_not_there_is_named(error, said, monkeypatch):
    monkeypatch.setattr(jax, "devices", raises(error))
    with pytest.raises(UserError) as caught:
        multihost.initialize(env={"JAX_PLATFORMS": "cuda"})
    assert f"JAX_PLATFORMS=cuda: JAX finds no devices: {said}" in str(caught.value)


def test_devices_that_are_in_use_may_be_free_at_the_next_start(monkeypatch):
    monkeypatch.setattr(jax, "devices", raises(RuntimeError("The TPU is already in use")))
    with pytest.raises(RuntimeError, match="already in use"):
        multihost.initialize(env={})


def raises(error):
    def function(*_):
        raise error

    return function
