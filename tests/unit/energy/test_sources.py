"""What sources print: RAPL on files as Linux has them, and the commands of the docs on recorded output."""

import math
import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from csdctl.energy.sampler import RAPL, Reading, count_joules, parse_reading

PAGE = (Path(__file__).parents[3] / "docs/how-to/energy.md").read_text()
DCMI = """
    Instantaneous power reading:                   220 Watts
    Minimum during sampling period:                 12 Watts
    Maximum during sampling period:                440 Watts
    Average power reading over sample period:      216 Watts
    IPMI timestamp:                           Wed Mar  1 10:13:29 2023
    Sampling period:                          00000001 Seconds.
    Power reading state is:                   activated

"""
REDFISH = """{"@odata.id": "/redfish/v1/Chassis/1/Power", "PowerControl": [{"@odata.id":
"/redfish/v1/Chassis/1/Power#/PowerControl/0", "MemberId": "0", "PowerConsumedWatts": 344, "PowerMetrics":
{"MinConsumedWatts": 271, "AverageConsumedWatts": 319}}], "Voltages": []}"""
RANGE_J = 262143.32885
NO_POWERS = ["", "0", "-5", "nan", "1e300", "99999", "٣", "1,5", "12 kW", "5/7 W", "1 W 2 J", "sh: 1: no"]


def run(script: str, **variables: str) -> str:
    """Return what `sh` prints, in a line as the sampler gets it."""
    environment = os.environ | variables
    output = subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    return " ".join(output.stdout.split())


def print_as(directory: Path, name: str, output: str) -> dict[str, str]:
    """Make a program that prints `output`, and return the environment that has it."""
    (directory / "output").write_text(output)
    program = directory / name
    program.write_text(f"#!/bin/sh\ncat {directory}/output\n")
    program.chmod(0o700)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def recipe(beginning: str) -> str:
    """Return the command of the docs that begins so."""
    files = [yaml.safe_load(block.partition("```")[0]) for block in PAGE.split("```yaml\n")[1:]]
    sources = [file.get(key, {}).get("power") for file in files for key in ("host", "defaults")]
    commands = [source["command"] for source in sources if source and "command" in source]
    commands += [line.strip(" -`") for line in PAGE.replace(": `", ":\n`").splitlines()]
    return next(line for line in commands if line.startswith(beginning))


class TestReading:
    @pytest.mark.parametrize(
        ("text", "reading"),
        [
            ("212.5", Reading(212.5, ())),
            ("212.5 W", Reading(212.5, ())),
            ("4250000 uW 1750000uW 1e1", Reading(16.0, ())),
            ("3600 J", Reading(0.0, ((3600.0, math.inf),))),
            ("1000000/5000000 uJ 7J", Reading(0.0, ((1.0, 5.0), (7.0, math.inf)))),
        ],
    )
    def test_powers_are_added_and_counters_kept(self, text, reading):
        assert parse_reading(text) == reading

    @pytest.mark.parametrize("text", NO_POWERS)
    def test_what_is_no_power_is_refused(self, text):
        with pytest.raises(ValueError, match="expected a power"):
            parse_reading(text)


class TestEnergy:
    @pytest.mark.parametrize(
        ("before", "now", "seconds", "joules"),
        [
            ("10", "20", 1.0, 15.0),
            ("10 J", "110 J", 1.0, 100.0),
            (f"262143/{RANGE_J} J 5 J", f"99.67115/{RANGE_J} J 7 J", 1.0, 102.0),  # it has started again
        ],
    )
    def test_power_is_averaged_and_counters_are_subtracted(self, before, now, seconds, joules):
        assert count_joules(parse_reading(before), parse_reading(now), seconds) == pytest.approx(joules)

    @pytest.mark.parametrize(
        ("before", "now", "seconds", "said"),
        [
            ("10", "20", 60.0, "within 10 s, received 0 after 60 s"),
            ("10 J", "9 J", 1.0, "expected counters that grow"),
            (f"99999/{RANGE_J} J", f"5/{RANGE_J} J", 1.0, "expected counters that grow"),  # it was set back
            ("10 J", "20 J 30 J", 1.0, "expected 1 counters"),
            ("10", "20", math.nan, "expected counters that grow"),
            ("10 J", "20 J", -1.0, "expected counters that grow"),
        ],
    )
    def test_energy_that_is_not_known_is_an_error(self, before, now, seconds, said):
        with pytest.raises(ValueError, match=said):
            count_joules(parse_reading(before), parse_reading(now), seconds)


