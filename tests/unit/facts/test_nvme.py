"""The fact about NVMe drives on a sample tree like /sys; no machine with such drives was available."""

import subprocess
from pathlib import Path

import pytest

from csdctl.facts.machine import NVME_SCRIPT, parse_nvme
from csdctl.fleet.facts import Drive


def found_drives(sys: Path) -> tuple[Drive, ...]:
    script = NVME_SCRIPT.replace("/sys/", f"{sys}/")
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert printed.stderr == ""
    return parse_nvme(printed.stdout)["drives"]  # type: ignore[return-value]


def add_drive(sys: Path, controller: str, serial: str, model: str, **sectors: int) -> None:
    """A tree as in Linux: values are padded with blanks to the width of the NVMe field."""
    directory = sys / "class" / "nvme" / controller
    directory.mkdir(parents=True)
    (directory / "serial").write_text(f"{serial:<20}\n")
    (directory / "model").write_text(f"{model:<40}\n")
    for namespace, size in sectors.items():
        (directory / namespace).mkdir()
        block = sys / "block" / namespace.replace("c1n", "n")
        block.mkdir(parents=True, exist_ok=True)
        (block / "size").write_text(f"{size}\n")


def test_drives_with_a_serial_are_listed_with_sizes_in_numeric_order(tmp_path: Path) -> None:
    add_drive(tmp_path, "nvme10", "S10", "NGD Newport", nvme10n1=1000)
    add_drive(tmp_path, "nvme2", "S2", "Boot drive", nvme2n1=10, nvme2n2=20)
    add_drive(tmp_path, "nvme3", "S3", "No namespace")
    add_drive(tmp_path, "nvme0", "S0", "Dual port", nvme0c1n1=8)  # behind multipath
    add_drive(tmp_path, "nvme1", "", "Unnamed", nvme1n1=8)
    assert found_drives(tmp_path) == (
        Drive("/dev/nvme0", "S0", "Dual port", 4096),
        Drive("/dev/nvme2", "S2", "Boot drive", 30 * 512),
        Drive("/dev/nvme3", "S3", "No namespace", None),
        Drive("/dev/nvme10", "S10", "NGD Newport", 512_000),
    )


def test_empty_probe_output_is_not_a_machine_without_drives() -> None:
    with pytest.raises(ValueError, match="no output"):
        parse_nvme("")
