"""Which machines share measurements, and which do not."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csdctl.fleet.facts import Facts
from csdctl.fleet.hardware import classify_fleet, classify_machine, round_memory_up

GIB = 1 << 30
CSD = Facts(
    "csd0",
    architecture="aarch64",
    cpu_model="Cortex-A53",
    cpu_features=("asimd", "fp"),
    num_cores=4,
    memory_bytes=int(5.78 * GIB),
    memory_available_bytes=5 * GIB,
    python_version="3.11.7",
    tensorflow_version="2.21.0",
    keras_version="3.15.1",
    numpy_version="2.1.0",
)


def key(**changes: object) -> str:
    return classify_machine(replace(CSD, **changes)).key  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "csd7", "home": "/elsewhere", "clock_offset_s": 3.0, "notes": ("slow clock",)},
        {"memory_available_bytes": 1 * GIB, "disk_free_bytes": 5},
        {"memory_bytes": int(5.71 * GIB)},
        {"cpu_features": ("fp", "asimd")},
        {"python_version": "3.11.9"},
    ],
)
def test_changing_values_do_not_split_a_class(changes: dict[str, object]) -> None:
    assert key(**changes) == key()


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_limit": 0.22},
        {"num_cores": 2},
        {"cpu_model": "Cortex-A72"},
        {"cpu_features": ("asimd", "asimddp", "fp")},
        {"memory_limit_bytes": 2 * GIB},
        {"architecture": "x86_64"},
        {"python_version": "3.12.7"},
        {"tensorflow_version": "2.20.0"},
        {"keras_version": "3.14.0"},
        {"numpy_version": "2.2.0"},
    ],
)
def test_other_hardware_limits_or_software_is_another_class(changes: dict[str, object]) -> None:
    assert key(**changes) != key()


def test_two_cpu_limits_are_two_classes() -> None:
    assert key(cpu_limit=0.22) != key(cpu_limit=0.25)


def test_emulated_machines_have_their_own_classes_by_number_of_nodes() -> None:
    keys = {classify_machine(CSD, num_emulated=number).key for number in (0, 2, 4)}
    assert len(keys) == 3
    assert "emulated with 4 nodes" in classify_machine(CSD, num_emulated=4).name


def test_unknown_machine_has_a_class() -> None:
    nothing = classify_machine(Facts("csd0"))
    assert nothing.name == "?, ? cores"
    assert nothing.key == classify_machine(Facts("csd1")).key


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (CSD, "aarch64 Cortex-A53, 4 cores, 6 GiB"),
        (
            Facts(
                "a",
                architecture="x86_64",
                cpu_model="Intel(R) Xeon(R) CPU @ 2.90GHz",
                num_cores=1,
                cpu_limit=0.22,
            ),
            "x86_64 Intel Xeon @ 2.90GHz, 1 core, 0.22 CPU",
        ),
    ],
)
def test_name_is_short(facts: Facts, name: str) -> None:
    assert classify_machine(facts).name == name


def test_key_is_the_same_in_another_process() -> None:
    program = "from csdctl.fleet import facts, hardware as m; "
    program += "print(m.classify_machine(facts.Facts('a', cpu_features=('x', 'y', 'z'), cpu_limit=0.1)).key)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    facts = Facts("a", cpu_features=("x", "y", "z"), cpu_limit=0.1)
    assert done.stdout.strip() == classify_machine(facts).key


class TestFleets:
    def test_number_and_order_of_nodes_do_not_matter(self) -> None:
        host, one, two = (classify_machine(replace(CSD, num_cores=cores)) for cores in (8, 4, 2))
        assert classify_fleet(host, [one, two, one], "").key == classify_fleet(host, [two, one], "").key

    def test_host_node_classes_and_network_matter(self) -> None:
        host, one, two = (classify_machine(replace(CSD, num_cores=cores)) for cores in (8, 4, 2))
        fleets = [
            classify_fleet(host, [one], ""),
            classify_fleet(one, [host], ""),
            classify_fleet(host, [two], ""),
            classify_fleet(host, [one, two], ""),
            classify_fleet(host, [one], "10.1.1.0/24"),
        ]
        assert len({fleet.key for fleet in fleets}) == len(fleets)


@given(st.integers(min_value=1, max_value=2**50))
def test_memory_is_rounded_up_by_a_quarter_at_most(num_bytes: int) -> None:
    rounded = round_memory_up(num_bytes)
    assert num_bytes <= rounded <= num_bytes * 1.25 or num_bytes < 4
    assert round_memory_up(rounded) == rounded


@given(st.sampled_from([2, 4, 6, 8, 16, 24, 32, 64]), st.floats(0.9, 1.0), st.floats(0.9, 1.0))
def test_equal_machines_round_to_the_same_memory(gib: int, one: float, two: float) -> None:
    assert round_memory_up(int(gib * GIB * one)) == round_memory_up(int(gib * GIB * two)) == gib * GIB
