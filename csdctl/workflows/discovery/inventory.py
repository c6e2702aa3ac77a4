"""Nodes from other sources and for other programs: address ranges, Ansible inventories, ssh_config."""

import contextlib
import ipaddress
import os
import pwd
import socket
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from csdctl.documents import save_text
from csdctl.errors import CsdctlError, InputError, NoNodeReachableError
from csdctl.fleet.ansible import list_targets, load_config, load_inventory, render_inventory
from csdctl.fleet.fleet_file import render_fleet
from csdctl.fleet.model import HOST_NAME, Fleet, Node, select_names, select_nodes
from csdctl.fleet.names import NAME, USER, format_node_names
from csdctl.fleet.openssh import (
    MAX_HOPS,
    Hop,
    SshSettings,
    Target,
    build_node,
    build_query,
    build_ssh_config,
    build_ssh_options,
    list_aliases,
    list_keys,
    list_notes,
    parse_jump,
    parse_proxy_command,
    parse_settings,
)
from csdctl.transport.many import fleet_known_hosts_paths, run_on_all, values_or_raise

MAX_ADDRESSES = 4096
QUERY_DEADLINE_S = 30.0


def expand_addresses(cidr: str) -> list[str]:
    """Return every host address of `cidr`. Raises InputError if invalid, or above MAX_ADDRESSES."""
    try:
        network = ipaddress.ip_network(cidr, strict=False)
    except ValueError:
        remedy = "write it as ADDRESS/BITS, such as 10.1.2.0/24"
        raise InputError(f"{cidr!r} is not an address range", remedy=remedy) from None
    if network.num_addresses > MAX_ADDRESSES:
        problem = f"{cidr} has {network.num_addresses} addresses, but at most {MAX_ADDRESSES} are scanned"
        raise InputError(problem, remedy="use a smaller range, or run several scans")
    return [str(address) for address in network.hosts()]


def scan(
    cidrs: Sequence[str], *, user: str, key: Path | None = None, port: int = 22, banner_timeout_s: float = 3.0
) -> tuple[Node, ...]:
    """Return other machines with an SSH server at `port`. Raises InputError, NoNodeReachableError."""
    addresses = list(dict.fromkeys(address for cidr in cidrs for address in expand_addresses(cidr)))
    outcomes = run_on_all(
        {address: address for address in addresses},
        lambda address: _has_ssh_banner(address, port, banner_timeout_s),
        max_workers=128,  # sockets; well below the usual `ulimit -n` of 256 or more
    )
    found = [address for address, outcome in outcomes.items() if outcome.value]
    if not found:
        problem = f"none of {len(addresses)} addresses in {', '.join(cidrs)} has an SSH server at port {port}"
        raise NoNodeReachableError(problem, remedy="check the range and --port, and that the machines are on")
    return tuple(
        Node(f"csd{number}", address, port=port, user=user, key=key) for number, address in enumerate(found)
    )


