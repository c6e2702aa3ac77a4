"""Jump hosts: the values of `jump:` in fleet.yaml; pure.

A value is an entry of `jump_hosts`, a node, or `[user@]address[:port]` as in OpenSSH's ProxyJump, with an
IPv6 address in brackets. Several hops are separated by commas, the first hop first.
"""

import re
from dataclasses import dataclass

from csdctl.fleet.names import ADDRESS, USER

NO_JUMP = "none"
MAX_HOPS = 8

_HOP = re.compile(r"(?:(?P<user>[^@]*)@)?(?:\[(?P<v6>[^\]]*)\]|(?P<address>[^:]*))(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True)
class Hop:
    """A hop of a ProxyJump as written; missing parts are None."""

    address: str
    user: str | None = None
    port: int | None = None

    @property
    def name(self) -> str:
        """A valid alias for an ssh_config: `ops@10.0.0.1:2222` is ops-10.0.0.1-2222."""
        parts = [self.user, self.address, self.port and str(self.port)]
        return re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(part for part in parts if part)).strip("-.")[:63]


def parse_jump(text: str) -> tuple[Hop, ...]:
    """Parse the hops of `text`, the first hop first; raises ValueError for an invalid ProxyJump."""
    if text == NO_JUMP or not text:
        return ()
    hops = tuple(_parse_hop(part.strip().removeprefix("ssh://")) for part in text.split(","))
    if len(hops) > MAX_HOPS:
        raise ValueError(f"more than {MAX_HOPS} jumps")
    return hops


def _parse_hop(text: str) -> Hop:
    found = _HOP.fullmatch(text)
    address = found and (found["v6"] or found["address"])
    if not found or not address or not ADDRESS.fullmatch(address):
        raise ValueError("not a valid jump host: expected a name or [user@]address[:port]")
    if found["user"] is not None and not USER.fullmatch(found["user"]):
        raise ValueError("not a valid user name of a jump host")
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 0 < port < 1 << 16:
        raise ValueError(f"port {port} of a jump host is not between 1 and 65535")
    return Hop(address, found["user"], port)
