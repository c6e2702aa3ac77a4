"""The mpirun command line, as an argument list; pure.

Why each option is there: docs/reference/mpirun.md.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """One rank: where it runs ('' is the host) and the argument list that starts it there."""

    node: str
    command: tuple[str, ...]


def build_mpirun_command(
    mpirun: Path, prefix: str, ssh_config: Path, network: str, ranks: Sequence[RankCommand]
) -> list[str]:
    """mpirun with one application context per rank, in order of rank.

    `prefix` is where MPI lies on the nodes (their virtual environment), `network` the CIDR of the
    interfaces MPI may use ('' lets it choose).
    """
    options = [word for option in COMMON_OPTIONS for word in option.split()]
    options += ["--prefix", prefix]
    options += ["--prtemca", "plm_ssh_agent", f"ssh -F {ssh_config}"]
    if network:
        options += ["--mca", "btl_tcp_if_include", network]
        # PRRTE never uses the loopback when there is another interface, and fails when told to.
        if not network.startswith("127."):
            options += ["--prtemca", "prte_if_include", network]
    contexts: list[str] = []
    for number, rank in enumerate(ranks):
        contexts += [":"] if number else []
        contexts += ["--host", f"{rank.node or 'localhost'}:1", "-np", "1", *_in_home(rank)]
    return [str(mpirun), *options, *contexts]


def _in_home(rank: RankCommand) -> list[str]:
    """mpirun starts every rank in its own directory; a node's paths are relative to its home."""
    if not rank.node:
        return list(rank.command)
    return ["/bin/sh", "-c", f"cd && exec {shlex.join(rank.command)}"]
