"""The fleet as an ssh_config, for `csdctl inventory` and the tools that read one; pure.

It checks the same host keys and offers the same user keys as csdctl's own connections, and never prompts.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.model import Node

# Without ConnectTimeout, a hung sshd blocked mpirun for ten minutes; without ServerAlive, a disconnected
# cable does.
_COMMON = """\
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 10
    ServerAliveInterval 5
    ServerAliveCountMax 3
    LogLevel ERROR
"""


def build_ssh_config(nodes: Iterable[Node], known_hosts: Sequence[Path]) -> str:
    """Return an ssh_config with an alias for each of `nodes` and their jump hosts.

    `known_hosts` are the only files with host keys. Raises InputError for a path that ssh_config cannot
    represent.
    """
    files = " ".join(_quoted(path) for path in known_hosts) or "none"
    nodes = list(nodes)
    jumps = _name_jumps(nodes)
    blocks = [_build_block(node, node.name, jumps) for node in nodes]
    blocks += [_build_block(jump, name, jumps) for jump, name in jumps.items()]
    common = f"Host *\n    UserKnownHostsFile {files}\n    GlobalKnownHostsFile none\n{_COMMON}"
    return "# Written by csdctl; changes are lost.\n" + "\n".join([*blocks, common])


def _name_jumps(nodes: Sequence[Node]) -> dict[Node, str]:
    """Return an alias for every jump host of `nodes`, different from all node names."""
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
    # A percent sign starts a token, even in HostName, where an IPv6 zone may contain one (fe80::1%eth0).
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