def _has_ssh_banner(address: str, port: int, banner_timeout_s: float) -> bool:
    """Return whether another machine's SSH server sends its banner."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as connection:
        connection.settimeout(1.0)
        connection.connect((address, port))
        connection.settimeout(banner_timeout_s)
        is_other = connection.getsockname()[0] != address
        return is_other and connection.recv(4).startswith(b"SSH-")
    return False


"""`Match exec` in an ssh_config runs commands, which may take time."""


FoundNodes = tuple[tuple[Node, ...], tuple[str, ...]]
"""Nodes of a source, and warnings about settings that csdctl ignores."""


def resolve_targets(targets: Sequence[Target], warnings: Mapping[str, list[str]]) -> FoundNodes:
    """Return the nodes of `targets`, and notes on what csdctl ignores. Raises InputError."""
    resolver = _Resolver()
    resolver.notes.update(warnings)
    outcomes = run_on_all(
        {target.name: target for target in targets}, resolver.resolve, max_workers=os.cpu_count() or 1
    )
    nodes = tuple(values_or_raise(outcomes, "reading the nodes").values())
    jumps = {(jump.address, jump.port) for node in nodes for jump in node.jumps}
    for name in (node.name for node in nodes if (node.address, node.port) in jumps):
        note = "jump host of others; it becomes a node that trains, unless --exclude leaves it out"
        resolver.notes[note].append(name)
    order = {target.name: number for number, target in enumerate(targets)}
    folded = []
    for note, names in resolver.notes.items():
        listed = format_node_names(sorted(set(names), key=lambda name: order.get(name, 0)))
        folded.append(f"{listed}: {note}" if names else note)
    return nodes, tuple(folded)


@dataclass
class _Resolver:
    """Resolves targets and their jump hosts with `ssh -G`."""

    notes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _defaults: SshSettings = field(init=False)
    _cache: dict[tuple[str, ...], SshSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._defaults = self._query(Target("", "localhost", ("-F", "none")))

    def resolve(self, target: Target) -> Node:
        """Return the node for `target`. Raises InputError for unsupported settings."""
        return self._resolve(target, MAX_HOPS, name=target.name)

    def _resolve(self, target: Target, hops_left: int, name: str, before: Node | None = None) -> Node:
        if not hops_left:
            raise InputError(f"{name}: more than {MAX_HOPS} jump hosts, or a cycle of jumps")
        settings = self._query(target)
        keys = list_keys(settings, self._defaults, Path.home())
        for note in list_notes(settings, self._defaults, keys):
            where = "" if target.name == name else f"jump host {target.name}: "
            self.notes[where + note].append(name)
        jump = before or self._jump(target, settings, hops_left - 1, name)
        return build_node(target, settings, keys, jump)

    def _jump(self, target: Target, settings: SshSettings, hops_left: int, name: str) -> Node | None:
        command = settings.get("proxycommand", ["none"])[0]
        if command not in ("", "none"):
            forwarded = parse_proxy_command(command)
            if not forwarded:
                remedy = "write it as ProxyJump, or skip the node with --exclude"
                raise InputError(f"{name}: ProxyCommand {command!r} is not supported", remedy=remedy)
            host, arguments = forwarded
            return self._resolve(Target(Hop(host).name, host, arguments), hops_left, name)
        text = settings.get("proxyjump", ["none"])[0]
        try:
            hops = parse_jump(text)
        except ValueError as error:
            raise InputError(f"{name}: ProxyJump {text!r}: {error}") from None
        before: Node | None = None
        for hop in hops:
            before = self._resolve(_hop_target(hop, target), hops_left, name, before)
        return before

    def _query(self, target: Target) -> SshSettings:
        command = tuple(build_query(target))
        if command not in self._cache:
            self._cache[command] = self._run_ssh(target, command)
        return self._cache[command]

    def _run_ssh(self, target: Target, command: tuple[str, ...]) -> SshSettings:
        run = partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        try:
            printed = run(command, timeout=QUERY_DEADLINE_S)
        except FileNotFoundError:
            raise InputError("`ssh` is not installed here", remedy="install the OpenSSH client") from None
        except subprocess.TimeoutExpired:
            problem = f"`ssh -G {target.host}` did not finish within {QUERY_DEADLINE_S:.0f} s"
            remedy = "a `Match exec` in an ssh_config may hang"
            raise CsdctlError(f"{target.name}: {problem}", remedy=remedy) from None
        if printed.returncode:
            lines = printed.stderr.strip().splitlines()[:1] or ["no message"]
            raise InputError(f"{target.name}: `ssh -G {target.host}` failed: {lines[0]}")
        return parse_settings(printed.stdout)


def _hop_target(hop: Hop, target: Target) -> Target:
    """Return the target of a ProxyJump hop: OpenSSH passes only the configuration file on to it."""
    files = [file for flag, file in pairwise(target.arguments) if flag == "-F"]
    arguments = ["-F", files[0]] if files else []
    arguments += ["-p", str(hop.port)] if hop.port else []
    arguments += ["-l", hop.user] if hop.user else []
    return Target(hop.name, hop.address, tuple(arguments))


@dataclass(frozen=True)
class FoundFleet:
    """A fleet from a source, the text of its file, and where csdctl deviates from the source."""

    fleet: Fleet
    text: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeSource:
    """A source of nodes."""

    name: str
    origin: str
    find: Callable[[Path, Sequence[str], Sequence[str]], FoundNodes]
    """Returns the nodes that --limit and --exclude select, given csdctl's directory, and warnings.

    Raises InputError or NoNodeReachableError.
    """
    network: str = ""


def address_ranges(
    cidrs: Sequence[str], user: str = "root", key: Path | None = None, port: int = 22
) -> NodeSource:
    """Machines with an SSH server in `cidrs`, a single one the fleet's network. Raises InputError."""
    name = ", ".join(cidrs)
    for cidr in cidrs:
        expand_addresses(cidr)  # raises InputError
    if not USER.fullmatch(user):
        raise InputError(f"--user {user!r} is not a user name", remedy="pass a user of these machines")
    if key and not key.is_file():
        raise InputError(f"--key {key} does not exist", remedy="pass the path of a private key")

    def find(_: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        nodes = scan(cidrs, user=user, key=key, port=port)
        return select_nodes(Fleet(nodes, path=Path(name)), limit, exclude).nodes, ()

    ranges = "".join(f" --cidr {cidr}" for cidr in cidrs)
    network = cidrs[0] if len(cidrs) == 1 else ""
    return NodeSource(name, f"Found by `csdctl discover{ranges}`", find, network)


def ansible_inventory(path: Path) -> NodeSource:
    """The hosts of an Ansible inventory, as Ansible and ssh would reach them."""

    def find(directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        targets, warnings = list_targets(load_inventory(path), load_config(directory), limit, exclude)
        return resolve_targets(targets, warnings)

    return NodeSource(str(path), f"Written by `csdctl discover --inventory {path}`", find)


def ssh_config(path: Path) -> NodeSource:
    """The aliases of an ssh_config, as ssh would reach them."""

    def find(directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        aliases = list_aliases(path)
        chosen = select_names(dict.fromkeys(aliases, ()), limit, exclude, where=str(path))
        own = (HOST_NAME, "localhost")
        usable = [alias for alias in chosen if NAME.fullmatch(alias) and alias not in own]
        if not usable:
            raise InputError(f"{path}: {', '.join(chosen)} is not a valid node name")
        skipped = [alias for alias in chosen if alias not in usable]
        # With -F, ssh ignores the system's configuration, which otherwise applies besides the user's. That is
        # found by the user database, not by $HOME.
        of_user = Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh", "config").resolve()
        arguments = () if path.resolve() == of_user else ("-F", str(path.absolute()))
        targets = [Target(alias, alias, arguments) for alias in usable]
        warnings = {"not a valid node name: skipped": skipped} if skipped else {}
        return resolve_targets(targets, warnings)

    return NodeSource(str(path), f"Written by `csdctl discover --ssh-config {path}`", find)


def import_fleet(
    source: NodeSource,
    path: Path,
    *,
    directory: Path,
    limit: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    is_dry_run: bool = False,
) -> FoundFleet:
    """Find the nodes of `source` and write them to `path`. Raises InputError, NoNodeReachableError."""
    if path.exists() and not force and not is_dry_run:
        remedy = "use another file with --fleet, or overwrite it with --force"
        raise InputError(f"{path} already exists", remedy=remedy)
    nodes, warnings = source.find(directory, limit, exclude)
    fleet = Fleet(nodes, network=source.network, path=path)
    text = render_fleet(fleet, origin=source.origin)
    if not is_dry_run:
        save_text(path, text)
    return FoundFleet(fleet, text, warnings)


def render_ansible(fleet: Fleet, directory: Path) -> str:
    """Return an inventory for `ansible-playbook -i`, with csdctl's known_hosts files for `directory`."""
    known_hosts = fleet_known_hosts_paths(fleet, directory)
    return render_inventory(fleet, {node.name: build_ssh_options(node, known_hosts) for node in fleet.nodes})


def render_ssh_config(fleet: Fleet, directory: Path) -> str:
    """Return a file for `ssh -F`, with an alias for each node and the same known_hosts files."""
    return build_ssh_config(fleet.nodes, fleet_known_hosts_paths(fleet, directory))
