"""Connections that a task opens by itself, past the fleet: their host keys are checked too."""

import contextlib
from collections.abc import Iterator
from typing import Any

import fabric.connection
import paramiko

from csdctl.transport.known_hosts import SSH_PORT, KnownHosts


@contextlib.contextmanager
def known_hosts_only(known_hosts: KnownHosts) -> Iterator[None]:
    """Let every fabric.Connection that is made in the block refuse a host key that is unknown or changed.

    Fabric's own Connection accepts any key: it names paramiko's AutoAddPolicy in its module, and has no
    setting for it. Connections of a fleet do not use it.
    """

    class KnownHostsPolicy(paramiko.MissingHostKeyPolicy):
        """paramiko asks it for every key, since Fabric loads no known_hosts."""

        def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
            address, _, port = hostname.strip("[").partition("]:")
            number = int(port) if port else SSH_PORT
            known_hosts.check(hostname, address, number, key.get_name(), key.asbytes())

    before = fabric.connection.AutoAddPolicy
    fabric.connection.AutoAddPolicy = KnownHostsPolicy
    try:
        yield
    finally:
        fabric.connection.AutoAddPolicy = before
