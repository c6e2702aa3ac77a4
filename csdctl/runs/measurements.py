"""Stored measurements, by model, recipe, machine class and settings, for the next tuning run: an SQLite file.

Values in and out are those of tuning/measurements.py, stored as JSON; the caller gives the time. Of repeated
measurements only the newest are kept. The file has a rollback journal rather than WAL: writes are few and
small, the project may be on a shared file system, where WAL's shared memory does not work, and between
commands there is exactly one file.
"""

import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from csdctl.errors import CsdctlError
from csdctl.fleet.hardware import FleetClass, MachineClass
from csdctl.notify import Say
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelProperties,
    ProbeMeasurement,
    TrialMeasurement,
)
from csdctl.worker.protocol.run_spec import Runtime

SCHEMA = 2
"""`PRAGMA user_version`; increases by one with every change of the tables or of the values in them."""
APPLICATION_ID = 0x63736463
"""`csdc`: distinguishes the file from other databases."""
BUSY_DEADLINE_S = 10.0
NUM_KEPT = 50
"""Repeated measurements that are kept, the newest: the file stays small."""
REMEDY = "wait until no other csdctl measures, free some disk space, or fix permissions"

_TABLES = """
CREATE TABLE subjects (key TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE TABLE measurements (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    model TEXT NOT NULL,
    recipe TEXT NOT NULL,
    class TEXT NOT NULL REFERENCES subjects,
    repeated_by TEXT NOT NULL,
    content TEXT NOT NULL,
    measured_at REAL NOT NULL
);
CREATE INDEX of_a_class ON measurements (kind, class, model, recipe, repeated_by);
"""
"""Subjects are models, machine classes and fleet classes, by their hashes."""

ValueT = TypeVar("ValueT", bound=ProbeMeasurement | CollectiveMeasurement | TrialMeasurement)
ClassT = TypeVar("ClassT", bound=MachineClass | FleetClass)
_MODEL = TypeAdapter(ModelProperties)
NO_MODEL = ModelProperties("", "")
"""The model of a sum, which has none."""


@dataclass(frozen=True)
class Kind(Generic[ValueT, ClassT]):
    """A kind of measurement: the types of its values and classes, and what it is repeated by."""

    name: str
    values: TypeAdapter[ValueT]
    classes: TypeAdapter[ClassT]
    repeated_by: Callable[[ValueT], tuple[Any, ...]]


PROBE = Kind(
    "probe",
    TypeAdapter(ProbeMeasurement),
    TypeAdapter(MachineClass),
    lambda probe: (probe.settings, probe.batch_size),
)
COLLECTIVE = Kind(
    "collective",
    TypeAdapter(CollectiveMeasurement),
    TypeAdapter(FleetClass),
    lambda sums: (sums.name, sums.num_ranks, sums.num_bytes),
)
TRIAL = Kind("trial", TypeAdapter(TrialMeasurement), TypeAdapter(FleetClass), lambda trial: ())


@dataclass(frozen=True)
class Stored(Generic[ValueT, ClassT]):
    """A measurement, and what was measured: a model on a machine class or fleet class."""

    model: ModelProperties
    recipe: str
    of: ClassT
    value: ValueT


@dataclass(frozen=True)
class ProbeSummary:
    """All probes of one model with one recipe, machine class and settings."""

    model: ModelProperties
    recipe: str
    machine_class: MachineClass
    settings: Runtime
    num_probes: int
    smallest: int | None
    """The smallest batch size that fitted in memory; None: none did."""
    largest: int | None
    too_large: int | None
    """The smallest batch size that did not fit; None: all did."""
    best_batch_size: int | None
    best_samples_per_s: float | None
    measured_at: float
    """Unix time of the newest."""


@dataclass(frozen=True)
class CollectiveSummary:
    """All sums by one collective, of one size and number of ranks, on one fleet class."""

    fleet_class: FleetClass
    name: str
    num_ranks: int
    num_bytes: int
    num_measured: int
    median_s: float
    measured_at: float
    """Unix time of the newest."""


