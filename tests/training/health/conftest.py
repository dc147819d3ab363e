"""A coordination service as the processes of a job use it."""

import pytest
from jax._src.lib import _jax

from jaxforge.parallel.multihost import JoinedJob
from tests.processes.launching import free_port


@pytest.fixture
def service():
    """Return the job of two as each of them sees it, by index. They share a client."""
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0)
    client.connect()
    yield lambda index: JoinedJob(index, 2, address, client)
    client.shutdown()
    service.shutdown()
