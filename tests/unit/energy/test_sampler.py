"""The sampler over a real session: a shell loop that reads files, and what it writes."""

import os
import threading
import time

import pytest

from csdctl.energy import sampler
from csdctl.energy.sampler import PowerSampler
from csdctl.errors import InputError
from csdctl.fleet.fleet_file import load_fleet, render_fleet
from csdctl.fleet.model import Fleet, Host, PowerSource
from csdctl.reporting.energy import add_up_energy
from csdctl.runs.directory import RunDirectory
from csdctl.runs.ledger import PowerRecord, read_power
from csdctl.transport.local import LocalSession
from tests.patience import WAIT_S, scaled


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def sample(run, power, said, until):
    """Sample the host's power until `until`, an event, is set."""
    session = LocalSession("host", run.path)
    with PowerSampler(run, Fleet((), Host(power=power)), {"host": session}, said):
        assert until.wait(scaled(WAIT_S))
    session.close()
    return list(read_power(run))


class TestSampler:
    def test_source_that_failed_is_read_again(self, run, monkeypatch):
        """As a management controller that is busy: the file is there from the first failure on."""
        monkeypatch.setattr(sampler, "RETRY_S", 0.05)
        said, sensor, recovered = [], run.path / "power1_input", threading.Event()

        def say(line):
            said.append(line)
            if "cannot be read" in line:
                sensor.write_text("3750000\n")
            if "read again" in line:
                recovered.set()

        records = sample(run, PowerSource(source="hwmon", path=str(sensor)), say, recovered)
        assert "power1_input cannot be read" in said[0]
        assert "`path` names" in said[1]
        assert said[2:] == ["host: power can be read again (hwmon)"]
        assert "cannot be read" in records[0].error
        assert records[0].joules is None
        assert sum(bool(record.error) for record in records) == 1

    def test_power_is_read_every_second_in_a_loop_there(self, run):
        """The sensors are pipes that a reading opens in turn, so that the test knows when it was made."""
        sensors, done = [run.path / f"power{number}_input" for number in (1, 2)], threading.Event()
        for sensor in sensors:
            os.mkfifo(sensor)

        def feed():
            for _ in range(3):
                for sensor in sensors:
                    sensor.write_text("3750000\n")
            done.set()

        threading.Thread(target=feed, daemon=True).start()
        power = PowerSource(source="hwmon", path=f"{run.path}/power*_input", idle_watts=2.0)
        records = sample(run, power, print, done)
        assert sum(r.joules for r in records) == pytest.approx(
            7.5 * sum(r.seconds for r in records), rel=1e-3
        )
        assert {(r.origin, r.idle_watts, r.source) for r in records} == {("measured", 2.0, "hwmon")}

    def test_constant_is_stated_and_never_measured(self, run):
        until = threading.Event()
        until.set()
        (record,) = sample(run, PowerSource(source="constant", watts=10.0), print, until)
        assert record.origin == "stated"
        assert record.joules == pytest.approx(10 * record.seconds, rel=0.1, abs=0.01)

    def test_file_of_a_meter_counts_from_the_start_of_the_run(self, run):
        until, failed, now_s = threading.Event(), threading.Event(), time.time()
        until.set()
        meter = run.path / "meter.csv"
        rows = [(now_s - 60.0, 500), (now_s - 0.4, 10), (now_s, 20)]
        meter.write_text("time,watts\n" + "".join(f"{time_s},{watts}\n" for time_s, watts in rows))
        record, last = sample(run, PowerSource(source="csv", path=str(meter)), print, until)
        assert (record.origin, record.joules) == ("measured", pytest.approx(6.0, abs=0.01))
        assert last.joules == pytest.approx(20 * last.seconds, abs=0.01)  # until the run ended
        meter.write_text("watt\n")
        said = []

        def say(line):
            said.append(line)
            failed.set()  # before the run ends

        *_, record = sample(run, PowerSource(source="csv", path=str(meter)), say, failed)
        assert "expected columns" in record.error
        assert "`time,watts`" in said[1]


