"""OpenSSH: its aliases, jump hosts, arguments and settings (`ssh -G`), and nodes that are made of them.

Of an ssh_config, only names are read here. OpenSSH itself resolves their settings. Programs that start `ssh`
get the fleet as an ssh_config or as options, which check the same host keys and offer the same user keys as
csdctl's own connections, and never prompt.
"""

import getopt
import getpass
import glob
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.documents import load_text, split_lines
from csdctl.errors import InputError
from csdctl.fleet.model import Node
from csdctl.fleet.names import ADDRESS, AN_ADDRESS, USER

_MAX_FILES = 200
"""Files that an ssh_config includes, directly or through others."""
_LETTERS = "1246ab:c:e:fgi:kl:m:no:p:qstvxAB:CD:E:F:GI:J:KL:MNO:P:Q:R:S:TVw:W:XYy"
"""The options of ssh, as getopt takes them."""
_CONNECTING = {"-4", "-6", "-b", "-B", "-c", "-F", "-I", "-i", "-J", "-l", "-m", "-o", "-p"}
"""Arguments that define how a machine is reached. Others define what to do there."""
_READ = {"hostname", "identitiesonly", "identityfile", "port", "proxycommand", "proxyjump", "user"}
_IGNORED = {
    *("addressfamily", "bindaddress", "bindinterface", "certificatefile", "ciphers", "forwardagent"),
    *("hostkeyalgorithms", "hostkeyalias", "identityagent", "kexalgorithms", "knownhostscommand", "macs"),
    *("permitlocalcommand", "pkcs11provider", "pubkeyacceptedalgorithms", "pubkeyauthentication"),
    *("remotecommand", "requiredrsasize", "revokedhostkeys", "securitykeyprovider", "setenv"),
}
"""Settings that csdctl warns about. Others are of terminals, forwarding, passwords and known_hosts."""

SshSettings = Mapping[str, Sequence[str]]
"""Output of `ssh -G`: values by lower-case keyword. IdentityFile may have several values."""


@dataclass(frozen=True)
class Target:
    """A machine as `ssh WORDS` reaches it. `name` is '' for a jump host without one."""

    name: str
    words: tuple[str, ...]
    groups: tuple[str, ...] = ()
    python: str = ""


def list_aliases(path: Path) -> list[str]:
    """Return every literal name of the Host lines of `path` and included files. Raises InputError."""
    aliases: dict[str, None] = {}
    files = [path]
    for file in files:  # grows during the iteration
        if len(files) > _MAX_FILES:
            raise InputError(f"{path}: more than {_MAX_FILES} included files")
        text = load_text(file, remedy="pass the file that ssh uses", errors="replace")
        for number, line in enumerate(split_lines(text, str(file)), start=1):
            match = re.fullmatch(r"\s*(host|include)(?:\s*=\s*|\s+)(.*\S)\s*", line, re.IGNORECASE)
            if not match:
                continue
            try:
                words = shlex.split(match[2], comments=True)
            except ValueError as error:
                raise InputError(f"{file}:{number}: {error}") from None
            if match[1].lower() == "host":
                aliases |= dict.fromkeys(word for word in words if not re.search(r"[*?!]", word))
                continue
            for word in words:
                pattern = Path.home() / ".ssh" / os.path.expanduser(word)
                files += [Path(name) for name in sorted(glob.glob(str(pattern)))]
    if not aliases:
        remedy = "patterns such as `Host csd*` do not name a machine"
        raise InputError(f"{path} has no Host line with a name", remedy=remedy)
    return list(aliases)


def read_arguments(words: Sequence[str]) -> tuple[tuple[str, ...], str, list[str]]:
    """Return the arguments of `ssh` that define how a machine is reached, the value of -W, and the operands.

    `Match exec`, which runs a program, is never among them. Raises ValueError for unknown options.
    """
    try:
        options, operands = getopt.gnu_getopt(list(words), _LETTERS)
    except getopt.GetoptError as error:
        raise ValueError(error.msg) from None
    connecting: list[str] = []
    for letter, value in options:
        if letter == "-o" and re.split(r"[\s=]", value.strip())[0].lower() not in _READ | _IGNORED:
            continue
        if letter == "-i":
            connecting += ["-o", f"IdentityFile={quote_value(value)}"]  # ssh drops an -i with a missing file
        elif letter in _CONNECTING:
            connecting += [letter, value] if value else [letter]
    return tuple(connecting), dict(options).get("-W", ""), operands


def quote_value(text: str) -> str:
    """Quote `text` as a value of an ssh_config. Raises ValueError if that is impossible."""
    if any(part in text for part in ('"', "\\", "\n", "\r", "${")):
        raise ValueError(f"{text!r} cannot be written in an ssh_config")
    return f'"{text}"'


def parse_settings(output: str) -> SshSettings:
    """Parse the output of `ssh -G`."""
    settings: dict[str, list[str]] = defaultdict(list)
    for line in output.splitlines():
        keyword, _, value = line.partition(" ")
        settings[keyword.lower()].append(value)
    return settings


