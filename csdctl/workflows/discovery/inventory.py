"""Nodes from other sources and for other programs: address ranges, Ansible inventories, ssh_config."""

import contextlib
import ipaddress
import os
import pwd
import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from csdctl.documents import MAX_JSON_BYTES, load_text
from csdctl.errors import CsdctlError, InputError, NoNodeReachableError
from csdctl.fleet import ansible, openssh
from csdctl.fleet.fleet_file import render_fleet
from csdctl.fleet.model import (
    HOST_NAME,
    MAX_HOPS,
    Fleet,
    Node,
    name_hop,
    parse_jump,
    select_names,
    select_nodes,
)
from csdctl.fleet.names import NAME, USER, format_node_names, names_by_value
from csdctl.fleet.requirements import explain_extra, find_program
from csdctl.notify import shorten
from csdctl.transport.many import fleet_known_hosts_paths, run_on_all, values_or_raise
from csdctl.worker.protocol.durable_files import save_text

MAX_ADDRESSES = 4096
SSH_DEADLINE_S = 30.0
"""`Match exec` in an ssh_config runs commands, which may take time."""
ANSIBLE_DEADLINE_S = 300.0
"""An inventory may be a program that asks a cloud."""

ListedNodes = tuple[tuple[Node, ...], tuple[str, ...]]
"""Nodes of a source, and warnings about settings that csdctl ignores."""


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
    servers = [address for address, outcome in outcomes.items() if outcome.value]
    if not servers:
        problem = f"none of {len(addresses)} addresses in {', '.join(cidrs)} has an SSH server at port {port}"
        raise NoNodeReachableError(problem, remedy="check the range and --port, and that the machines are on")
    return tuple(
        Node(f"csd{number}", address, port=port, user=user, key=key) for number, address in enumerate(servers)
    )


def _has_ssh_banner(address: str, port: int, banner_timeout_s: float) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as connection:
        connection.settimeout(1.0)
        connection.connect((address, port))
        connection.settimeout(banner_timeout_s)
        is_other_machine = connection.getsockname()[0] != address
        return is_other_machine and connection.recv(4).startswith(b"SSH-")
    return False