class TestSums:
    RECORDS = (
        PowerRecord(10.0, "host", "rapl", "measured", 10.0, 1000.0, idle_watts=60.0),
        PowerRecord(20.0, "host", "rapl", "measured", 10.0, 1000.0, idle_watts=60.0),
        PowerRecord(20.0, "csd0", "constant", "stated", 20.0, 150.0),
    )

    def test_energy_of_the_training_counts_per_machine_and_whole(self):
        energy = add_up_energy(self.RECORDS, ["host", "csd0"], {"host": 750, "csd0": 75}, [(5.0, 20.0)])
        host, csd = energy.machines
        assert host.joules == 1500.0
        assert host.above_idle_joules == 600.0
        assert host.joules_per_sample == 2.0
        assert csd.joules == 112.5
        assert csd.above_idle_joules is None
        assert energy.whole.joules == 1612.5
        assert energy.whole.origin == "stated"  # one part of it is
        assert energy.whole.samples_per_joule == pytest.approx(825 / 1612.5)

    def test_chassis_that_contains_the_nodes_is_not_counted_twice(self):
        records = [PowerRecord(10.0, "host", "ipmi", "measured", 10.0, 2000.0, includes_nodes=True)]
        energy = add_up_energy(
            [*records, self.RECORDS[2]], ["host", "csd0"], {"host": 90, "csd0": 10}, [(0, 10)]
        )
        assert energy.whole.joules == 2000.0
        assert energy.whole.joules_per_sample == 20.0
        assert energy.whole.origin == "measured"

    def test_gap_of_more_than_little_gives_no_energy_per_sample(self):
        gap = PowerRecord(20.0, "host", "rapl", "measured", 10.0)
        energy = add_up_energy([self.RECORDS[0], gap], ["host"], {"host": 100}, [(0.0, 20.0)])
        assert (energy.machines[0].coverage, energy.missing) == (0.5, ("host",))
        for end_s, expected in {20.0: None, 10.1: 10.0, 10.3: None}.items():
            energy = add_up_energy(self.RECORDS[:1], ["host"], {"host": 100}, [(0.0, end_s)])
            assert energy.machines[0].joules_per_sample == expected
            assert (energy.whole is None) == (expected is None)

    @pytest.mark.parametrize(
        ("start_s", "end_s", "joules", "seconds"),
        [(0, 20, 2000, 20), (-5, 25, 2000, 20), (4, 16, 1200, 12), (12, 14, 200, 2), (20, 30, 0, 0)],
    )
    def test_record_counts_with_its_share_of_the_training(self, start_s, end_s, joules, seconds):
        (host,) = add_up_energy(self.RECORDS, ["host"], {"host": 100}, [(start_s, end_s)]).machines
        assert (host.joules, host.seconds) == pytest.approx((joules, seconds))
        assert host.coverage == pytest.approx(seconds / (end_s - start_s))


class TestFleetFile:
    def test_power_of_host_and_nodes_is_read_and_written(self, tmp_path):
        path = tmp_path / "fleet.yaml"
        path.write_text(
            "host: {power: {source: csv, path: meter.csv, idle_watts: 190, includes_nodes: true}}\n"
            "defaults: {power: 7.5 W}\nnodes:\n"
            "  - {name: 'csd[0-1]', address: '10.0.0.[1-2]'}\n"
            "  - {name: board, address: 10.0.0.9, power: rapl}\n"
        )
        fleet = load_fleet(path)
        assert fleet.host.power.path == str(tmp_path / "meter.csv")
        assert [node.power for node in fleet.nodes] == [
            PowerSource(source="constant", watts=7.5),
            PowerSource(source="constant", watts=7.5),
            PowerSource(source="rapl"),
        ]
        path.write_text(render_fleet(fleet, origin="test"))
        again = load_fleet(path)
        assert again.nodes == fleet.nodes
        assert again.host == fleet.host

    @pytest.mark.parametrize(
        ("power", "said"),
        [("hwmon", "needs `path`"), ("{source: rapl, path: /sys}", "does not use `path`"), ("-3", "watts")],
    )
    def test_source_that_cannot_be_is_refused(self, tmp_path, power, said):
        path = tmp_path / "fleet.yaml"
        path.write_text(f"nodes:\n  - {{name: a, address: 10.0.0.1, power: {power}}}\n")
        with pytest.raises(InputError, match=said):
            load_fleet(path)
