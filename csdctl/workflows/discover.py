"""Finding machines and learning what they are.

`discover` connects to the whole fleet at once and keeps the facts beside fleet.yaml, problems included.
`scan` knocks at every address of a range and writes a fleet.yaml for those where an SSH server answers.
"""

import asyncio
import contextlib
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.documents import save_text
from csdctl.errors import CsdctlError, InputError, NoNodeReachableError, PartialError
from csdctl.fleet.facts import Facts, facts_path, load_facts, save_facts
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.fleet.scan import expand_addresses, name_nodes, render_fleet
from csdctl.probes.machine import collect_machine_facts
from csdctl.transport.local import LocalSession
from csdctl.transport.many import Outcome, run_on_all, run_on_nodes
from csdctl.transport.session import Session

SCAN_CONNECT_S = 1.0
SCAN_BANNER_S = 3.0
SCAN_AT_ONCE = 128
"""Open sockets at once; well below the usual `ulimit -n` of 256 and more."""

OnDone = Callable[[str, CsdctlError | None], None]


@dataclass(frozen=True)
class DiscoverResult:
    """What `discover` learnt: facts of every machine, errors of those that failed, and warnings."""

    fleet: Fleet
    facts: dict[str, Facts]
    failed: dict[str, CsdctlError]
    warnings: tuple[str, ...]
    path: Path

    def check(self) -> None:
        """Raise NoNodeReachableError or PartialError when nodes failed."""
        num_nodes = len(self.fleet.nodes)
        failed = [name for name in self.failed if name != HOST_NAME]
        if num_nodes and len(failed) == num_nodes:
            raise NoNodeReachableError(
                f"not one of the {num_nodes} nodes of {self.fleet.path} could be reached"
            )
        if self.failed:
            raise PartialError(
                f"{len(self.failed)} of {num_nodes + 1} machines failed: {', '.join(self.failed)}",
                remedy="mend them as said above, and discover again",
            )


def discover(
    fleet: Fleet,
    *,
    directory: Path,
    known_hosts: Sequence[Path] | None = None,
    on_done: OnDone = lambda name, error: None,
) -> DiscoverResult:
    """Learn what the host and all nodes of `fleet` are, and save it beside the fleet file.

    `fleet` may be a part of what its file has: what is known of the others stays. Nodes that fail are in the
    result, not raised.
    """
    host_keys: dict[str, str] = {}

    def visit(session: Session) -> Facts:
        host_keys[session.name] = session.host_key_fingerprint
        return collect_machine_facts(session, fleet.node(session.name).python)

    def tell(outcome: Outcome[Facts]) -> None:
        on_done(outcome.name, outcome.error)

    with contextlib.closing(LocalSession(HOST_NAME, directory)) as host:
        outcomes = _collect(fleet, {HOST_NAME: host}, on_done)
    outcomes |= run_on_nodes(fleet, visit, directory=directory, known_hosts=known_hosts, on_done=tell)
    warnings = find_shared_host_keys(host_keys)
    failed = {name: one.error for name, one in outcomes.items() if one.error}
    names = [HOST_NAME, *(node.name for node in fleet.nodes)]
    facts = {name: _facts_or_problem(name, outcomes.get(name), failed.get(name)) for name in names}
    path = save_facts(fleet, {**_earlier_facts(fleet), **facts})
    return DiscoverResult(
        fleet, facts, {name: failed[name] for name in names if name in failed}, warnings, path
    )


def collect_facts(fleet: Fleet, sessions: Mapping[str, Session]) -> dict[str, Facts]:
    """What the machines behind `sessions` are; where that cannot be told, `problem` says why."""
    outcomes = _collect(fleet, sessions, lambda name, error: None)
    return {name: _facts_or_problem(name, outcome, outcome.error) for name, outcome in outcomes.items()}


def find_shared_host_keys(fingerprints: Mapping[str, str]) -> tuple[str, ...]:
    """A warning for each host key that several nodes show: one machine twice, or a copied disk image.

    `fingerprints` are by node.
    """
    names_by_key: dict[str, list[str]] = defaultdict(list)
    for name, key in fingerprints.items():
        names_by_key[key].append(name)
    return tuple(
        f"{', '.join(names)} show the same host key {key}: one machine listed twice, or a copied disk image"
        for key, names in names_by_key.items()
        if len(names) > 1
    )


