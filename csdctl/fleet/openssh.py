"""OpenSSH: its aliases, jump hosts, arguments and settings (`ssh -G`), and nodes that are made of them.

A jump host is an entry of `jump_hosts`, a node, or `[user@]address[:port]` as in OpenSSH's ProxyJump, with an
IPv6 address in brackets. Several hops are separated by commas, the first hop first. Of an ssh_config, only
names are read here; OpenSSH itself resolves their settings.
"""

import getopt
import glob
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.documents import load_text, split_lines
from csdctl.errors import InputError
from csdctl.fleet.model import Node
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


_MAX_DEPTH = 16
_MAX_FILES = 200
_LINE = re.compile(r"\s*(?P<keyword>[A-Za-z]+)(?:\s*=\s*|\s+)(?P<rest>.*\S)\s*")


def list_aliases(path: Path) -> list[str]:
    """Return every literal name (no pattern) of the Host lines of `path`; raises InputError."""
    aliases = dict.fromkeys(_aliases(path, []))
    if not aliases:
        raise InputError(
            f"{path} has no Host line with a name",
            remedy="patterns such as `Host csd*` do not name a machine",
        )
    return list(aliases)


def _aliases(path: Path, read: list[Path], depth: int = 0) -> Iterator[str]:
    """Yield the names in `path` and the files that it includes; `read` are the files so far."""
    if depth > _MAX_DEPTH:
        raise InputError(f"{path}: includes are nested more than {_MAX_DEPTH} levels deep")
    read.append(path)
    if len(read) > _MAX_FILES:
        raise InputError(f"{path}: more than {_MAX_FILES} included files")
    lines = split_lines(load_text(path, remedy="give the file that ssh uses", errors="replace"), str(path))
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        keyword = found["keyword"].lower() if found else ""
        if found and keyword in ("host", "include"):
            words = _words(found["rest"], f"{path}:{number}")
            if keyword == "host":
                yield from (word for word in words if not re.search(r"[*?!]", word))
            else:
                for file in _included(words):
                    yield from _aliases(file, read, depth + 1)


