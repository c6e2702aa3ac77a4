"""The fleet for programs that start `ssh` themselves: an ssh_config, or options of the command line; pure.

Both check the same host keys and offer the same user keys as csdctl's own connections, and never prompt.
"""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.model import Node
from csdctl.fleet.openssh import quote_value

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


def build_ssh_options(node: Node, known_hosts: Sequence[Path]) -> list[str]:
    """Return `ssh` options besides address, port, user and key; raises InputError for an unusable path.

    A jump host becomes a ProxyCommand, because OpenSSH's ProxyJump passes on neither key nor known_hosts.
    """
    files = " ".join(_quoted(path) for path in known_hosts) or "none"
    options = ["-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes"]
    options += ["-o", f"UserKnownHostsFile={files}", "-o", "GlobalKnownHostsFile=none"]
    if node.key:
        options += ["-o", "IdentitiesOnly=yes"]
    if node.jump:
        options += ["-o", f"ProxyCommand={_proxy_command(node.jump, known_hosts)}"]
    return options


def _proxy_command(jump: Node, known_hosts: Sequence[Path]) -> str:
    """Return the `ssh` command for a connection through `jump`, escaped for a shell and for ssh's tokens."""
    own = ["-p", str(jump.port), "-l", jump.user]
    if jump.key:
        own += ["-o", f"IdentityFile={_quoted(jump.key)}"]
    words = ["ssh", *own, *build_ssh_options(jump, known_hosts), "--", jump.address]
    text = shlex.join(words).replace("%", "%%")
    return text.replace("ssh", "ssh -W '[%h]:%p'", 1)


def _quoted(path: Path) -> str:
    try:
        return quote_value(str(path.absolute()).replace("%", "%%"))
    except ValueError as error:
        raise InputError(f"the path {error}", remedy="rename it") from None