def _run(
    command: Sequence[str], deadline_s: float, *, directory: Path | None = None, remedy: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run a program that only prints. `remedy` is for its deadline."""
    try:
        return subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "ANSIBLE_DEPRECATION_WARNINGS": "false"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = shorten(f"{Path(command[0]).name} {' '.join(command[1:])}", 200)
        raise CsdctlError(f"`{text}` did not finish within {deadline_s:.0f} s", remedy=remedy) from None


def resolve_targets(targets: Sequence[openssh.Target], warnings: Mapping[str, list[str]]) -> ListedNodes:
    """Return the nodes of `targets`, and notes on what csdctl ignores. Raises InputError."""
    query = cache(_query)
    resolvers = {target.name: _Resolver(target.name, query) for target in targets}
    outcomes = run_on_all(
        {target.name: target for target in targets},
        lambda target: resolvers[target.name].resolve(target, MAX_HOPS),
        max_workers=os.cpu_count() or 1,
    )
    nodes = tuple(values_or_raise(outcomes, "reading the nodes").values())
    notes = [(name, note) for name, resolver in resolvers.items() for note in dict.fromkeys(resolver.notes)]
    jumps = {(jump.address, jump.port) for node in nodes for jump in node.jumps}
    of_jump = "jump host of others; it becomes a node that trains, unless --exclude leaves it out"
    notes += [(node.name, of_jump) for node in nodes if (node.address, node.port) in jumps]
    lines = {**warnings, **names_by_value(notes)}
    return nodes, tuple(
        f"{format_node_names(names)}: {note}" if names else note for note, names in lines.items()
    )


class _Resolver:
    """Resolves a target and its jump hosts with `ssh -G`."""

    def __init__(self, name: str, query: Callable[[tuple[str, ...]], openssh.SshSettings]) -> None:
        self.notes: list[str] = []
        self._name = name
        self._query = query
        self._defaults = query(("-F", "none", "localhost"))

    def resolve(self, target: openssh.Target, hops_left: int, before: Node | None = None) -> Node:
        """Return the node for `target`, behind `before`. Raises InputError for unsupported settings."""
        if not hops_left:
            raise InputError(f"{self._name}: more than {MAX_HOPS} jump hosts, or a cycle of jumps")
        try:
            settings = self._query(target.words)
        except InputError as error:
            raise InputError(f"{self._name}: {error}") from None
        if not target.name:
            target = replace(target, name=name_hop(settings.get("host", settings["hostname"])[0]))
        keys = openssh.list_keys(settings, self._defaults, Path.home())
        where = "" if target.name == self._name else f"jump host {target.name}: "
        self.notes += [where + note for note in openssh.list_notes(settings, self._defaults, keys)]
        jump = before or self._resolve_jump(target, settings, hops_left - 1)
        return openssh.build_node(target, settings, keys, jump)

    def _resolve_jump(
        self, target: openssh.Target, settings: openssh.SshSettings, hops_left: int
    ) -> Node | None:
        command = settings.get("proxycommand", ["none"])[0]
        if command not in ("", "none"):
            words = openssh.parse_proxy_command(command)
            if words is None:
                remedy = "write it as ProxyJump, or skip the node with --exclude"
                raise InputError(f"{self._name}: ProxyCommand {command!r} is not supported", remedy=remedy)
            return self.resolve(openssh.Target("", words), hops_left)
        text = settings.get("proxyjump", ["none"])[0]
        try:
            last_hop = parse_jump(text)
        except ValueError as error:
            raise InputError(f"{self._name}: ProxyJump {text!r}: {error}") from None
        # OpenSSH passes only the configuration file on to a jump host.
        config = next((words for words in pairwise(target.words) if words[0] == "-F"), ())
        before: Node | None = None
        for hop in reversed([last_hop, *last_hop.jumps] if last_hop else []):
            port, user = ("-p", str(hop.port)) if hop.port else (), ("-l", hop.user) if hop.user else ()
            hop_target = openssh.Target(hop.name, (*config, *port, *user, "--", hop.address))
            before = self.resolve(hop_target, hops_left, before)
        return before


def _query(words: tuple[str, ...]) -> openssh.SshSettings:
    """Return what `ssh -G` prints for `words`. Raises InputError with its message."""
    try:
        query = _run(["ssh", "-G", *words], SSH_DEADLINE_S, remedy="a `Match exec` in an ssh_config may hang")
    except FileNotFoundError:
        raise InputError("`ssh` is not installed here", remedy="install the OpenSSH client") from None
    settings = openssh.parse_settings(query.stdout)
    if query.returncode or "hostname" not in settings:
        [line, *_] = [*query.stderr.strip().splitlines(), "no message"]
        raise InputError(f"`{shlex.join(['ssh', '-G', *words])}` failed: {line}")
    return settings


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
    find: Callable[[Path, Sequence[str], Sequence[str]], ListedNodes]
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

    def find(_: Path, limit: Sequence[str], exclude: Sequence[str]) -> ListedNodes:
        nodes = scan(cidrs, user=user, key=key, port=port)
        return select_nodes(Fleet(nodes, path=Path(name)), limit, exclude).nodes, ()

    ranges = "".join(f" --cidr {cidr}" for cidr in cidrs)
    network = cidrs[0] if len(cidrs) == 1 else ""
    return NodeSource(name, f"Found by `csdctl discover{ranges}`", find, network)


def ansible_inventory(path: Path) -> NodeSource:
    """The hosts of an Ansible inventory, as Ansible and ssh would reach them."""

    def find(directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> ListedNodes:
        inventory, config, notes = load_inventory(path, directory)
        targets, warnings = ansible.list_targets(inventory, config, limit, exclude)
        return resolve_targets(targets, {**{note: [] for note in notes}, **warnings})

    return NodeSource(str(path), f"Written by `csdctl discover --inventory {path}`", find)


def load_inventory(path: Path, directory: Path) -> tuple[ansible.Inventory, ansible.Variables, list[str]]:
    """Return the inventory at `path`, the settings of ansible.cfg in `directory`, and warnings.

    A file with the output of `ansible-inventory --list` is read without Ansible. Raises InputError.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist", remedy="pass the path of an existing file")
    warnings: list[str] = []
    text = "" if path.is_dir() else load_text(path, max_bytes=MAX_JSON_BYTES, errors="replace")
    is_listing = text.lstrip().startswith("{") and '"_meta"' in text
    if not is_listing:
        listing = ["-i", str(path.absolute()), "--list"]
        text, warnings = _run_ansible("ansible-inventory", listing, path, directory)
    inventory = ansible.parse_inventory(text, str(path))
    if warnings and not inventory.groups:
        raise InputError(f"{path} has no host: {'; '.join(warnings[:3])}")
    if is_listing and not find_program("ansible-config"):
        has_config = (directory / "ansible.cfg").exists()
        return inventory, {}, ["ansible.cfg is ignored: Ansible is not installed here"] if has_config else []
    dump = ["dump", "--format", "json", "-t", "all", "--only-changed"]
    text, _ = _run_ansible("ansible-config", dump, path, directory)
    return inventory, ansible.parse_config(text), warnings


def _run_ansible(
    program: str, arguments: Sequence[str], path: Path, directory: Path
) -> tuple[str, list[str]]:
    """Return what a program of Ansible prints, and its warnings. Raises InputError with its message."""
    executable = find_program(program)
    if not executable:
        listing = f"`ansible-inventory -i {path} --list > listed.json` where Ansible is, and pass listed.json"
        raise InputError(
            f"`{program}` is needed to read {path}, and is not installed",
            remedy=f"install ansible-core: {explain_extra('provision')}; or run {listing}",
        )
    completed = _run([executable, *arguments], ANSIBLE_DEADLINE_S, directory=directory)
    lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
    if completed.returncode:
        message = shorten(" ".join(lines[-3:]) or "no message", 500)
        raise InputError(f"`{program}` failed: {message}", remedy=f"fix it until `{program}` succeeds")
    marker = "[WARNING]: "
    return completed.stdout, [line.removeprefix(marker) for line in lines if line.startswith(marker)]


def ssh_config(path: Path) -> NodeSource:
    """The aliases of an ssh_config, as ssh would reach them."""

    def find(directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> ListedNodes:
        aliases = openssh.list_aliases(path)
        selected = select_names(dict.fromkeys(aliases, ()), limit, exclude, where=str(path))
        usable = [name for name in selected if NAME.fullmatch(name) and name not in (HOST_NAME, "localhost")]
        if not usable:
            raise InputError(f"{path}: {', '.join(selected)} is not a valid node name")
        skipped = [name for name in selected if name not in usable]
        # With -F, ssh ignores the system's configuration, which otherwise applies besides the user's.
        # The home is found in the user database, not in $HOME.
        of_user = Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh", "config").resolve()
        arguments = () if path.resolve() == of_user else ("-F", str(path.absolute()))
        targets = [openssh.Target(alias, (*arguments, alias)) for alias in usable]
        return resolve_targets(targets, {"not a valid node name: skipped": skipped} if skipped else {})

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
    return ansible.render_inventory(
        fleet, {node.name: openssh.build_ssh_options(node, known_hosts) for node in fleet.nodes}
    )


def render_ssh_config(fleet: Fleet, directory: Path) -> str:
    """Return a file for `ssh -F`, with an alias for each node and the same known_hosts files."""
    return openssh.build_ssh_config(fleet.nodes, fleet_known_hosts_paths(fleet, directory))
