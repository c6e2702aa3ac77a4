"""The energy of a run, by machine and whole, from records of power."""

from dataclasses import replace

import pytest

from csdctl.reporting.energy import add_up_energy
from csdctl.runs.ledger import PowerRecord

RECORDS = (
    PowerRecord(10.0, "host", "rapl", "measured", 10.0, 1000.0, idle_watts=60.0),
    PowerRecord(20.0, "host", "rapl", "measured", 10.0, 1000.0, idle_watts=60.0),
    PowerRecord(20.0, "csd0", "constant", "stated", 20.0, 150.0),
)


def test_energy_of_the_training_counts_per_machine_and_whole():
    energy = add_up_energy(RECORDS, ["host", "csd0"], {"host": 750, "csd0": 75}, [(5.0, 20.0)])
    host, csd = energy.machines
    assert (host.joules, host.above_idle_joules, host.joules_per_sample) == (1500.0, 600.0, 2.0)
    assert (csd.joules, csd.above_idle_joules) == (112.5, None)
    assert energy.whole.joules == 1612.5
    assert energy.whole.origin == "stated"  # one part of it is
    assert energy.whole.joules_per_sample == pytest.approx(1612.5 / 825)


def test_gap_of_more_than_little_gives_no_energy_per_sample():
    gap = PowerRecord(20.0, "host", "rapl", "measured", 10.0)
    energy = add_up_energy([RECORDS[0], gap], ["host"], {"host": 100}, [(0.0, 20.0)])
    assert (energy.machines[0].coverage, energy.missing) == (0.5, ("host",))
    for end_s, expected in {20.0: None, 10.1: 10.0, 10.3: None}.items():
        energy = add_up_energy(RECORDS[:1], ["host"], {"host": 100}, [(0.0, end_s)])
        assert energy.machines[0].joules_per_sample == expected
        assert (energy.whole is None) == (expected is None)


@pytest.mark.parametrize(
    ("start_s", "end_s", "joules", "seconds"),
    [(0, 20, 2000, 20), (-5, 25, 2000, 20), (4, 16, 1200, 12), (12, 14, 200, 2), (20, 30, 0, 0)],
)
def test_record_counts_with_its_share_of_the_training(start_s, end_s, joules, seconds):
    (host,) = add_up_energy(RECORDS, ["host"], {"host": 100}, [(start_s, end_s)]).machines
    assert (host.joules, host.seconds) == pytest.approx((joules, seconds))
    assert host.coverage == pytest.approx(seconds / (end_s - start_s))


def energy_of(nodes, covering=(), **idle_watts):
    record = PowerRecord(100.0, "", "command", "measured", 100.0, 500.0)
    records = [
        replace(record, machine=name, idle_watts=watts, includes_nodes=name in covering)
        for name, watts in idle_watts.items()
    ]
    return add_up_energy(records, nodes or list(idle_watts), {}, [(0.0, 100.0)])


def test_machines_without_a_stated_idle_power_are_named():
    assert energy_of([], host=2.0, csd0=1.0).describe_total() == [
        "1,000 J measured (command), 700 J above stated idle power, known for 100% of the training"
    ]
    assert energy_of([], host=2.0, csd0=None, csd1=None).describe_total() == [
        "1,500 J measured (command), idle power included: idle_watts of csd0, csd1 is not in fleet.yaml, "
        "known for 100% of the training"
    ]


def test_meter_of_a_chassis_has_the_nodes_of_its_own_server_alone_and_counts_them_once():
    nodes = ["host", "storage1/csd0", "storage2", "storage2/csd0"]
    meters = {"host": None, "storage2": None}
    assert energy_of(nodes, ["host"], **meters).missing == ("storage2/csd0",)
    assert energy_of(nodes, ["host", "storage2"], **meters).whole.joules == 1000.0
    records = [replace(RECORDS[0], includes_nodes=True), RECORDS[2]]
    total = add_up_energy(records, ["host", "csd0"], {"host": 90, "csd0": 10}, [(0.0, 10.0)]).whole
    assert (total.joules, total.joules_per_sample, total.origin) == (1000.0, 10.0, "measured")
