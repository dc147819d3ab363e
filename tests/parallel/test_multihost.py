"""How the environment says that this process is one of several."""

import pytest

from jaxforge.errors import UserError
from jaxforge.parallel import multihost

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