def parse_proxy_command(command: str) -> tuple[str, ...] | None:
    """Return the words after `ssh` of `ssh -W %h:%p [user@]gateway`. None for any other ProxyCommand."""
    try:
        program, *words = shlex.split(command.removeprefix("exec "))
        arguments, forwards_to, operands = read_arguments(words)
    except ValueError:
        return None
    if Path(program).name != "ssh" or forwards_to not in ("%h:%p", "[%h]:%p") or len(operands) != 1:
        return None
    return (*(word.replace("%%", "%") for word in arguments), "--", *operands)


def build_node(target: Target, settings: SshSettings, keys: Sequence[Path], jump: Node | None) -> Node:
    """Build the node of `target`. Raises InputError for an address or user that no fleet file may have."""
    address, user = settings["hostname"][0], settings["user"][0]
    for text, pattern, what in ((address, ADDRESS, AN_ADDRESS), (user, USER, "user name")):
        if not pattern.fullmatch(text):
            raise InputError(f"{target.name}: {text!r} is not a valid {what}")
    return Node(
        name=target.name,
        address=address,
        port=int(settings["port"][0]),
        user=user,
        key=next(iter(keys), None),
        other_keys=tuple(keys[1:]),
        offers_agent=bool(keys) and settings["identitiesonly"] != ["yes"],
        python=target.python or "python3",
        groups=target.groups,
        jump=jump,
    )


def list_notes(settings: SshSettings, defaults: SshSettings, keys: Sequence[Path]) -> list[str]:
    """List the `settings` that csdctl ignores, one line each. `defaults` are the settings of plain `ssh`."""
    notes = [
        f"{keyword} {' '.join(settings[keyword])} is ignored"
        for keyword in sorted(_IGNORED)
        if settings.get(keyword) and settings[keyword] != defaults.get(keyword)
    ]
    if not keys and (stated := settings.get("identityfile", ())) not in ((), defaults.get("identityfile")):
        notes.append(f"IdentityFile {stated[0]} does not exist; the agent and the default keys are used")
    return notes


def list_keys(settings: SshSettings, defaults: SshSettings, home: Path) -> list[Path]:
    """Return the key files of `settings` that exist, or whose public key does. Empty for `defaults`."""
    texts = settings.get("identityfile", ())
    if texts == defaults.get("identityfile") and settings["identitiesonly"] != ["yes"]:
        return []
    tokens = {"d": str(home), "h": settings["hostname"][0], "r": settings["user"][0], "%": "%"}
    tokens |= {"p": settings["port"][0], "n": settings.get("host", [""])[0], "u": getpass.getuser()}
    paths = []
    for text in texts:
        if text == "none":
            continue
        path = re.sub("%(.)", lambda token: tokens.get(token[1], token[0]), text).removesuffix(".pub")
        path = os.path.expandvars(path)
        paths.append(home / path[2:] if path.startswith("~/") else Path(path).expanduser().absolute())
    return [path for path in paths if os.path.isfile(path) or os.path.isfile(f"{path}.pub")]


def build_ssh_config(nodes: Iterable[Node], known_hosts: Sequence[Path]) -> str:
    """Return an ssh_config with an alias for each of `nodes`. Raises what `build_ssh_options` raises."""
    blocks = []
    for node in nodes:
        # A percent sign starts a token, even in HostName, where an IPv6 zone may contain one (fe80::1%eth0).
        lines = [f"HostName {node.address.replace('%', '%%')}", f"Port {node.port}", f"User {node.user}"]
        lines += [option.replace("=", " ", 1) for option in build_ssh_options(node, known_hosts)[1::2]]
        blocks.append(f"Host {node.name}\n" + "".join(f"    {line}\n" for line in lines))
    return "# Written by csdctl; changes are lost.\n" + "\n".join(blocks)


def build_ssh_options(node: Node, known_hosts: Sequence[Path]) -> list[str]:
    """Return `-o` options of `ssh` besides address, port and user. Only `known_hosts` have host keys.

    A jump host becomes a ProxyCommand, because OpenSSH's ProxyJump passes on neither key nor known_hosts.
    Raises InputError for a path that ssh_config cannot represent.
    """
    files = " ".join(_quoted(path) for path in known_hosts) or "none"
    options = ["StrictHostKeyChecking=yes", "BatchMode=yes"]
    options += [f"UserKnownHostsFile={files}", "GlobalKnownHostsFile=none"]
    options += [f"IdentityFile={_quoted(path)}" for path in node.keys]
    if node.key and not node.offers_agent:
        options.append("IdentitiesOnly=yes")
    if node.key_address != node.address:
        alias = node.key_address if node.port == 22 else f"[{node.key_address}]:{node.port}"
        options.append(f"HostKeyAlias={alias}")
    if node.jump:
        options.append(f"ProxyCommand={_proxy_command(node.jump, known_hosts)}")
    return [word for option in options for word in ("-o", option)]


def _proxy_command(jump: Node, known_hosts: Sequence[Path]) -> str:
    """Return the `ssh` command for a connection through `jump`, escaped for a shell and for ssh's tokens."""
    options = build_ssh_options(jump, known_hosts)
    words = ["ssh", "-p", str(jump.port), "-l", jump.user, *options, "--", jump.address]
    text = shlex.join(words).replace("%", "%%")
    return text.replace("ssh", "ssh -W '[%h]:%p'", 1)


def _quoted(path: Path) -> str:
    try:
        return quote_value(str(path.absolute()).replace("%", "%%"))
    except ValueError as error:
        raise InputError(f"the path {error}", remedy="rename it") from None