def _words(text: str, where: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def _included(patterns: list[str]) -> Iterator[Path]:
    for pattern in patterns:
        full = Path.home() / ".ssh" / os.path.expanduser(pattern)
        yield from (Path(match) for match in sorted(glob.glob(str(full))))


_LETTERS = "1246ab:c:e:fgi:kl:m:no:p:qstvxAB:CD:E:F:GI:J:KL:MNO:P:Q:R:S:TVw:W:XYy"
_KEPT = {"-4", "-6", "-b", "-B", "-c", "-F", "-I", "-i", "-J", "-l", "-m", "-o", "-p"}
"""Arguments that define how a machine is reached; the others define what to do there."""

_SUPPORTED = {
    "hostname",
    "identitiesonly",
    "identityfile",
    "port",
    "proxycommand",
    "proxyjump",
    "stricthostkeychecking",
    "user",
}
_UNSUPPORTED = {
    "addressfamily": "AddressFamily",
    "bindaddress": "BindAddress",
    "bindinterface": "BindInterface",
    "certificatefile": "CertificateFile",
    "ciphers": "Ciphers",
    "hostkeyalgorithms": "HostKeyAlgorithms",
    "hostkeyalias": "HostKeyAlias",
    "identityagent": "IdentityAgent",
    "kexalgorithms": "KexAlgorithms",
    "knownhostscommand": "KnownHostsCommand",
    "macs": "MACs",
    "pkcs11provider": "PKCS11Provider",
    "pubkeyacceptedalgorithms": "PubkeyAcceptedAlgorithms",
    "remotecommand": "RemoteCommand",
    "userknownhostsfile": "UserKnownHostsFile",
}


@dataclass(frozen=True)
class Target:
    """A machine as an argument list of ssh: `ssh ARGUMENTS HOST`."""

    name: str
    host: str
    arguments: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    python: str = ""


@dataclass(frozen=True)
class Arguments:
    """A parsed command line of `ssh`: the arguments for reaching a machine, and the rest."""

    kept: tuple[str, ...]
    forwards_to: str
    """The value of -W, or ''."""
    words: tuple[str, ...]
    """Host and command."""


SshSettings = Mapping[str, Sequence[str]]
"""Output of `ssh -G`: values by lower-case keyword; IdentityFile may have several values."""


def read_arguments(words: Sequence[str]) -> Arguments:
    """Parse the arguments of `ssh`; raises ValueError for unknown options."""
    try:
        options, rest = getopt.gnu_getopt(list(words), _LETTERS)
    except getopt.GetoptError as error:
        raise ValueError(error.msg) from None
    kept: list[str] = []
    for letter, value in options:
        if letter == "-o" and not _is_read(value):
            continue
        if letter == "-i":
            kept += ["-o", f"IdentityFile={quote_value(value)}"]  # ssh drops an -i with a missing file
        elif letter in _KEPT:
            kept += [letter, value] if value else [letter]
    return Arguments(tuple(kept), dict(options).get("-W", ""), tuple(rest))


def _is_read(option: str) -> bool:
    """Return whether the -o option `option` is used here; `Match exec`, which runs a program, never is."""
    keyword = re.split(r"[\s=]", option.strip(), maxsplit=1)[0].lower()
    return keyword in _SUPPORTED or keyword in _UNSUPPORTED


def quote_value(text: str) -> str:
    """Quote `text` as a value of an ssh_config; raises ValueError if that is impossible."""
    if any(part in text for part in ('"', "\\", "\n", "\r", "${")):
        raise ValueError(f"{text!r} cannot be written in an ssh_config")
    return f'"{text}"'


def build_query(target: Target) -> list[str]:
    """Return the command that prints the settings of `target`; raises InputError for an invalid address."""
    if not ADDRESS.fullmatch(target.host):
        raise InputError(f"{target.name}: {target.host!r} is not a valid address or host name")
    return ["ssh", "-G", *target.arguments, "--", target.host]


def parse_settings(output: str) -> SshSettings:
    """Parse the output of `ssh -G`."""
    settings: dict[str, list[str]] = defaultdict(list)
    for line in output.splitlines():
        keyword, _, value = line.partition(" ")
        settings[keyword.lower()].append(value)
    return settings


def parse_proxy_command(command: str) -> tuple[str, tuple[str, ...]] | None:
    """Parse `ssh -W %h:%p [user@]gateway` to gateway and arguments; None for any other ProxyCommand."""
    try:
        words = shlex.split(command.removeprefix("exec "))
        arguments = read_arguments(words[1:])
    except ValueError:
        return None
    is_jump = words[:1] and Path(words[0]).name == "ssh" and arguments.forwards_to in ("%h:%p", "[%h]:%p")
    if not is_jump or len(arguments.words) != 1:
        return None
    user, at, host = arguments.words[0].rpartition("@")
    kept = tuple(word.replace("%%", "%") for word in arguments.kept)
    return host, (*kept, *(("-l", user) if at else ()))


def build_node(target: Target, settings: SshSettings, jump: Node | None, home: Path) -> Node:
    """Build the node of `target`; raises InputError for an address or user that a fleet file may not have."""
    address, user = settings["hostname"][0], settings["user"][0]
    for text, pattern, what in ((address, ADDRESS, "address"), (user, USER, "user name")):
        if not pattern.fullmatch(text):
            raise InputError(f"{target.name}: {text!r} is not a valid {what}")
    return Node(
        name=target.name,
        address=address,
        port=int(settings["port"][0]),
        user=user,
        key=next((path for path in _identities(settings, home) if os.path.isfile(path)), None),
        python=target.python or "python3",
        groups=target.groups,
        jump=jump,
    )


def list_notes(
    settings: SshSettings, defaults: SshSettings, known_hosts: Sequence[Path], home: Path
) -> list[str]:
    """List the `settings` that csdctl ignores, one line each; `defaults` are those of plain `ssh`."""
    notes = [
        f"{name} {' '.join(settings[keyword])} is ignored"
        for keyword, name in _UNSUPPORTED.items()
        if settings.get(keyword) and settings[keyword] != defaults.get(keyword)
        if keyword != "userknownhostsfile" or _has_other_files(settings[keyword], known_hosts, home)
    ]
    if settings.get("stricthostkeychecking", [""])[0] in ("no", "off", "false", "accept-new"):
        notes.append("StrictHostKeyChecking is off; csdctl always checks host keys")
    if settings.get("identityfile") != defaults.get("identityfile"):
        paths = _identities(settings, home)
        if paths and not any(map(os.path.isfile, paths)):
            notes.append(f"IdentityFile {paths[0]} does not exist; the agent and the default keys are used")
    return notes


def written_identities(settings: SshSettings, defaults: SshSettings) -> SshSettings:
    """Return `settings` without the default key files, which every ssh tries."""
    if settings.get("identityfile") == defaults.get("identityfile"):
        return {**settings, "identityfile": []}
    return settings


def _identities(settings: SshSettings, home: Path) -> list[Path]:
    """Return the key files; `ssh -G` does not expand their tokens."""
    tokens = {
        "%d": str(home),
        "%h": settings["hostname"][0],
        "%r": settings["user"][0],
        "%p": settings["port"][0],
        "%n": settings.get("host", [""])[0],
        "%%": "%",
    }
    paths = []
    for text in settings.get("identityfile", ()):
        if text == "none":
            continue
        parts = text.split("%%")
        for token, value in tokens.items():
            parts = [part.replace(token, value) for part in parts]
        path = "%".join(parts)
        paths.append(home / path[2:] if path.startswith("~/") else Path(path).absolute())
    return [path for path in paths if path.suffix != ".pub"]


def _has_other_files(values: Sequence[str], known_hosts: Sequence[Path], home: Path) -> bool:
    ours = {str(path) for path in known_hosts} | {str(home / ".ssh" / "known_hosts2")}
    # `ssh -G` quotes nothing, whatever is in a name.
    return not all(file in ours for value in values for file in value.split())
