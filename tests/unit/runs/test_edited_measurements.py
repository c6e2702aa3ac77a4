"""A measurements file that was edited, or comes from a stranger."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from csdctl.errors import CsdctlError, DamagedMeasurementsError, InputError
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import MeasurementStore, open_measurements
from csdctl.runs.measurements_file import MAX_FILE_BYTES, MeasurementsFile
from csdctl.runs.measurements_overview import load_overview
from csdctl.tuning.measurements import CollectiveMeasurement
from tests.unit.runs.test_measurements import CSD, FLEET, MODEL, PROBES, TRIAL, messages_when_measuring


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return ProjectDirectory(tmp_path).measurements


@pytest.fixture
def store(path: Path) -> Iterator[MeasurementStore]:
    with open_measurements(path) as opened:
        yield opened


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE collectives",
        "CREATE VIEW spare AS SELECT 1",
        "CREATE TRIGGER spare AFTER INSERT ON probes BEGIN DELETE FROM models; END",
        "ALTER TABLE models ADD COLUMN spare",
        "DROP INDEX probes_of_a_class",
    ],
)
def test_other_tables_are_reported_and_set_aside_by_tune(
    path: Path, store: MeasurementStore, statement: str
) -> None:
    with store.file.writing() as connection:
        connection.execute(statement)
    with (
        pytest.raises(DamagedMeasurementsError, match="its tables are not those of csdctl"),
        open_measurements(path),
    ):
        pass
    assert "replaced by a new file" in messages_when_measuring(path)[0]


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("probes", "batch_size", -8),
        ("probes", "batch_size", 10**12),
        ("probes", "batch_size", "many"),
        ("probes", "step_time_s", 0.0),
        ("probes", "step_time_s", float("inf")),
        ("probes", "step_time_s", "x"),
        ("probes", "threads", 0),
        ("probes", "measured_at", -1.0),
        ("probes", "peak_memory_bytes", b"blob"),
        ("probes", "model", "of nobody"),
        ("models", "num_operations", -1),
        ("models", "name", "x" * 5000),
        ("collectives", "seconds", -0.1),
        ("collectives", "num_ranks", 0),
        ("trials", "step_s", float("inf")),
        ("trials", "samples_per_s", -1),
    ],
)
def test_value_that_nobody_measured_is_named(
    path: Path, store: MeasurementStore, table: str, column: str, value: object
) -> None:
    store.add_probes(MODEL, "recipe", CSD, PROBES)
    store.add_trial(MODEL, "recipe", FLEET, TRIAL)
    store.add_collectives(FLEET, [CollectiveMeasurement("star", 5, 1, 0.1, 1.0)])
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
    with (
        pytest.raises(DamagedMeasurementsError, match=f"row 1 of {table} has .*`{column}`"),
        open_measurements(path),
    ):
        pass
    assert "replaced by a new file" in messages_when_measuring(path)[0]


def test_name_that_was_changed_in_one_place_is_found(path: Path, store: MeasurementStore) -> None:
    """The table and its index each have the hash of the model, and so has every probe."""
    store.add_probes(MODEL, "recipe", CSD, PROBES)
    store.file.close()
    whole, name = path.read_bytes(), MODEL.hash.encode()
    places = [number for number in range(len(whole)) if whole.startswith(name, number)]
    assert len(places) > 2
    for place in places:
        path.write_bytes(whole[:place] + b"f" + whole[place + 1 :])
        with pytest.raises(DamagedMeasurementsError), open_measurements(path) as opened:
            load_overview(opened.file)


def test_schema_that_is_not_utf8_is_damaged(path: Path, store: MeasurementStore) -> None:
    store.file.close()
    path.write_bytes(path.read_bytes().replace(b"indextrials", b"index\xa7rials"))
    with pytest.raises(DamagedMeasurementsError, match="not a readable measurements file"):
        MeasurementsFile(path)


@pytest.mark.parametrize("content", ["", "5", "{}", "[" * 5000, '{"architecture": 5}'])
def test_edited_machine_class_is_reported(path: Path, store: MeasurementStore, content: str) -> None:
    store.add_probes(MODEL, "recipe", CSD, PROBES)
    store.add_trial(MODEL, "recipe", FLEET, TRIAL)
    for table, column in (
        ("machine_classes", "content"),
        ("fleet_classes", "content"),
        ("trials", "ranks"),
    ):
        with store.file.writing() as connection:
            connection.execute(f"UPDATE {table} SET {column} = ?", (content,))
        with pytest.raises(InputError):
            load_overview(store.file)


def test_large_file_and_device_are_refused(path: Path) -> None:
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(DamagedMeasurementsError, match="expected at most"), open_measurements(path):
        pass
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CsdctlError, match="not a regular file"), open_measurements(path):
        pass
