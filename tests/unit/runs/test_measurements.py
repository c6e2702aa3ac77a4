"""The measurements file: reads return what was written, with several processes and unusable files."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError
from csdctl.fleet.facts import Facts
from csdctl.fleet.hardware import classify_fleet, classify_machine
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import NUM_NEWEST, PROBE, SUM, TRIAL, MeasurementStore
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelProperties,
    ProbeMeasurement,
    TrialMeasurement,
    TrialRank,
)
from csdctl.worker.protocol.run_spec import Runtime
from tests.full_disk import full_disk

MODEL = ModelProperties("a" * 64, "keras.applications:MobileNetV2", 1_900_000)
OTHER = replace(MODEL, hash="b" * 64, name="/srv/mine.py:build")
CSD = classify_machine(Facts("csd0", architecture="aarch64", num_cores=4, memory_bytes=6 << 30))
HOST = classify_machine(Facts("host", architecture="x86_64", num_cores=8, memory_bytes=32 << 30))
FLEET = classify_fleet(HOST, [CSD, CSD], "10.1.1.0/24")
SMALL_FLEET = classify_fleet(HOST, [HOST], "10.1.1.0/24")
SETTINGS = Runtime(threads=4)
PROBES = [
    ProbeMeasurement(8, 0.5, 300 << 20, settings=SETTINGS, measured_at=1000.0),
    ProbeMeasurement(16, 0.9, None, settings=SETTINGS, measured_at=1001.0),
    ProbeMeasurement(512, None, is_oom_kill=True, settings=SETTINGS, measured_at=1002.0),
    ProbeMeasurement(16, 1.1, 1 << 40, settings=Runtime(2, 2, False), measured_at=1003.25),
]
TRIED = TrialMeasurement(
    (TrialRank(HOST.key, 64, SETTINGS), TrialRank(CSD.key, 8, SETTINGS)), 0.5, 144.0, 1010.0, 150.0
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return ProjectDirectory(tmp_path).measurements


@pytest.fixture
def store(path: Path) -> MeasurementStore:
    return MeasurementStore(path)


class TestProbes:
    def test_probes_are_read_back_by_model_recipe_and_machine(
        self, path: Path, store: MeasurementStore
    ) -> None:
        store.add(PROBE, CSD, PROBES[:2], MODEL, "recipe")
        store.add(PROBE, CSD, PROBES[2:], MODEL, "recipe")
        other = MeasurementStore(path)
        assert other.find(PROBE, CSD.key, MODEL.hash, "recipe") == PROBES
        assert other.find(PROBE, CSD.key, OTHER.hash, "recipe") == []
        assert other.find(PROBE, CSD.key, MODEL.hash, "other") == []
        assert other.find(PROBE, HOST.key, MODEL.hash, "recipe") == []


def test_measurement_with_another_digit_is_left_out(path: Path, store: MeasurementStore) -> None:
    store.add(PROBE, CSD, PROBES[:2], MODEL, "recipe")
    path.write_text(path.read_text().replace('"step_time_s": 0.5', '"step_time_s": 0.1'))
    said: list[str] = []
    assert MeasurementStore(path, said.append).find(PROBE, CSD.key, MODEL.hash, "recipe") == PROBES[1:2]
    assert said == [f"{path}: lines that are damaged or of another version are ignored: 1"]


class TestCollectivesAndTrials:
    def test_sums_and_trials_are_read_back(self, store: MeasurementStore) -> None:
        later = CollectiveMeasurement(5, 1 << 20, 0.25, 2.0)
        sooner = replace(later, num_ranks=3, measured_at=1.0)
        store.add(SUM, FLEET, [later, sooner])
        assert store.find(SUM, FLEET.key) == [sooner, later]
        assert store.find(SUM, "other") == []
        earlier = replace(TRIED, predicted_samples_per_s=None, measured_at=1.0)
        store.add(TRIAL, FLEET, [TRIED], MODEL, "recipe")
        store.add(TRIAL, FLEET, [earlier], MODEL, "recipe")
        assert store.find(TRIAL, FLEET.key, MODEL.hash, "recipe") == [earlier, TRIED]
        assert store.find(TRIAL, FLEET.key, MODEL.hash, "other") == []
        assert store.find(TRIAL, FLEET.key, OTHER.hash, "recipe") == []
        assert store.find(TRIAL, SMALL_FLEET.key, MODEL.hash, "recipe") == []

    def test_only_the_newest_sums_of_a_kind_and_trials_of_a_model_are_used(
        self, store: MeasurementStore
    ) -> None:
        first = CollectiveMeasurement(5, 1 << 20, 0.25, 0.0)
        others = [replace(first, num_ranks=3), replace(first, num_bytes=8)]
        many = [replace(first, measured_at=float(number)) for number in range(NUM_NEWEST + 3)]
        store.add(SUM, FLEET, [*others, *many])
        store.add(SUM, SMALL_FLEET, [first])
        assert sorted(store.find(SUM, FLEET.key), key=repr) == sorted([*others, *many[3:]], key=repr)
        assert store.find(SUM, SMALL_FLEET.key) == [first]
        for number in range(NUM_NEWEST + 3):
            store.add(TRIAL, FLEET, [replace(TRIED, measured_at=float(number))], MODEL, "recipe")
        store.add(TRIAL, FLEET, [replace(TRIED, measured_at=0.0)], MODEL, "adam")
        kept = [trial.measured_at for trial in store.find(TRIAL, FLEET.key, MODEL.hash, "recipe")]
        assert kept == [float(number) for number in range(3, NUM_NEWEST + 3)]
        assert len(store.find(TRIAL, FLEET.key, MODEL.hash, "adam")) == 1


def test_file_keeps_what_is_used_however_often_the_same_is_measured(path: Path) -> None:
    other = replace(TRIED, measured_at=0.0)
    MeasurementStore(path).add(TRIAL, FLEET, [other], OTHER, "recipe")
    times = [float(number) for number in range(5 * NUM_NEWEST)]
    for time_s in times:
        MeasurementStore(path).add(TRIAL, FLEET, [replace(TRIED, measured_at=time_s)], MODEL, "recipe")
        assert len(path.read_bytes().splitlines()) <= 2 * (NUM_NEWEST + 1) + 2
    store = MeasurementStore(path)
    kept = [trial.measured_at for trial in store.find(TRIAL, FLEET.key, MODEL.hash, "recipe")]
    assert kept == times[-NUM_NEWEST:]
    assert store.find(TRIAL, FLEET.key, OTHER.hash, "recipe") == [other]


def test_store_that_has_not_read_the_file_removes_nothing_from_it(
    path: Path, store: MeasurementStore
) -> None:
    store.add(TRIAL, FLEET, [TRIED], OTHER, "recipe")
    many = [replace(TRIED, measured_at=float(number)) for number in range(3 * NUM_NEWEST)]
    MeasurementStore(path, is_fresh=True).add(TRIAL, FLEET, many, MODEL, "recipe")
    assert MeasurementStore(path).find(TRIAL, FLEET.key, OTHER.hash, "recipe") == [TRIED]
    foreign = b'{"kind": "later"}\n'
    path.write_bytes(foreign)
    MeasurementStore(path).add(TRIAL, FLEET, many, MODEL, "recipe")
    assert path.read_bytes().startswith(foreign)


WRITER = """
import sys
from pathlib import Path
from dataclasses import replace
from csdctl.runs.measurements import PROBE, MeasurementStore
from tests.unit.runs.test_measurements import CSD, MODEL, PROBES
who = int(sys.argv[2])
for number in range(20):
    store = MeasurementStore(Path(sys.argv[1]))
    store.add(PROBE, CSD, [replace(PROBES[0], batch_size=who, peak_memory_bytes=number)], MODEL, "recipe")
