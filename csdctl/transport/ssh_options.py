"""`ssh` options for a program that builds its own command line, such as Ansible; pure.

They check the same host keys as csdctl, for the node and for every jump host before it, and never prompt.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from csdctl.errors import InputError
from csdctl.fleet.model import Node
from csdctl.fleet.openssh import quote_value


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
        raise InputError(str(error), remedy="rename it") from None
