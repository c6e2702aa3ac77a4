"""Bytes sent by the ranks and by mpirun, by link and traffic class: entries of the ledger."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.launch.mpi_job import JobOutcome
from csdctl.transport.meter import LinkBytes, TrafficClass
from csdctl.worker.protocol.events import ACTIVATIONS, SAMPLES, STATE, SUMS, Traffic

TRAFFIC_CLASSES = {
    SUMS: TrafficClass.GRADIENT,
    SAMPLES: TrafficClass.PUBLIC,
    STATE: TrafficClass.MODEL,
    ACTIVATIONS: TrafficClass.ACTIVATIONS,
}


def add_rank_traffic(
    traffic: Iterable[Traffic], nodes: Sequence[str], classes: Mapping[str, TrafficClass] = TRAFFIC_CLASSES
) -> LinkBytes:
    """Add up what the ranks sent to each other; `nodes` by rank.

    Counts are cumulative within a group of ranks: the last event of each generation counts.
    """
    last = {event.generation: event for event in traffic}
    added: Counter[tuple[str, str, str]] = Counter()
    for event in last.values():
        for row in event.sent:
            added[nodes[row.sender], nodes[row.receiver], classes[row.what]] += row.num_bytes
    return dict(added)


def add_mpirun_traffic(outcomes: Iterable[JobOutcome], fleet: Fleet) -> LinkBytes:
    """Add up the bytes on the connections of mpirun.

    Nodes that share an address (an emulated fleet) differ in their SSH ports alone.
    """
    added: Counter[tuple[str, str, str]] = Counter()
    for outcome in outcomes:
        for (_, peer), (num_sent, num_received) in outcome.connection_bytes.items():
            if name := _find_machine(peer, fleet):
                added[HOST_NAME, name, TrafficClass.CONTROL] += num_sent
                added[name, HOST_NAME, TrafficClass.CONTROL] += num_received
    return dict(added)


def _find_machine(peer: str, fleet: Fleet) -> str:
    """Return the node, or its jump host, with this 'address port'; '' for an unknown or ambiguous address."""
    address, _, port = peer.partition(" ")
    machines = [node.jump or node for node in fleet.nodes] + list(fleet.nodes)
    candidates = {machine.name: machine for machine in machines if machine.address == address}
    by_port = [name for name, machine in candidates.items() if str(machine.port) == port]
    if by_port:
        return by_port[0]
    return next(iter(candidates)) if len(candidates) == 1 else ""
