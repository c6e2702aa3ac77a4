"""The fleet for programs that start `ssh` themselves: an ssh_config, or options of the command line; pure.

Both check the same host keys and offer the same user keys as csdctl's own connections, and never prompt.
"""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.model import Node
from csdctl.fleet.openssh import quote_value


def build_ssh_config(nodes: Iterable[Node], known_hosts: Sequence[Path]) -> str:
    """Return an ssh_config with an alias for each of `nodes`; raises what `build_ssh_options` raises."""
    blocks = []
    for node in nodes:
        # A percent sign starts a token, even in HostName, where an IPv6 zone may contain one (fe80::1%eth0).
        lines = [f"HostName {node.address.replace('%', '%%')}", f"Port {node.port}", f"User {node.user}"]
        lines += [f"IdentityFile {_quoted(node.key)}"] if node.key else []
        lines += [option.replace("=", " ", 1) for option in build_ssh_options(node, known_hosts)[1::2]]
        blocks.append(f"Host {node.name}\n" + "".join(f"    {line}\n" for line in lines))
    return "# Written by csdctl; changes are lost.\n" + "\n".join(blocks)


def build_ssh_options(node: Node, known_hosts: Sequence[Path]) -> list[str]:
    """Return `-o` options of `ssh` besides address, port, user and key; `known_hosts` alone have host keys.

    A jump host becomes a ProxyCommand, because OpenSSH's ProxyJump passes on neither key nor known_hosts.
    Raises InputError for a path that ssh_config cannot represent.
    """
    files = " ".join(_quoted(path) for path in known_hosts) or "none"
    options = ["StrictHostKeyChecking=yes", "BatchMode=yes"]
    options += [f"UserKnownHostsFile={files}", "GlobalKnownHostsFile=none"]
    if node.key:
        options.append("IdentitiesOnly=yes")
    if node.jump:
        options.append(f"ProxyCommand={_proxy_command(node.jump, known_hosts)}")
    return [word for option in options for word in ("-o", option)]


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
