"""Bytes by link and traffic class, from what the ranks and mpirun's connections counted."""

import pytest

from csdctl.fleet.model import Fleet, Node
from csdctl.launch.mpi_job import TRAFFIC_CLASSES, JobOutcome, add_mpirun_traffic, add_rank_traffic
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.events import ACTIVATIONS, SAMPLES, STATE, SUMS, SentBytes, Traffic

NODES = ("host", "csd0", "csd1")
CONTROL = TrafficClass.CONTROL


def traffic(generation: int, *sent: tuple[str, int, int, int]) -> Traffic:
    return Traffic(0, "host", generation, tuple(SentBytes(*row) for row in sent))


def test_counts_of_a_group_replace_each_other_and_those_of_groups_add_up() -> None:
    events = [
        traffic(1, (SUMS, 1, 0, 10)),
        traffic(1, (SUMS, 1, 0, 25), (SUMS, 0, 1, 7), (STATE, 0, 2, 3)),
        traffic(2, (SUMS, 1, 0, 100)),
    ]
    assert add_rank_traffic(events, NODES) == {
        ("csd0", "host", TrafficClass.GRADIENT): 125,
        ("host", "csd0", TrafficClass.GRADIENT): 7,
        ("host", "csd1", TrafficClass.MODEL): 3,
    }


def test_everything_that_ranks_send_has_its_class() -> None:
    """Activations of private samples must never be shown as anything else."""
    assert TRAFFIC_CLASSES == {
        SUMS: TrafficClass.GRADIENT,
        SAMPLES: TrafficClass.PUBLIC,
        STATE: TrafficClass.MODEL,
        ACTIVATIONS: TrafficClass.ACTIVATIONS,
    }


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("10.0.0.2 51234", "csd0"),
        ("10.0.0.9 2201", "csd1"),
        ("10.0.0.9 2202", "csd2"),
        ("10.0.0.9 51234", ""),
        ("10.0.0.77 22", ""),
    ],
)
def test_connection_of_mpirun_is_that_of_the_node_at_its_address(peer: str, name: str) -> None:
    """Nodes with one address, as in an emulated fleet, differ in their ports alone."""
    same = (Node("csd1", "10.0.0.9", port=2201), Node("csd2", "10.0.0.9", port=2202))
    fleet = Fleet((Node("csd0", "10.0.0.2"), *same))
    outcomes = [JobOutcome([], connection_bytes={("10.0.0.1 40000", peer): (5, 70)}) for _ in range(2)]
    expected = {("host", name, CONTROL): 10, (name, "host", CONTROL): 140} if name else {}
    assert add_mpirun_traffic(outcomes, fleet) == expected