@dataclass(frozen=True)
class Overview:
    """Everything: probes by model, sums by fleet, trials oldest first."""

    probed: tuple[ProbeSummary, ...] = ()
    summed: tuple[CollectiveSummary, ...] = ()
    tried: tuple[Stored[TrialMeasurement, FleetClass], ...] = ()


class MeasurementStore:
    """An open measurements file. Every method is one transaction, and raises CsdctlError when the file fails.

    With `on_error` the failure is reported instead: nothing is stored or recalled, and the caller continues.
    """

    def __init__(self, connection: sqlite3.Connection, on_error: Say | None = None) -> None:
        self._connection, self._on_error = connection, on_error

    def add(
        self,
        kind: Kind[ValueT, ClassT],
        of: ClassT,
        values: Sequence[ValueT],
        model: ModelProperties = NO_MODEL,
        recipe: str = "",
    ) -> None:
        """Store measurements of one class, and delete old ones that were repeated.

        `recipe` is a hash of what else than the model a step's time depends on.
        """
        subjects = [
            (model.hash, _MODEL.dump_json(model).decode()),
            (of.key, kind.classes.dump_json(of).decode()),
        ]
        rows = [
            (
                *(kind.name, model.hash, recipe, of.key, repr(kind.repeated_by(value))),
                *(kind.values.dump_json(value).decode(), value.measured_at),
            )
            for value in values
        ]
        try:
            with self._connection as connection:  # all or nothing; other writers wait
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(
                    "INSERT INTO subjects VALUES (?, ?) ON CONFLICT DO UPDATE SET content = excluded.content",
                    subjects,
                )
                connection.executemany(
                    "INSERT INTO measurements (kind, model, recipe, class, repeated_by, content, measured_at)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    rows,
                )
                connection.execute(
                    "DELETE FROM measurements WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER"
                    " (PARTITION BY kind, model, recipe, class, repeated_by ORDER BY measured_at DESC,"
                    f" id DESC) AS age FROM measurements) WHERE age > {NUM_KEPT})"
                )
        except sqlite3.DatabaseError as error:
            self._fail("measurements are not stored", error)

    def find(
        self, kind: Kind[ValueT, ClassT], class_key: str, model_hash: str = NO_MODEL.hash, recipe: str = ""
    ) -> list[ValueT]:
        """Return the measurements of a kind on one class, of one model with one recipe, oldest first."""
        where = "AND class = ? AND model = ? AND recipe = ?"
        return [stored.value for stored in self._select(kind, where, class_key, model_hash, recipe)]

    def overview(self) -> Overview:
        """Summarize all measurements: counts and extremes rather than every measurement."""
        probed: dict[tuple[ModelProperties, str, MachineClass, Runtime], list[ProbeMeasurement]] = (
            defaultdict(list)
        )
        for probe in self._select(PROBE):
            probed[probe.model, probe.recipe, probe.of, probe.value.settings].append(probe.value)
        summed: dict[tuple[FleetClass, str, int, int], list[CollectiveMeasurement]] = defaultdict(list)
        for one in self._select(COLLECTIVE):
            summed[one.of, one.value.name, one.value.num_ranks, one.value.num_bytes].append(one.value)
        summaries = [_summarize_probes(key, probes) for key, probes in probed.items()]
        sums = [
            CollectiveSummary(
                *key, len(times), median(timed.seconds for timed in times), times[-1].measured_at
            )
            for key, times in summed.items()
        ]
        return Overview(
            tuple(sorted(summaries, key=_order)),
            tuple(
                sorted(sums, key=lambda one: (one.fleet_class.key, one.name, one.num_ranks, one.num_bytes))
            ),
            tuple(self._select(TRIAL)),
        )

    def _select(
        self, kind: Kind[ValueT, ClassT], where: str = "", *values: str
    ) -> list[Stored[ValueT, ClassT]]:
        """Return the measurements of a kind for which `where` holds, oldest first."""
        query = (
            "SELECT models.content, recipe, classes.content, measurements.content FROM measurements"
            " JOIN subjects AS models ON models.key = model JOIN subjects AS classes ON classes.key = class"
            f" WHERE kind = ? {where} ORDER BY measured_at, id"
        )
        try:
            rows = self._connection.execute(query, (kind.name, *values)).fetchall()
        except sqlite3.DatabaseError as error:
            self._fail("earlier measurements are not used", error)
            return []
        parse_model, parse_class = cache(_MODEL.validate_json), cache(kind.classes.validate_json)
        return [
            Stored(parse_model(model), recipe, parse_class(of), kind.values.validate_json(value))
            for model, recipe, of, value in rows
        ]

    def _fail(self, failure: str, error: sqlite3.DatabaseError) -> None:
        if self._on_error is None:
            raise CsdctlError(f"{failure}: {error}", remedy=REMEDY) from error
        self._on_error(f"{failure}: {error}")


