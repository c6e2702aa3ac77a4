"""The ssh_config that mpirun's ssh reads; pure.

It checks the same host keys, and offers the same keys, as csdctl's own connections do, and it never asks.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.model import Node

# Without ConnectTimeout, a hung sshd held mpirun for ten minutes; without ServerAlive, a pulled cable does.
_COMMON = """\
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
    ServerAliveInterval 5
    ServerAliveCountMax 3
    LogLevel ERROR
"""


def build_ssh_config(nodes: Iterable[Node], known_hosts: Sequence[Path]) -> str:
    """One alias for each of `nodes` and of their jump hosts, with `known_hosts` as the only files that vouch.

    Raises InputError for a path that ssh_config cannot name.
    """
    files = " ".join(_quoted(path) for path in known_hosts) or "none"
    nodes = list(nodes)
    jumps = _name_jumps(nodes)
    blocks = [_build_block(node, node.name, jumps) for node in nodes]
    blocks += [_build_block(jump, name, jumps) for jump, name in jumps.items()]
    common = f"Host *\n    UserKnownHostsFile {files}\n    GlobalKnownHostsFile none\n{_COMMON}"
    return "# Written by csdctl; changes are lost.\n" + "\n".join([*blocks, common])


def _name_jumps(nodes: Sequence[Node]) -> dict[Node, str]:
    """An alias for every jump host of `nodes`, none of them a node's name."""
    names = {node.name for node in nodes}
    jumps: dict[Node, str] = {}
    for node in nodes:
        jump = node.jump
        while jump:
            if jump not in jumps:
                alias = f"jump{len(jumps) + 1}-{jump.name}"
                while alias in names:
                    alias = f"{alias}-"
                jumps[jump] = alias
            jump = jump.jump
    return jumps


def _build_block(node: Node, name: str, jumps: dict[Node, str]) -> str:
    # A percent sign begins a token, also in HostName, where IPv6 zones have one (fe80::1%eth0).
    lines = [f"HostName {node.address.replace('%', '%%')}", f"Port {node.port}", f"User {node.user}"]
    if node.key:
        lines += [f"IdentityFile {_quoted(node.key)}", "IdentitiesOnly yes"]
    if node.jump:
        lines.append(f"ProxyJump {jumps[node.jump]}")
    return f"Host {name}\n" + "".join(f"    {line}\n" for line in lines)


def _quoted(path: Path) -> str:
    text = str(path.absolute())
    if any(part in text for part in ('"', "\\", "\n", "\r", "${")):
        raise InputError(f"the path {text!r} cannot be written in an ssh_config", remedy="rename it")
    return '"' + text.replace("%", "%%") + '"'
