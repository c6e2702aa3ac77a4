"""The history: what goes in comes out, for several processes, and whatever happens to its file."""

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError, DamagedMeasurementsError, DeadlineError, InputError
from csdctl.fleet.facts import Facts
from csdctl.fleet.machine_class import classify_fleet, classify_machine
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import MeasurementStore, open_measurements, open_measurements_to_write
from csdctl.runs.measurements_file import SCHEMA, MeasurementsFile, set_measurements_aside
from csdctl.runs.measurements_rows import NUM_KEPT
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelFeatures,
    ProbeMeasurement,
    RuntimeSettings,
    TrialMeasurement,
    TrialRank,
)

MODEL = ModelFeatures("a" * 64, "keras.applications:MobileNetV2", 2_000_000, 1_900_000, 50_000_000, 12_288)
OTHER = replace(MODEL, hash="b" * 64, name="/srv/mine.py:build", num_operations=100_000_000)
FAR = replace(MODEL, hash="c" * 64, name="far.keras", num_operations=5_000_000_000)
CSD = classify_machine(Facts("csd0", architecture="aarch64", num_cores=4, memory_bytes=6 << 30))
HOST = classify_machine(Facts("host", architecture="x86_64", num_cores=8, memory_bytes=32 << 30))
FLEET = classify_fleet(HOST, [CSD, CSD], "10.1.1.0/24")
SETTINGS = RuntimeSettings(threads=4)
PROBES = [
    ProbeMeasurement(SETTINGS, 8, 1000.0, 0.5, 3, 300 << 20),
    ProbeMeasurement(SETTINGS, 16, 1001.0, 0.9, 3, None),
    ProbeMeasurement(SETTINGS, 512, 1002.0, None),
    ProbeMeasurement(RuntimeSettings(2, 2, False, 8), 16, 1003.25, 1.1, 5, 1 << 40),
]
TRIAL = TrialMeasurement(
    (TrialRank(HOST.key, 64, SETTINGS), TrialRank(CSD.key, 8, SETTINGS)), 0.5, 144.0, 1010.0, 150.0
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return ProjectDirectory(tmp_path).measurements


@pytest.fixture
def history(path: Path) -> Iterator[MeasurementStore]:
    with open_measurements(path) as opened:
        yield opened


class TestProbes:
    def test_probes_come_out_as_they_went_in(self, path: Path, history: MeasurementStore) -> None:
        history.add_probes(MODEL, "recipe", CSD, PROBES[:2])
        history.add_probes(MODEL, "recipe", CSD, PROBES[2:])
        with open_measurements(path) as other:
            assert other.probes(MODEL.hash, "recipe", CSD.key) == PROBES
            assert other.models() == [MODEL]

    def test_probe_that_did_not_fit_is_kept(self, history: MeasurementStore) -> None:
        history.add_probes(MODEL, "recipe", CSD, PROBES)
        assert [one.fits for one in history.probes(MODEL.hash, "recipe", CSD.key)] == [
            True,
            True,
            False,
            True,
        ]

    def test_other_model_recipe_machine_or_settings_are_not_taken_for_it(
        self, history: MeasurementStore
    ) -> None:
        history.add_probes(MODEL, "recipe", CSD, PROBES)
        assert history.probes(OTHER.hash, "recipe", CSD.key) == []
        assert history.probes(MODEL.hash, "other", CSD.key) == []
        assert history.probes(MODEL.hash, "recipe", HOST.key) == []

    def test_only_the_newest_of_one_size_and_settings_are_kept(self, history: MeasurementStore) -> None:
        many = [replace(PROBES[0], measured_at=float(k)) for k in range(NUM_KEPT + 7)]
        history.add_probes(MODEL, "recipe", CSD, [*many, PROBES[1]])
        kept = history.probes(MODEL.hash, "recipe", CSD.key)
        assert kept == [*many[7:], PROBES[1]]

    def test_what_is_known_of_a_model_is_replaced(self, history: MeasurementStore) -> None:
        history.add_probes(replace(MODEL, num_operations=0), "recipe", CSD, PROBES)
        history.add_probes(MODEL, "recipe", HOST, PROBES)
        assert history.models() == [MODEL]


class TestNeighbours:
    def test_nearest_come_first_with_their_probes(self, history: MeasurementStore) -> None:
        for model in (FAR, MODEL, OTHER):
            history.add_probes(model, "recipe", CSD, PROBES)
        found = history.neighbours(MODEL, "recipe", CSD.key)
        assert [(one.model, one.recipe) for one in found] == [(OTHER, "recipe"), (FAR, "recipe")]
        assert 0 < found[0].distance < found[1].distance
        assert found[0].probes == tuple(PROBES)

    def test_same_model_with_another_recipe_is_the_nearest(self, history: MeasurementStore) -> None:
        history.add_probes(MODEL, "adam", CSD, PROBES)
        history.add_probes(OTHER, "recipe", CSD, PROBES)
        found = history.neighbours(MODEL, "recipe", CSD.key, limit=1)
        assert [(one.model, one.recipe, one.distance) for one in found] == [(MODEL, "adam", 0.0)]

    def test_other_machines_and_what_never_fitted_tell_nothing(self, history: MeasurementStore) -> None:
        history.add_probes(OTHER, "recipe", HOST, PROBES)
        history.add_probes(FAR, "recipe", CSD, [PROBES[2]])
        assert history.neighbours(MODEL, "recipe", CSD.key) == []

    def test_equally_near_ones_have_a_fixed_order(self, history: MeasurementStore) -> None:
        for letter in "dcbe":
            history.add_probes(replace(MODEL, hash=letter * 64), "recipe", CSD, PROBES)
        found = history.neighbours(MODEL, "recipe", CSD.key, limit=4)
        assert [one.model.hash[0] for one in found] == ["b", "c", "d", "e"]


class TestCollectivesAndTrials:
    def test_sums_come_out_as_they_went_in(self, history: MeasurementStore) -> None:
        star, ring = (
            CollectiveMeasurement("star", 5, 1 << 20, 0.25, 2.0),
            CollectiveMeasurement("ring", 5, 1 << 20, 0.125, 1.0),
        )
        history.add_collectives(FLEET, [star, ring])
        assert history.collectives(FLEET.key) == [ring, star]
        assert history.collectives("other") == []

    def test_trials_come_out_as_they_went_in(self, history: MeasurementStore) -> None:
        history.add_trial(MODEL, "recipe", FLEET, TRIAL)
        history.add_trial(
            MODEL, "recipe", FLEET, replace(TRIAL, predicted_samples_per_s=None, measured_at=1.0)
        )
        found = history.trials(MODEL.hash, "recipe", FLEET.key)
        assert found == [replace(TRIAL, predicted_samples_per_s=None, measured_at=1.0), TRIAL]
        assert history.trials(MODEL.hash, "other", FLEET.key) == []


class TestForgetting:
    def test_one_model_is_forgotten_and_the_others_stay(self, history: MeasurementStore) -> None:
        history.add_probes(MODEL, "recipe", CSD, PROBES)
        history.add_probes(OTHER, "recipe", CSD, PROBES)
        history.add_trial(MODEL, "recipe", FLEET, TRIAL)
        history.add_collectives(FLEET, [CollectiveMeasurement("star", 5, 1, 0.1, 1.0)])
        gone = history.forget(history.find_models("MobileNetV2"))
        assert (gone.num_probes, gone.num_trials, gone.num_collectives) == (4, 1, 0)
        assert history.models() == [OTHER]
        assert history.collectives(FLEET.key)

    def test_everything_is_forgotten(self, path: Path, history: MeasurementStore) -> None:
        history.add_probes(MODEL, "recipe", CSD, PROBES)
        history.add_collectives(FLEET, [CollectiveMeasurement("star", 5, 1, 0.1, 1.0)])
        assert history.forget(None).num_collectives == 1
        assert history.models() == []
        assert b"MobileNetV2" not in path.read_bytes()

    @pytest.mark.parametrize("wanted", ["MobileNetV2", MODEL.name, "aaaaaaaa"])
    def test_model_is_found_by_short_name_whole_name_or_hash(
        self, history: MeasurementStore, wanted: str
    ) -> None:
        history.add_probes(MODEL, "recipe", CSD, PROBES)
        history.add_probes(OTHER, "recipe", CSD, PROBES)
        assert history.find_models(wanted) == [MODEL]

    @pytest.mark.parametrize("wanted", ["aaa", "mobilenetv2", "%", ""])
    def test_unknown_model_is_told_with_the_known_ones(self, history: MeasurementStore, wanted: str) -> None:
        history.add_probes(OTHER, "recipe", CSD, PROBES)
        with pytest.raises(InputError, match="no model") as raised:
            history.find_models(wanted)
        assert "mine.py:build" in raised.value.remedy


KILLED = """
import os, signal, sys
from pathlib import Path
from csdctl.runs.measurements_file import MeasurementsFile
file = MeasurementsFile(Path(sys.argv[1]))
with file.writing() as connection:
    connection.execute("PRAGMA cache_spill = 1")
    connection.execute("PRAGMA cache_size = 1")
    connection.executemany("INSERT INTO models VALUES (?, 'x', 0, 0, 0, 0)", [(str(k),) for k in range(9999)])
    os.kill(os.getpid(), signal.SIGKILL)
"""
WRITER = """
import sys
from pathlib import Path
from dataclasses import replace
from csdctl.runs.measurements import open_measurements
from tests.unit.runs.test_measurements import CSD, MODEL, PROBES
who = int(sys.argv[2])
for number in range(20):
    with open_measurements(Path(sys.argv[1])) as history:
        history.add_probes(MODEL, "recipe", CSD, [replace(PROBES[0], batch_size=who, num_steps=number)])
"""


class TestSeveralProcesses:
    def test_all_of_what_two_processes_write_is_kept(self, path: Path) -> None:
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), str(who)], cwd=Path(__file__).parents[3]
            )
            for who in (1, 2)
        ]
        assert [writer.wait(120) for writer in writers] == [0, 0]
        with open_measurements(path) as history:
            known = history.probes(MODEL.hash, "recipe", CSD.key)
        assert sorted((one.batch_size, one.num_steps) for one in known) == [
            (who, number) for who in (1, 2) for number in range(20)
        ]
        assert [file.name for file in path.parent.iterdir()] == [path.name]

    def test_reader_sees_nothing_of_what_another_has_not_finished(
        self, path: Path, history: MeasurementStore
    ) -> None:
        writer = MeasurementsFile(path)
        with writer.writing() as connection:
            connection.execute("INSERT INTO models VALUES ('x', 'x', 0, 0, 0, 0)")
            assert history.models() == []
        writer.close()
        assert [one.hash for one in history.models()] == ["x"]

    def test_what_fails_half_way_is_not_kept(self, path: Path, history: MeasurementStore) -> None:
        unusable = replace(PROBES[1], batch_size=None)  # type: ignore[arg-type]
        with pytest.raises(sqlite3.IntegrityError):
            history.add_probes(MODEL, "recipe", CSD, [PROBES[0], unusable])
        assert history.models() == []

    def test_what_a_killed_csdctl_has_half_written_is_undone(
        self, path: Path, history: MeasurementStore
    ) -> None:
        history.add_probes(MODEL, "recipe", CSD, PROBES)
        size = path.stat().st_size
        subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
        assert path.stat().st_size > size
        assert path.with_name("measurements.sqlite-journal").exists()
        assert history.models() == [MODEL]
        assert history.probes(MODEL.hash, "recipe", CSD.key) == PROBES

    def test_waiting_for_another_writer_has_an_end(self, path: Path, history: MeasurementStore) -> None:
        waiting = MeasurementsFile(path, deadline_s=0.05)
        with history.file.writing(), pytest.raises(DeadlineError, match="in use by another csdctl"):
            MeasurementStore(waiting).add_probes(MODEL, "recipe", CSD, PROBES)
        waiting.close()


