"""The SQLite file of measurements: opening, schema and version, transactions, and errors.

It uses a rollback journal rather than WAL: writes are few and small, the project may be on a shared file
system, where WAL's shared memory does not work, and between commands there is exactly one file.
"""

import contextlib
import functools
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from csdctl.errors import CsdctlError, DamagedMeasurementsError, DeadlineError, InputError
from csdctl.runs.measurements_values import find_impossible_values

SCHEMA = 1
"""`PRAGMA user_version`; increases by one with every change of the tables."""
APPLICATION_ID = 0x63736463
"""`csdc`: distinguishes the file from other databases."""
BUSY_DEADLINE_S = 10.0
MAX_FILE_BYTES = 64 << 20
MAX_VALUE_BYTES = 4 << 20
"""Of one value: the ranks of a trial on thousands of machines."""

REPAIR = "free some disk space or fix permissions"
FORGET = (
    "run `csdctl measurements --forget all --yes`, or remove that file; the next tuning run measures again"
)

_TABLES = """
CREATE TABLE models (
    hash TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    num_parameters INTEGER NOT NULL,
    num_trainable INTEGER NOT NULL,
    num_operations INTEGER NOT NULL,
    input_elements INTEGER NOT NULL
);
CREATE TABLE machine_classes (key TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE fleet_classes (key TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE probes (
    id INTEGER PRIMARY KEY,
    model TEXT NOT NULL REFERENCES models,
    recipe TEXT NOT NULL,
    machine_class TEXT NOT NULL REFERENCES machine_classes,
    threads INTEGER NOT NULL,
    inter_op_threads INTEGER NOT NULL,
    is_onednn INTEGER NOT NULL,
    micro_batch_size INTEGER NOT NULL,
    batch_size INTEGER NOT NULL,
    step_time_s REAL,
    num_steps INTEGER NOT NULL,
    peak_memory_bytes INTEGER,
    measured_at REAL NOT NULL
);
CREATE INDEX probes_of_a_model ON probes (model, recipe, machine_class);
CREATE INDEX probes_of_a_class ON probes (machine_class);
CREATE TABLE collectives (
    id INTEGER PRIMARY KEY,
    fleet_class TEXT NOT NULL REFERENCES fleet_classes,
    name TEXT NOT NULL,
    num_ranks INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    seconds REAL NOT NULL,
    measured_at REAL NOT NULL
);
CREATE INDEX collectives_of_a_fleet ON collectives (fleet_class, name, num_ranks, num_bytes);
CREATE TABLE trials (
    id INTEGER PRIMARY KEY,
    model TEXT NOT NULL REFERENCES models,
    recipe TEXT NOT NULL,
    fleet_class TEXT NOT NULL REFERENCES fleet_classes,
    ranks TEXT NOT NULL,
    step_s REAL NOT NULL,
    samples_per_s REAL NOT NULL,
    predicted_samples_per_s REAL,
    measured_at REAL NOT NULL
);
CREATE INDEX trials_of_a_model ON trials (model, recipe, fleet_class);
"""


class MeasurementsFile:
    """An open measurements file; every SQLite error becomes a CsdctlError with the file's name."""

    def __init__(self, path: Path | None, deadline_s: float = BUSY_DEADLINE_S) -> None:
        """Open or create the file at `path`; None: a private in-memory database.

        Raises InputError for a file of a newer csdctl, DamagedMeasurementsError for a file that is damaged or
        not a measurements file, DeadlineError when another csdctl writes for longer than `deadline_s`.
        """
        self.path = path
        self._deadline_s = deadline_s
        with self._errors():
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._check_file(path)
            self._connection = sqlite3.connect(path or ":memory:", timeout=deadline_s, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read one consistent state of the file, whatever other processes write; raises CsdctlError."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Write everything in the block, or nothing; other writers wait. Raises CsdctlError."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def shrink(self) -> None:
        """Free the space of deleted rows; they can no longer be read from the file."""
        with self._errors():
            self._connection.execute("VACUUM")

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._errors():
            self._connection.execute(begin)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite itself rolls back when the disk is full
                    self._connection.execute("ROLLBACK")
                raise

    def _check_file(self, path: Path) -> None:
        if not path.exists():
            return
        if not path.is_file():
            raise CsdctlError(f"{path} cannot be used: not a regular file", remedy="remove it")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise self._damaged(f"{size:,} bytes, expected at most {MAX_FILE_BYTES:,}")

    def _prepare(self) -> None:
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        if self._value("PRAGMA user_version") == 0:
            with self.writing():
                self._create_tables()
        version = self._value("PRAGMA user_version")
        if version > SCHEMA:
            raise InputError(
                f"{self.path} has schema {version}, from a newer csdctl; expected {SCHEMA}",
                remedy=f"use that csdctl, or {FORGET}",
            )
        if self._value("PRAGMA application_id") != APPLICATION_ID:
            raise self._damaged("another program's database")
        # Views and triggers of a file that csdctl did not write would run with every query.
        if _schema_of(self._connection) != _expected_schema():
            raise self._damaged("its tables are not those of csdctl")
        found = self._value("PRAGMA integrity_check(1)")  # unlike quick_check, of the indices too
        if found != "ok":
            raise self._damaged(found)
        for problem in find_impossible_values(self._connection):
            raise self._damaged(problem)
        self._connection.execute("PRAGMA foreign_keys = ON")

    def _create_tables(self) -> None:
        """Create the tables, unless another csdctl did since the version was read."""
        if self._value("PRAGMA user_version"):
            return
        if self._value("SELECT count(*) FROM sqlite_master"):
            raise self._damaged("another program's database")
        for statement in _TABLES.split(";"):
            self._connection.execute(statement)
        self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self._connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def _value(self, query: str) -> Any:
        return self._connection.execute(query).fetchone()[0]

    def _damaged(self, why: object) -> DamagedMeasurementsError:
        return DamagedMeasurementsError(
            f"{self.path} is not a readable measurements file: {why}", remedy=FORGET
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
                raise DeadlineError(
                    f"{self.path} was in use by another csdctl for {self._deadline_s:g} s",
                    remedy="wait until it is done, and try again",
                ) from error
            raise CsdctlError(f"{self.path} cannot be used: {error}", remedy=REPAIR) from error
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # its subclasses indicate a defect of csdctl
                raise
            raise self._damaged(error) from error
        except UnicodeDecodeError as error:
            raise self._damaged("text that is not UTF-8") from error
        except OSError as error:
            raise CsdctlError(f"{self.path} cannot be used: {error.strerror}", remedy=REPAIR) from error


def _schema_of(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    return set(
        connection.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        )
    )


@functools.cache
def _expected_schema() -> set[tuple[str, str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES)
        return _schema_of(connection)


def set_measurements_aside(path: Path) -> Path:
    """Rename an unreadable file and its journal to *.bak, replacing an earlier one; return the new path."""
    aside = path.with_name(path.name + ".bak")
    path.replace(aside)
    if _journal(path).exists():  # SQLite would roll it back into the next file of this name
        _journal(path).replace(_journal(aside))
    return aside


def remove_measurements(path: Path) -> None:
    """Remove the file and its journal."""
    for file in (path, _journal(path)):
        file.unlink(missing_ok=True)


def _journal(path: Path) -> Path:
    """Return SQLite's name for the journal of `path`."""
    return path.with_name(path.name + "-journal")
