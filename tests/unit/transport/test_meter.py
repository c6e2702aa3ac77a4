"""Byte counts by link and traffic class, also through jump hosts."""

from csdctl.fleet.model import Node
from csdctl.transport.meter import Meter, TrafficClass, add_up

GATE = Node("gate", "10.0.0.1")
INNER = Node("inner", "10.1.0.1", jump=GATE)
FAR = Node("far", "10.2.0.9", jump=INNER)


def meter(sent: int, received: int, **noted: int) -> Meter:
    meter = Meter()
    meter.num_sent, meter.num_received = sent, received
    for kind, count in noted.items():
        meter.record(TrafficClass(kind), sent=count)
    return meter


def test_bytes_through_a_jump_host_count_once_per_link() -> None:
    """And connections to one machine add up."""
    behind = Node("csd1", "10.1.0.2", jump=GATE)
    added = add_up([(GATE, meter(150, 50)), (GATE, meter(0, 10)), (behind, meter(100, 40, code=70))])
    assert added == {
        ("host", "gate", TrafficClass.CODE): 70,
        ("host", "gate", TrafficClass.CONTROL): 80,
        ("gate", "host", TrafficClass.CONTROL): 60,
        ("gate", "csd1", TrafficClass.CODE): 70,
        ("gate", "csd1", TrafficClass.CONTROL): 30,
        ("csd1", "gate", TrafficClass.CONTROL): 40,
    }
    nested = add_up([(GATE, meter(200, 0)), (INNER, meter(150, 0)), (FAR, meter(100, 0))])
    assert nested == {
        ("host", "gate", TrafficClass.CONTROL): 200,
        ("gate", "inner", TrafficClass.CONTROL): 150,
        ("inner", "far", TrafficClass.CONTROL): 100,
    }
