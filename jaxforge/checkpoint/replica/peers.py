"""Processes of a job with the hosts whose memory they share, and the peer of each process.

A host is a directory of replicas: processes that see the same directory are on the same host. The
failure domain of a host (a rack, a slice, a power supply) is the environment variable
`JAXFORGE_FAILURE_DOMAIN`; by default each host is a domain of its own.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxforge.parallel import agreement, multihost

DOMAIN = "JAXFORGE_FAILURE_DOMAIN"

_EXTERNAL = "192.0.2.1"  # reserved for documentation: takes the default route


class Process(NamedTuple):
    """A process of the job.

    Attributes:
        host: its host (`Store.identity`).
        domain: the failure domain of the host.
        address: address of its server.
    """

    host: str
    domain: str
    address: tuple[str, int]


def gather(value: Any) -> list[Any]:  # noqa: ANN401 (any JSON)
    """Return the JSON value of each process, in order. Every process must call this function."""
    text = json.dumps(value)
    return [json.loads(other) for other in _texts(text)]


def _texts(text: str) -> list[str]:
    return agreement.gather(text) if jax.process_count() > 1 else [text]


def choose_peers(processes: Sequence[Process]) -> list[int | None]:
    """Return the process that holds the second copy of each process's files; None without one.

    The peer's host is half the ring of hosts away, where hosts of a domain are neighbours. So each
    host is the peer of one host, and in another domain, if no domain has more than half the hosts.
    """
    domains = list(dict.fromkeys(process.domain for process in processes))
    hosts = {process.host: process.domain for process in processes}
    ring = sorted(hosts, key=lambda host: domains.index(hosts[host]))
    members = {
        host: [i for i, process in enumerate(processes) if process.host == host] for host in ring
    }
    peers: list[int | None] = []
    for index, process in enumerate(processes):
        position = ring.index(process.host)
        # Half a ring away: the loss of neighbours (a rack) takes one of two copies at most.
        opposite = position + len(ring) // 2
        others = [ring[(opposite + i) % len(ring)] for i in range(len(ring))]
        host = next((host for host in others if hosts[host] != process.domain), None)
        # The processes of a host spread over those of the peer, so that each serves as many.
        rank = members[process.host].index(index)
        peers.append(None if host is None else members[host][rank % len(members[host])])
    return peers


def own_address(env: Mapping[str, str] = os.environ) -> str:
    """Return the address of this host in the network of the job. Every process must call this.

    It is the address from which process 0 is reached. If a scheduler has started the job, it is
    that of the default route, or else of the host's name.
    """
    arguments = multihost.distributed_arguments(env) or {}
    if "coordinator_address" in arguments:
        host = arguments["coordinator_address"].rpartition(":")[0].strip("[]")
    else:
        host = _EXTERNAL if _is_reachable(_EXTERNAL) else socket.gethostname()
    addresses = gather(_source_address(host))
    others = [address for address in addresses if not _is_loopback(address)]
    address = addresses[jax.process_index()]
    # The name of a host is often its loopback address on the host itself.
    return _source_address(others[0]) if others and _is_loopback(address) else address


def _source_address(host: str) -> str:
    """Return the address of this host from which another host is reached; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as connection:
        connection.connect(address)
        return connection.getsockname()[0]


def _is_reachable(host: str) -> bool:
    try:
        _source_address(host)
    except OSError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
