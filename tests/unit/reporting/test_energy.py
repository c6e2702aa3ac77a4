"""What the report says of energy from which no idle power is subtracted."""

from csdctl.reporting.energy import add_up_energy
from csdctl.runs.ledger import MEASURED, PowerRecord


def records_of(covering: tuple[str, ...] = (), **idle_watts):
    return [
        PowerRecord(
            time=100.0,
            machine=machine,
            source="command",
            origin=MEASURED,
            seconds=100.0,
            joules=500.0,
            idle_watts=watts,
            includes_nodes=machine in covering,
            error="",
        )
        for machine, watts in idle_watts.items()
    ]


def described(**idle_watts):
    energy = add_up_energy(records_of(**idle_watts), list(idle_watts), {}, [(0.0, 100.0)])
    return [text for name, text in energy.describe() if name == "all"]


def test_machines_without_a_stated_idle_power_are_named() -> None:
    assert described(host=2.0, csd0=1.0) == [
        "1,000 J measured (command), 700 J above stated idle power, known for 100% of the training"
    ]
    assert described(host=2.0, csd0=None, csd1=None) == [
        "1,500 J measured (command), idle power included: idle_watts of csd0, csd1 is not in fleet.yaml, "
        "known for 100% of the training"
    ]


def test_meter_of_a_chassis_has_the_nodes_of_its_own_server_alone() -> None:
    nodes = ["host", "storage1/csd0", "storage2", "storage2/csd0"]

    def added(*covering: str):
        records = records_of(covering, host=None, storage2=None)
        return add_up_energy(records, nodes, {}, [(0.0, 100.0)])

    assert added("host").missing == ("storage2/csd0",)
    assert added("host", "storage2").whole.joules == 1000.0