def scan(
    cidr: str,
    *,
    user: str,
    key: Path | None = None,
    port: int = 22,
    interface: str = "",
    connect_timeout_s: float = SCAN_CONNECT_S,
    banner_timeout_s: float = SCAN_BANNER_S,
) -> tuple[Node, ...]:
    """The machines of `cidr` where an SSH server answers at `port`, as nodes csd0, csd1, …, without this one.

    With `interface`, asks only through that network interface. Raises InputError for a bad range or
    interface, NoNodeReachableError when nothing answers.
    """
    addresses = expand_addresses(cidr)
    check_interface(interface)
    found = asyncio.run(_scan(addresses, port, interface, connect_timeout_s, banner_timeout_s))
    if not found:
        raise NoNodeReachableError(
            f"none of {len(addresses)} addresses in {cidr} has an SSH server at port {port}",
            remedy="check the range and --port, and that the machines are on",
        )
    return name_nodes(found, user=user, key=key, port=port)


def write_fleet(path: Path, nodes: Sequence[Node], *, network: str, force: bool = False) -> None:
    """Write fleet.yaml for `nodes`; raises InputError when `path` is there already, unless `force`."""
    check_may_write(path, force=force)
    save_text(path, render_fleet(nodes, network=network))


def check_may_write(path: Path, *, force: bool) -> None:
    """Raise InputError when writing `path` would overwrite something."""
    if path.exists() and not force:
        raise InputError(
            f"{path} is there already", remedy="name another with --fleet, or overwrite it with --force"
        )


def check_interface(interface: str) -> None:
    """Raise InputError when a socket cannot be bound to network interface `interface`."""
    if not interface:
        return
    try:
        with socket.socket() as trial:
            _bind_to(trial, interface)
    except PermissionError:
        raise InputError(
            f"this user may not bind to network interface {interface!r}",
            remedy="run as root or with CAP_NET_RAW, or leave --interface out: the range decides the route",
        ) from None
    except OSError as error:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise InputError(
            f"there is no usable network interface {interface!r} ({error.strerror})",
            remedy=f"there are: {names}",
        ) from None


def _collect(fleet: Fleet, sessions: Mapping[str, Session], on_done: OnDone) -> dict[str, Outcome[Facts]]:
    pythons = {HOST_NAME: sys.executable} | {node.name: node.python for node in fleet.nodes}
    return run_on_all(
        sessions,
        lambda session: collect_machine_facts(session, pythons[session.name]),
        on_done=lambda outcome: on_done(outcome.name, outcome.error),
    )


def _facts_or_problem(name: str, outcome: Outcome[Facts] | None, error: CsdctlError | None) -> Facts:
    if outcome is not None and outcome.value is not None:
        return outcome.value
    return Facts(name=name, problem=error.message if error else "not asked")


def _earlier_facts(fleet: Fleet) -> dict[str, Facts]:
    """What is known from before; a file that cannot be read holds nothing worth keeping."""
    if not facts_path(fleet).exists():
        return {}
    with contextlib.suppress(InputError):
        return load_facts(fleet)
    return {}


async def _scan(
    addresses: Sequence[str], port: int, interface: str, connect_timeout_s: float, banner_timeout_s: float
) -> list[str]:
    """Those of `addresses`, in their order, where another machine's SSH server greets."""
    turns = asyncio.Semaphore(SCAN_AT_ONCE)

    async def knock(address: str) -> bool:
        async with turns:
            with contextlib.suppress(OSError, TimeoutError):
                return await _greets(address, port, interface, connect_timeout_s, banner_timeout_s)
            return False

    answers = await asyncio.gather(*(knock(address) for address in addresses))
    return [address for address, is_there in zip(addresses, answers, strict=True) if is_there]


async def _greets(
    address: str, port: int, interface: str, connect_timeout_s: float, banner_timeout_s: float
) -> bool:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as connection:
        connection.setblocking(False)
        if interface:
            _bind_to(connection, interface)
        async with asyncio.timeout(connect_timeout_s):
            await loop.sock_connect(connection, (address, port))
        if connection.getsockname()[0] == address:
            return False  # this machine itself
        async with asyncio.timeout(banner_timeout_s):
            return (await loop.sock_recv(connection, 4)).startswith(b"SSH-")


def _bind_to(connection: socket.socket, interface: str) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
