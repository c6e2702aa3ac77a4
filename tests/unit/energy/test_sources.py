"""Parsers of power sources, on readings in the formats that their makers document."""

import shutil
import subprocess
from pathlib import Path

import pytest

from csdctl.energy.sampler import HWMON_SCRIPT as HWMON
from csdctl.energy.sampler import (
    RAPL_REMEDY,
    UDEV_RULE,
    Counter,
    EnergyMeter,
    Reading,
    parse_dcmi,
    parse_hwmon,
    parse_meter,
    parse_rapl,
)
from csdctl.energy.sampler import RAPL_SCRIPT as RAPL

PROJECT = Path(__file__).parents[3]
DCMI = """
    Instantaneous power reading:                   220 Watts
    Minimum during sampling period:                 12 Watts
    Maximum during sampling period:                440 Watts
    Average power reading over sample period:      216 Watts
    IPMI timestamp:                           Wed Mar  1 10:13:29 2023
    Sampling period:                          00000001 Seconds.
    Power reading state is:                   activated

"""


def run(script, argument):
    return subprocess.run(
        [shutil.which("dash") or "sh", "-c", script, "csdctl-power", str(argument)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.fixture
def powercap(tmp_path):
    """A sysfs with two packages, a core, memory, and the whole board, as Linux has them."""
    zones = {
        "intel-rapl:0": ("package-0", 262143328850, 262143000000),
        "intel-rapl:0:0": ("core", 262143328850, 5),
        "intel-rapl:0:1": ("dram", 65712999613, 1000000),
        "intel-rapl:1": ("package-1", 262143328850, 2000000),
        "intel-rapl:2": ("psys", 262143328850, 999),
    }
    for zone, (name, range_uj, energy_uj) in zones.items():
        directory = tmp_path / "class" / "powercap" / zone
        directory.mkdir(parents=True)
        for file, value in (("name", name), ("max_energy_range_uj", range_uj), ("energy_uj", energy_uj)):
            (directory / file).write_text(f"{value}\n")
    return tmp_path


class TestRapl:
    def test_packages_and_memory_count_without_their_parts_and_the_board(self, powercap):
        counters = parse_rapl(run(RAPL, powercap)).counters
        assert counters == {
            "intel-rapl:0 package-0": Counter(262143.0, 262143.32885),
            "intel-rapl:0:1 dram": Counter(1.0, 65712.999613),
            "intel-rapl:1 package-1": Counter(2.0, 262143.32885),
        }

    def test_counter_that_cannot_be_read_is_refused_with_a_udev_rule(self, powercap):
        file = powercap / "class/powercap/intel-rapl:0/energy_uj"
        file.unlink()
        file.mkdir()  # as root, a file without permission can be read
        with pytest.raises(PermissionError, match="intel-rapl:0/energy_uj cannot be read"):
            parse_rapl(run(RAPL, powercap))
        assert 'SUBSYSTEM=="powercap"' in RAPL_REMEDY

    @pytest.mark.parametrize(
        ("before", "now", "after_s", "joules"),
        [
            (262143.0, 99.67115, 1.0, pytest.approx(100.0)),  # it has started again
            (10.0, 20.0, 400.0, None),  # unread for longer than it lasts
        ],
    )
    def test_counter_that_starts_again_loses_nothing_unless_it_was_unread_for_long(
        self, before, now, after_s, joules
    ):
        meter = EnergyMeter()
        meter.add(0.0, Reading(counters={"package-0": Counter(before, 262143.32885)}))
        assert (
            meter.add(after_s, Reading(counters={"package-0": Counter(now, 262143.32885)})).joules == joules
        )


class TestHwmon:
    def test_powers_are_microwatts_and_add_up(self, tmp_path):
        for number, value in ((1, 4_250_000), (2, 1_750_000)):
            (tmp_path / f"power{number}_input").write_text(f"{value}\n")
        assert parse_hwmon(run(HWMON, tmp_path / "power*_input")) == Reading(6.0)
        path = tmp_path / "energy1_input"  # a counter of microjoules
        path.write_text("1234567890\n")
        assert parse_hwmon(run(HWMON, path)).counters == {str(path): Counter(1234.56789)}

    @pytest.mark.parametrize("value", ["-5", "nan", "1e300", "x", ""])
    def test_damaged_values_are_refused(self, tmp_path, value):
        with pytest.raises(ValueError, match=r"expected"):
            parse_hwmon(f"{value} /sys/class/hwmon/hwmon0/power1_input")

    def test_pattern_is_no_command(self, tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            parse_hwmon(run(HWMON, f"{tmp_path}/x; touch {tmp_path}/made; $(touch {tmp_path}/made)"))
        assert not (tmp_path / "made").exists()


class TestIpmi:
    def test_power_of_the_moment_counts(self):
        assert parse_dcmi(DCMI) == Reading(220.0)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (DCMI.replace("activated", "deactivated"), "is deactivated"),
            ("\n    DCMI request failed because: Invalid data field (cc)\n", "because: Invalid data field"),
            (DCMI.replace("220 Watts", "  0 Watts"), "received 0 watts"),
        ],
    )
    def test_controller_that_does_not_measure_is_said(self, text, said):
        with pytest.raises(ValueError, match=said):
            parse_dcmi(text)


class TestMeter:
    def test_rows_have_unix_or_iso_times(self):
        lines = ["Time, volts,watts", "1769860800.5,230,212.5", "2026-01-31T12:00:01Z,230,213"]
        assert list(parse_meter(lines)) == [(1769860800.5, 212.5), (1769860801.0, 213.0)]

    def test_row_being_written_is_left_out_and_another_is_refused(self):
        assert list(parse_meter(["time,watts", "1,200", "2,"])) == [(1.0, 200.0)]
        for damaged in ("2,", "2", "noon,5", "3,99999"):
            with pytest.raises(ValueError, match="line 2"):
                list(parse_meter(["time,watts", damaged, "3,200"]))


class TestEnergyMeter:
    def test_power_that_was_not_read_for_long_is_a_gap(self):
        meter = EnergyMeter()
        assert meter.add(0.0, Reading(10.0)) is None
        assert meter.add(1.0, Reading(20.0)).joules == 15.0
        assert meter.add(60.0, Reading(20.0)).joules is None
        assert meter.add(61.0, Reading(20.0)).joules == 20.0
        assert meter.add(5.0, Reading(10.0)) is None, "the machine has restarted"
        assert meter.add(6.0, Reading(10.0)).joules == 10.0


@pytest.mark.parametrize(
    ("path", "user"),
    [
        ("docs/how-to/energy.md", "csd"),
        ("ansible/roles/host/tasks/main.yml", "{{ host_user }}"),
        ("ansible/roles/node/tasks/rapl.yml", "{{ node_user or ansible_user }}"),
    ],
)
def test_rule_of_the_remedy_is_the_one_of_docs_and_roles(path, user):
    assert UDEV_RULE.format(user=user) in (PROJECT / path).read_text()