class TestRapl:
    @pytest.fixture
    def script(self, tmp_path):
        """The script, for a sysfs with two packages, a core, memory, and the whole board."""
        zones = {
            "intel-rapl:0": ("package-0", 262143328850, 262143000000),
            "intel-rapl:0:0": ("core", 262143328850, 5),
            "intel-rapl:0:1": ("dram", 65712999613, 1000000),
            "intel-rapl:1": ("package-1", 262143328850, 2000000),
            "intel-rapl:2": ("psys", 262143328850, 999),
        }
        for zone, (name, range_uj, energy_uj) in zones.items():
            directory = tmp_path / zone
            directory.mkdir()
            for file, value in (("name", name), ("max_energy_range_uj", range_uj), ("energy_uj", energy_uj)):
                (directory / file).write_text(f"{value}\n")
        return RAPL.replace("/sys/class/powercap", str(tmp_path))

    def test_packages_and_memory_count_without_their_parts_and_the_board(self, script):
        counters = [(262143.0, RANGE_J), (1.0, 65712.999613), (2.0, RANGE_J)]
        reading = parse_reading(run(script))
        assert [*sum(reading.counters, ())] == pytest.approx([*sum(counters, ())])

    def test_counter_that_cannot_be_read_is_named(self, script, tmp_path):
        file = tmp_path / "intel-rapl:0/energy_uj"
        file.unlink()
        file.mkdir()  # as root, a file without permission can be read
        with pytest.raises(ValueError, match="intel-rapl:0/energy_uj cannot be read"):
            parse_reading(run(script))


class TestCommandsOfTheDocs:
    @pytest.mark.parametrize(
        ("program", "output", "watts"),
        [
            ("ipmitool", DCMI, 220.0),
            ("ipmitool", DCMI.replace("activated", "deactivated"), None),
            ("ipmitool", DCMI.replace("220 Watts", "  0 Watts"), None),
            ("ipmitool", "\n    DCMI request failed because: Invalid data field (cc)\n", None),
            ("curl", REDFISH, 344.0),
            ("curl", "{}", None),
        ],
    )
    def test_program_that_asks_a_controller(self, tmp_path, program, output, watts):
        printed = run(recipe(program), **print_as(tmp_path, program, output))
        if watts:
            assert parse_reading(printed).watts == watts
        else:
            with pytest.raises(ValueError, match="received"):
                parse_reading(printed)

    def test_sensors(self, tmp_path):
        for name, value in (("power1_input", 4250000), ("power2_input", 1750000), ("energy1_input", 7000000)):
            (tmp_path / name).write_text(f"{value}\n")
        for beginning, reading in {
            "sed 's/$/ uW/' /sys/class/hwmon/hwmon0/power*": Reading(6.0, ()),
            "sed 's/$/ uJ/'": Reading(0.0, ((7.0, math.inf),)),
        }.items():
            command = recipe(beginning).replace("/sys/class/hwmon/hwmon0", str(tmp_path))
            assert parse_reading(run(command)) == reading

    @pytest.mark.parametrize(("age_s", "printed"), [(-5, "12.5"), (15, "")])
    def test_file_of_a_meter(self, tmp_path, age_s, printed):
        (tmp_path / "plug.csv").write_text(f"time,watts\n1.5,500\n{time.time() - age_s},12.5\n")
        assert run(f"cd {tmp_path}; {recipe('tail')}") == printed


@pytest.mark.parametrize(
    ("path", "user"),
    [
        ("ansible/roles/host/tasks/main.yml", "{{ host_user }}"),
        ("ansible/roles/node/tasks/rapl.yml", "{{ node_user or ansible_user }}"),
    ],
)
def test_rule_of_the_docs_is_the_one_of_the_roles(path, user):
    (rule,) = (line for line in PAGE.splitlines() if line.startswith("SUBSYSTEM"))
    assert rule.replace("chown csd", f"chown {user}") in (Path(__file__).parents[3] / path).read_text()