@contextlib.contextmanager
def open_measurements(
    path: Path, say: Say | None = None, *, is_optional: bool = False
) -> Iterator[MeasurementStore]:
    """Open the measurements at `path`, creating the file if missing; raises CsdctlError when it fails.

    A file that is damaged or has another schema is renamed to *.bak and replaced by a new one, and `say`
    tells so. With `is_optional`, failures are said rather than raised, and measurements are kept in memory
    where no file can be created: tuning works without them.
    """
    report = say or (lambda line: None)
    try:
        connection = _open(path, report)
    except (sqlite3.DatabaseError, OSError) as error:
        if not is_optional:
            raise CsdctlError(f"{path} cannot be used: {error}", remedy=REMEDY) from error
        report(f"continuing without earlier measurements: {path} cannot be used: {error}")
        connection = _connect(":memory:")
    with contextlib.closing(connection):
        yield MeasurementStore(connection, report if is_optional else None)


def _open(path: Path, say: Say) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _connect(path)
    except sqlite3.OperationalError:  # in use, a full disk, permissions: nothing that a new file would cure
        raise
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.bak")
        path.replace(aside)
        journal = path.with_name(f"{path.name}-journal")
        if journal.exists():  # SQLite would roll it back into the next file of this name
            journal.replace(aside.with_name(f"{aside.name}-journal"))
        say(f"{path} cannot be used: {error}; kept as {aside.name}, and replaced by a new file")
        return _connect(path)


def _connect(path: Path | str) -> sqlite3.Connection:
    """Open a file, creating its tables; raises sqlite3.DatabaseError, also for another schema."""
    connection = sqlite3.connect(path, timeout=BUSY_DEADLINE_S, isolation_level=None)

    def value(query: str) -> Any:
        return connection.execute(query).fetchone()[0]

    try:
        if value("PRAGMA user_version") == 0:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if not value("SELECT count(*) FROM sqlite_master"):
                    for statement in _TABLES.split(";"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    connection.execute(f"PRAGMA user_version = {SCHEMA}")
        if value("PRAGMA application_id") != APPLICATION_ID:
            raise sqlite3.DatabaseError("another program's database")
        if (version := value("PRAGMA user_version")) != SCHEMA:
            raise sqlite3.DatabaseError(f"schema {version}, expected {SCHEMA}")
        if (damage := value("PRAGMA quick_check(1)")) != "ok":
            raise sqlite3.DatabaseError(damage)
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _order(one: ProbeSummary) -> tuple[Any, ...]:
    return one.model.name, one.model.hash, one.recipe, one.machine_class.key, astuple(one.settings)


def _summarize_probes(
    subject: tuple[ModelProperties, str, MachineClass, Runtime], probes: Sequence[ProbeMeasurement]
) -> ProbeSummary:
    fitting = [probe for probe in probes if probe.has_fitted]
    sizes = [probe.batch_size for probe in fitting]
    best = max(fitting, key=lambda probe: probe.samples_per_s or 0.0, default=None)
    return ProbeSummary(
        *subject,
        num_probes=len(probes),
        smallest=min(sizes, default=None),
        largest=max(sizes, default=None),
        too_large=min((probe.batch_size for probe in probes if not probe.has_fitted), default=None),
        best_batch_size=best.batch_size if best else None,
        best_samples_per_s=best.samples_per_s if best else None,
        measured_at=probes[-1].measured_at,
    )