def said_when_measuring(path: Path) -> list[str]:
    """What `tune` would say of the history at `path`; it can write, whatever is there."""
    said: list[str] = []
    with open_measurements_to_write(path, said.append) as history:
        history.add_probes(MODEL, "recipe", CSD, PROBES)
        assert set(PROBES) <= set(history.probes(MODEL.hash, "recipe", CSD.key))
    return said


class TestTroubles:
    def test_history_of_a_newer_csdctl_is_left_alone(self, path: Path, history: MeasurementStore) -> None:
        history.add_probes(MODEL, "recipe", CSD, PROBES)
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
        connection.close()
        content = path.read_bytes()
        with (
            pytest.raises(InputError, match=f"schema {SCHEMA + 1}, a newer csdctl") as raised,
            open_measurements(path),
        ):
            pass
        assert "--forget all" in raised.value.remedy
        assert "going on without the history" in said_when_measuring(path)[0]
        assert path.read_bytes() == content

    @pytest.mark.fault(36)
    @pytest.mark.parametrize("content", [b"no database at all " * 300, b"SQLite format 3\0" + bytes(5000)])
    def test_file_that_is_no_history_is_told_and_set_aside_by_whoever_measures(
        self, path: Path, content: bytes
    ) -> None:
        path.parent.mkdir()
        path.write_bytes(content)
        with (
            pytest.raises(DamagedMeasurementsError, match="not a history that can be read"),
            open_measurements(path),
        ):
            pass
        (said,) = said_when_measuring(path)
        assert "kept as measurements.sqlite.bak" in said
        assert path.with_name("measurements.sqlite.bak").read_bytes() == content
        assert said_when_measuring(path) == []

    @pytest.mark.fault(36)
    def test_history_cut_short_is_told(self, path: Path) -> None:
        said_when_measuring(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(DamagedMeasurementsError), open_measurements(path):
            pass
        assert "begun anew" in said_when_measuring(path)[0]

    @pytest.mark.fault(36)
    def test_journal_of_a_damaged_history_is_set_aside_with_it(self, path: Path) -> None:
        path.parent.mkdir()
        path.write_bytes(b"no database at all")
        path.with_name("measurements.sqlite-journal").write_bytes(b"its journal")
        assert set_measurements_aside(path).read_bytes() == b"no database at all"
        assert sorted(file.name for file in path.parent.iterdir()) == [
            "measurements.sqlite.bak",
            "measurements.sqlite.bak-journal",
        ]

    def test_table_that_is_missing_does_not_stop_measuring(
        self, path: Path, history: MeasurementStore
    ) -> None:
        with history.file.writing() as connection:
            connection.execute("DROP TABLE collectives")
        said: list[str] = []
        with open_measurements_to_write(path, said.append) as lenient:
            assert lenient.collectives(FLEET.key) == []
            lenient.add_collectives(FLEET, [CollectiveMeasurement("star", 5, 1, 0.1, 1.0)])
        assert [one.partition(":")[0] for one in said] == [
            "the history is not used",
            "not kept in the history",
        ]
        with pytest.raises(CsdctlError, match="no such table"):
            history.collectives(FLEET.key)

    def test_database_of_another_program_is_not_written_to(self, path: Path) -> None:
        path.parent.mkdir()
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE theirs (value)")
        connection.close()
        with pytest.raises(DamagedMeasurementsError, match="another program's"), open_measurements(path):
            pass

    @pytest.mark.fault(25)
    def test_full_disk_leaves_the_history_as_it_was(self, path: Path, history: MeasurementStore) -> None:
        history.add_probes(MODEL, "recipe", CSD, PROBES)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        many = [replace(PROBES[0], batch_size=size) for size in range(1, 2000)]
        said: list[str] = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4096, limits[1]))
        try:
            with pytest.raises(CsdctlError, match="cannot be used") as raised:
                history.add_probes(MODEL, "recipe", CSD, many)
            MeasurementStore(history.file, said.append).add_probes(MODEL, "recipe", CSD, many)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "make room" in raised.value.remedy
        assert "not kept in the history" in said[0]
        assert history.probes(MODEL.hash, "recipe", CSD.key) == PROBES

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_directory_that_cannot_be_written_to_does_not_stop_measuring(self, path: Path) -> None:
        path.parent.mkdir(mode=0o500)
        assert "going on without the history" in said_when_measuring(path)[0]

    def test_directory_at_its_place_does_not_stop_measuring(self, path: Path) -> None:
        path.mkdir(parents=True)
        assert "going on without the history" in said_when_measuring(path)[0]
