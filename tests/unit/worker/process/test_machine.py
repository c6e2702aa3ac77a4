"""The temperature of a machine, from files as the kernel has them."""

from pathlib import Path

import pytest

from csdctl.emulation.limits import FLEET_VARIABLE
from csdctl.worker.process.machine import EMULATED, Thermometer


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def zone(sys: Path, number: int, kind: str, thousandths: str) -> None:
    write(sys / "thermal" / f"thermal_zone{number}" / "type", kind)
    write(sys / "thermal" / f"thermal_zone{number}" / "temp", thousandths)


def test_hottest_sensor_of_the_cpu_counts(tmp_path: Path) -> None:
    write(tmp_path / "hwmon/hwmon0/name", "nvme")
    write(tmp_path / "hwmon/hwmon0/temp1_input", "99000")
    write(tmp_path / "hwmon/hwmon1/name", "coretemp")
    write(tmp_path / "hwmon/hwmon1/temp1_input", "61000")
    write(tmp_path / "hwmon/hwmon1/temp2_input", "64500")
    zone(tmp_path, 0, "acpitz", "27800")
    assert Thermometer(tmp_path).read_c() == 64.5


@pytest.mark.parametrize(
    ("zones", "expected_c"),
    [
        ([("GPU-therm", "80000"), ("CPU-therm", "55250")], 55.25),
        ([("bcm2711", "48000")], 48.0),  # any zone, if none is named after the CPU
        *(([("cpu-thermal", broken)], None) for broken in ("0", "-274000", "4294967295000", "", "hot")),
        ([], None),
    ],
)
def test_thermal_zones_of_boards_without_hwmon(
    tmp_path: Path, zones: list[tuple[str, str]], expected_c: float | None
) -> None:
    for number, (kind, thousandths) in enumerate(zones):
        zone(tmp_path, number, kind, thousandths)
    assert Thermometer(tmp_path).read_c() == expected_c


def test_sensor_is_read_now_and_then(tmp_path: Path) -> None:
    zone(tmp_path, 0, "cpu-thermal", "50000")
    thermometer = Thermometer(tmp_path)
    assert thermometer.read_c() == 50.0
    zone(tmp_path, 0, "cpu-thermal", "70000")
    assert thermometer.read_c() == 50.0


def test_emulated_node_has_no_temperature_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EMULATED == FLEET_VARIABLE
    monkeypatch.setenv(EMULATED, "x")
    zone(tmp_path, 0, "cpu-thermal", "50000")
    assert Thermometer(tmp_path).read_c() is None
