"""What the ranks and mpirun have sent, by link and traffic class: the entries of the ledger."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.launch.mpi_job import JobOutcome
from csdctl.transport.meter import LinkBytes, TrafficClass
from csdctl.worker.protocol.events import SAMPLES, STATE, SUMS, Traffic

KINDS = {SUMS: TrafficClass.GRADIENT, SAMPLES: TrafficClass.PUBLIC, STATE: TrafficClass.MODEL}


def between_ranks(
    traffic: Iterable[Traffic], nodes: Sequence[str], kinds: Mapping[str, TrafficClass] = KINDS
) -> LinkBytes:
    """What ranks said they sent to each other: the last word of each group; `nodes` by rank."""
    last = {one.generation: one for one in traffic}
    added: Counter[tuple[str, str, str]] = Counter()
    for one in last.values():
        for row in one.sent:
            added[nodes[row.sender], nodes[row.receiver], kinds[row.what]] += row.num_bytes
    return dict(added)


def of_mpirun(outcomes: Iterable[JobOutcome], fleet: Fleet) -> LinkBytes:
    """What mpirun and its ssh carried.

    Nodes that share an address (an emulated fleet) are told apart by their SSH ports alone.
    """
    added: Counter[tuple[str, str, str]] = Counter()
    for outcome in outcomes:
        for (_, peer), (num_sent, num_received) in outcome.carried.items():
            if name := _whose(peer, fleet):
                added[HOST_NAME, name, TrafficClass.CONTROL] += num_sent
                added[name, HOST_NAME, TrafficClass.CONTROL] += num_received
    return dict(added)


def _whose(end: str, fleet: Fleet) -> str:
    """The node, or its jump host, with this 'address port'; '' for an address of nobody known."""
    address, _, port = end.partition(" ")
    machines = [node.jump or node for node in fleet.nodes] + list(fleet.nodes)
    there = {machine.name: machine for machine in machines if machine.address == address}
    by_port = [name for name, machine in there.items() if str(machine.port) == port]
    if by_port:
        return by_port[0]
    return next(iter(there)) if len(there) == 1 else ""
