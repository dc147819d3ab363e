"""Networks of hosts on one machine that can be cut.

Each host has a network namespace with an address of its own on a bridge. `Network.connect` takes
its link down: packets are lost without an answer, as when a cable is pulled.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

_SETTINGS = Path("/etc/netns")


class Network:
    """A bridge with a network namespace for each host.

    Args:
        name: prefix of the names of its devices, at most eight characters.
        count: number of hosts.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Network":
        with contextlib.ExitStack() as cleanup:  # also after a failure in between
            _ip("link", "add", self._name, "type", "bridge")
            cleanup.callback(_ip, "link", "del", self._name)
            _ip("link", "set", self._name, "up")
            for host in range(self._count):
                self._add_host(host, cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def _add_host(self, host: int, cleanup: contextlib.ExitStack) -> None:
        space, link, end = self.space(host), f"{self._name}o{host}", f"{self._name}i{host}"
        _ip("netns", "add", space)
        cleanup.callback(_ip, "netns", "del", space)
        # `ip netns exec` mounts this over /etc/hosts: processes announce the address of their
        # host's name, which must not be that of the loopback.
        hosts = _SETTINGS / space / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        cleanup.callback(shutil.rmtree, hosts.parent)
        # Names of pods come first: the first name of an address is the full name of its host.
        pods = [f"{self.address(i)} {self.pod(i)}.jobset.test {self.pod(i)}"
                for i in range(self._count)]  # fmt: skip
        lines = ["127.0.0.1 localhost", *pods, f"{self.address(host)} {socket.gethostname()}"]
        hosts.write_text("\n".join([*lines, ""]))
        _ip("link", "add", link, "type", "veth", "peer", "name", end)
        # The end of a namespace is deleted some time after it, and with it the name of the link.
        cleanup.callback(_ip, "link", "del", link)
        _ip("link", "set", end, "netns", space)
        _ip("link", "set", link, "master", self._name, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{self.address(host)}/24", "dev", end),
            ("link", "set", end, "up"),
        ):
            _ip("-n", space, *command)

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def command(self, host: int, *command: str) -> list[str]:
        """Return a command that runs on a host."""
        return ["ip", "netns", "exec", self.space(host), *command]

    def pod_command(self, host: int) -> list[str]:
        """Return a command that runs its arguments on a host that is named like a pod."""
        rename = 'hostname "$0" && exec "$@"'
        return self.command(host, "unshare", "--uts", "sh", "-c", rename, self.pod(host))

    def pod(self, host: int) -> str:
        """Return the name of a host as a pod of a JobSet."""
        return f"{self._name}-node-0-{host}"

    def space(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"{self._name}{host}"

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.77.0.{host + 1}"

    def connect(self, host: int, *, is_connected: bool) -> None:
        """Connect a host to the others, or cut it off."""
        _ip("link", "set", f"{self._name}o{host}", "up" if is_connected else "down")


def can_make_networks() -> bool:
    """Return whether this user may create network namespaces."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    is_made = subprocess.run(["ip", "netns", "add", "jaxforge-try"], capture_output=True).returncode
    subprocess.run(["ip", "netns", "del", "jaxforge-try"], capture_output=True)
    return is_made == 0


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