"""


def test_writes_of_two_processes_are_all_kept(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(who)], cwd=Path(__file__).parents[3])
        for who in (1, 2)
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    store = MeasurementStore(path)
    known = store.find(PROBE, CSD.key, MODEL.hash, "recipe")
    assert sorted((probe.batch_size, probe.peak_memory_bytes) for probe in known) == [
        (who, number) for who in (1, 2) for number in range(20)
    ]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def messages_when_measuring(path: Path) -> list[str]:
    """Return what `tune` would print about the measurements at `path`, which it can replace."""
    messages: list[str] = []
    store = MeasurementStore(path, messages.append, is_optional=True)
    store.add(PROBE, CSD, PROBES, MODEL, "recipe")
    assert set(PROBES) <= set(store.find(PROBE, CSD.key, MODEL.hash, "recipe"))
    return messages


class TestUnusableFiles:
    @pytest.mark.fault(36)
    @pytest.mark.parametrize(
        "damage",
        [b"\nno measurement", b'\n{"kind": "probe", "mod', b'\n{"kind": "later"}', b"\n[7]", b"\n\xff"],
    )
    def test_damaged_and_foreign_lines_are_left_out_with_one_message(self, path: Path, damage: bytes) -> None:
        assert messages_when_measuring(path) == []
        path.write_bytes(path.read_bytes() + damage)
        (message,) = messages_when_measuring(path)
        assert "damaged or of another version are ignored: 1" in message
        assert len(MeasurementStore(path).find(PROBE, CSD.key, MODEL.hash, "recipe")) == 2 * len(PROBES)

    @pytest.mark.fault(36)
    @pytest.mark.parametrize("number", ["NaN", "-0.5", "1e300", "Infinity"])
    def test_impossible_measurements_are_left_out(self, path: Path, number: str) -> None:
        messages_when_measuring(path)
        first = path.read_text().splitlines()[0]
        damaged = re.sub(r'"step_time_s": [\d.e-]+', f'"step_time_s": {number}', first)
        assert damaged != first
        path.write_text(f"{path.read_text()}{damaged}\n")
        (message,) = messages_when_measuring(path)
        assert "damaged or of another version are ignored: 1" in message

    @pytest.mark.fault(25)
    def test_full_disk_leaves_what_was_measured_before(self, path: Path, store: MeasurementStore) -> None:
        store.add(PROBE, CSD, PROBES, MODEL, "recipe")
        many = [replace(PROBES[0], batch_size=size) for size in range(1, 2000)]
        messages: list[str] = []
        optional = MeasurementStore(path, messages.append, is_optional=True)
        with full_disk(path.stat().st_size + 100):
            with pytest.raises(CsdctlError, match="measurements are not stored") as raised:
                store.add(PROBE, CSD, many, MODEL, "recipe")
            optional.add(PROBE, CSD, many, MODEL, "recipe")
        assert "free some disk space" in raised.value.remedy
        assert "measurements are not stored" in messages[0]
        MeasurementStore(path).add(PROBE, CSD, PROBES[:1], MODEL, "recipe")
        found = MeasurementStore(path).find(PROBE, CSD.key, MODEL.hash, "recipe")
        assert found == [PROBES[0], *PROBES]

    def test_directory_in_place_of_the_file_does_not_stop_measuring(self, path: Path) -> None:
        path.mkdir(parents=True)
        first, *_ = messages_when_measuring(path)
        assert "earlier measurements are not used" in first
        with pytest.raises(CsdctlError, match="earlier measurements are not used") as raised:
            MeasurementStore(path)
        assert "readable" in raised.value.remedy
