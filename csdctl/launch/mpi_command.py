"""The mpirun command line, as an argument list; pure.

Why each option is there: docs/reference/mpirun.md.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from csdctl.fleet.model import HOST_NAME
from csdctl.worker.protocol.events import Exited, event_to_line

ALLOW_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
"""mpirun refuses root unless told; a node's only user is often root."""

EAGER_LIMIT_BYTES = 4 << 20
"""Above it a message needs three trips and both sides awake; a rank that sleeps makes each trip wait."""

COMMON_OPTIONS = (
    "--map-by node",
    "--bind-to none",
    "--output tag",
    "--mca pml ob1",
    "--mca btl tcp,self",
    "--mca coll ^han",
    f"--mca btl_tcp_eager_limit {EAGER_LIMIT_BYTES}",
    f"--mca btl_tcp_max_send_size {EAGER_LIMIT_BYTES}",
    "--prtemca plm_ssh_no_tree_spawn 1",
    "--prtemca oob_tcp_keepalive_time 3",
    "--prtemca oob_tcp_keepalive_intvl 1",
    "--prtemca oob_tcp_keepalive_probes 3",
)


@dataclass(frozen=True)
class RankCommand:
    """One rank: the machine it runs on, and the argument list that starts it there."""

    node: str
    command: tuple[str, ...]

    @property
    def is_local(self) -> bool:
        """Whether it runs on the host."""
        return self.node == HOST_NAME


def build_mpirun_command(
    mpirun: Path,
    prefix: str,
    ssh_config: Path,
    network: str,
    ranks: Sequence[RankCommand],
    *,
    run_id: str = "",
) -> list[str]:
    """mpirun with one application context per rank, in order of rank.

    `ssh_config` is relative to where mpirun starts: PRRTE splits its agent at spaces and knows no quotes.
    `prefix` is where MPI lies on the nodes (their virtual environment), `network` the CIDR of the
    interfaces MPI may use ('' lets it choose). With `run_id`, daemons and ssh carry `daemon_marker` of it.
    """
    options = [word for option in COMMON_OPTIONS for word in option.split()]
    options += ["--prefix", prefix]
    options += ["--prtemca", "plm_ssh_agent", f"ssh -F {ssh_config}"]
    if network:
        options += ["--mca", "btl_tcp_if_include", network]
        # An interface of an IPv4 network may have IPv6 addresses, which nobody said lead anywhere.
        options += ["--mca", "btl_tcp_disable_family", "4" if ":" in network else "6"]
        # PRRTE never uses the loopback when there is another interface, and fails when told to.
        if not network.startswith("127."):
            options += ["--prtemca", "prte_if_include", network]
    if run_id:
        options += ["--prtemca", daemon_marker(run_id), "1"]
    contexts: list[str] = []
    for number, rank in enumerate(ranks):
        contexts += [":"] if number else []
        contexts += ["--host", f"{'localhost' if rank.is_local else rank.node}:1", "-np", "1"]
        contexts += ["/bin/sh", "-c", _rank_script(number, rank)]
    return [str(mpirun), *options, *contexts]


def rank_marker(run_id: str, node: str) -> str:
    """What every rank of a run has in its command line, so that it can be found."""
    return f"csdctl-run={run_id}/{node}"


def daemon_marker(run_id: str) -> str:
    """A parameter that nothing reads: mpirun passes it on, so it is in the command line of all it starts."""
    return f"csdctl_run_{run_id}"


def _rank_script(number: int, rank: RankCommand) -> str:
    """The shell of one rank: enters the machine's home, and stays to say how the rank ended.

    mpirun starts every rank in its own directory, while a node's paths are relative to its home. When a
    rank is killed, the others notice and give up at once, and mpirun may name one of those.
    """
    event = event_to_line(Exited(number, rank.node, 0)).removesuffix("0}")
    enter = "" if rank.is_local else "cd && "
    report = f"printf '%s%d}}\\n' {shlex.quote(event)} $code"
    return f"{enter}{shlex.join(rank.command)}; code=$?; [ $code -eq 0 ] || {report}; exit $code"
