"""What the facts of a machine can be, whether the machine says it or the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from csdctl.errors import InputError
from csdctl.fleet.facts import Condition, Drive, Facts, facts_path, load_facts, save_facts
from csdctl.fleet.model import Fleet, Node

GOOD: dict[str, Any] = {
    "architecture": "x86_64",
    "cpu_model": "Intel(R) Xeon(R) CPU @ 2.20GHz [very] “fast” 中",
    "cpu_features": ("avx", "sse4_2"),
    "num_cores": 8,
    "cpu_limit": 0.25,
    "memory_bytes": 8 << 30,
    "disk_free_bytes": 0,
    "python_version": "3.11.0rc1+local",
    "tensorflow_version": "2.21.0",
    "glibc_version": "2.36",
    "prefix": "/home/pi/my venv",
    "has_prted": False,
    "clock_offset_s": -1_700_000_000.0,
    "drives": (Drive("/dev/nvme0", "S [1]", "CSD", None),),
    "notes": ("anything",),
}
BAD: list[tuple[str, Any]] = [
    ("architecture", "x86 64"),
    ("cpu_model", "A" * 129),
    ("cpu_features", ("avx",) * 1001),
    ("num_cores", 0),
    ("num_cores", "4"),
    ("num_cores", 10**30),
    ("cpu_limit", float("nan")),
    ("memory_bytes", 0),
    ("disk_free_bytes", -1),
    ("python_version", "[/bold]"),
    ("mpi_version", "\x1b[2J"),
    ("prefix", "relative"),
    ("home", "/" + "a" * 5000),
    ("has_prted", "yes"),
    ("clock_offset_s", 1e12),
    ("limits", (("open files", -1),)),
    ("drives", ({"device": "/dev/nvme0", "serial": "S", "size_bytes": -1},)),
]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("addresses", ("999.1.1.1",)),
        ("home_space", {"path": "a\x1b"}),
        ("home_space", {"path": "/tmp", "free_bytes": -1}),
        ("home_space", {"path": "/tmp", "free_inodes": 1 << 70}),
    ],
)
def test_condition_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        Condition("csd0", **{field: value})


@pytest.mark.parametrize(("field", "value"), BAD)
def test_fact_out_of_range_is_refused_and_named_in_a_damaged_file(
    tmp_path: Path, field: str, value: Any
) -> None:
    with pytest.raises(ValidationError):
        Facts("csd0", **{field: value})
    fleet = Fleet((Node("csd0", "10.0.0.1"),), path=tmp_path / "fleet.yaml")
    save_facts(fleet, {"csd0": Facts("csd0", **GOOD)})
    assert load_facts(fleet) == {"csd0": Facts("csd0", **GOOD)}
    content = json.loads(facts_path(fleet).read_text())
    content["machines"]["csd0"][field] = value
    facts_path(fleet).write_text(json.dumps(content))
    # No document may have NaN, or numbers of many digits: those are refused before the field is known.
    words = f"csd0.{field}|not a finite number|a number of 31 digits"
    with pytest.raises(InputError, match=words) as raised:
        load_facts(fleet)
    assert len(raised.value.message) < 400
