"""Stored measurements, by model, recipe, machine class and settings, for the next tuning run: an SQLite file.

Values in and out are those of tuning/measurements.py; the caller gives the time. Of repeated measurements
only the newest are kept. The file has a rollback journal rather than WAL: writes are few and small, the
project may be on a shared file system, where WAL's shared memory does not work, and between commands there is
exactly one file.
"""

import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import starmap
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.hardware import FleetClass, MachineClass
from csdctl.notify import Say
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelProperties,
    ProbeMeasurement,
    RuntimeSettings,
    TrialMeasurement,
    TrialRank,
)
from csdctl.tuning.transfer import feature_distance

SCHEMA = 1
"""`PRAGMA user_version`; increases by one with every change of the tables."""
APPLICATION_ID = 0x63736463
"""`csdc`: distinguishes the file from other databases."""
BUSY_DEADLINE_S = 10.0
NUM_KEPT = 50
"""Repeated measurements that are kept, the newest: the file stays small."""
MIN_HASH_LENGTH = 6
REMEDY = "wait until no other csdctl measures, free some disk space, or fix permissions"

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
    batch_size INTEGER NOT NULL CHECK (batch_size > 0),
    step_time_s REAL CHECK (step_time_s > 0),
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
    num_ranks INTEGER NOT NULL CHECK (num_ranks > 0),
    num_bytes INTEGER NOT NULL,
    seconds REAL NOT NULL CHECK (seconds >= 0),
    measured_at REAL NOT NULL
);
CREATE INDEX collectives_of_a_fleet ON collectives (fleet_class, name, num_ranks, num_bytes);
CREATE TABLE trials (
    id INTEGER PRIMARY KEY,
    model TEXT NOT NULL REFERENCES models,
    recipe TEXT NOT NULL,
    fleet_class TEXT NOT NULL REFERENCES fleet_classes,
    ranks TEXT NOT NULL,
    step_s REAL NOT NULL CHECK (step_s > 0),
    samples_per_s REAL NOT NULL CHECK (samples_per_s > 0),
    predicted_samples_per_s REAL,
    measured_at REAL NOT NULL
);
CREATE INDEX trials_of_a_model ON trials (model, recipe, fleet_class);
"""
_SETTINGS = "threads, inter_op_threads, is_onednn, micro_batch_size"
_PROBE = f"{_SETTINGS}, batch_size, measured_at, step_time_s, num_steps, peak_memory_bytes"
_COLLECTIVE = "name, num_ranks, num_bytes, seconds, measured_at"
_TRIAL = "ranks, step_s, samples_per_s, measured_at, predicted_samples_per_s"
"""Columns in the order of the fields of a measurement."""
_REPEATED_BY = {
    "probes": f"model, recipe, machine_class, {_SETTINGS}, batch_size",
    "collectives": "fleet_class, name, num_ranks, num_bytes",
    "trials": "model, recipe, fleet_class",
}
_MACHINE, _FLEET = TypeAdapter(MachineClass), TypeAdapter(FleetClass)
_RANKS = TypeAdapter(tuple[TrialRank, ...])


@dataclass(frozen=True)
class Neighbour:
    """Another model, or this model with another recipe, that was measured on the same machine class."""

    model: ModelProperties
    recipe: str
    distance: float
    """See tuning/transfer.py; 0 for the same model with another recipe."""
    probes: tuple[ProbeMeasurement, ...]
    """Oldest first."""


@dataclass(frozen=True)
class Forgotten:
    """The numbers of deleted measurements."""

    num_probes: int = 0
    num_trials: int = 0
    num_collectives: int = 0


@dataclass(frozen=True)
class ProbeSummary:
    """All probes of one model with one recipe, machine class and settings."""

    model: ModelProperties
    recipe: str
    machine_class: MachineClass
    settings: RuntimeSettings
    num_probes: int
    smallest: int | None
    """Of the batch sizes that fitted in memory; None: none did."""
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
class TrialSummary:
    """One trial of a plan."""

    model: ModelProperties
    recipe: str
    fleet_class: FleetClass
    trial: TrialMeasurement


@dataclass(frozen=True)
class Overview:
    """Everything: probes by model, sums by fleet, trials oldest first."""

    probed: tuple[ProbeSummary, ...] = ()
    summed: tuple[CollectiveSummary, ...] = ()
    tried: tuple[TrialSummary, ...] = ()


class MeasurementStore:
    """An open measurements file. Every method is one transaction, and raises CsdctlError when the file fails.

    With `on_error` the failure is reported instead: nothing is stored or recalled, and the caller continues.
    """

    def __init__(self, connection: sqlite3.Connection, on_error: Say | None = None) -> None:
        self._connection, self._on_error = connection, on_error

    def add_probes(
        self,
        model: ModelProperties,
        recipe: str,
        machine_class: MachineClass,
        probes: Sequence[ProbeMeasurement],
    ) -> None:
        """Store probes of one machine class; `recipe` is a hash of what else a step's time depends on."""
        key = model.hash, recipe, machine_class.key
        rows = [(*key, *settings, *row) for settings, *row in map(astuple, probes)]
        with self._transaction("measurements are not stored"):
            self._put_model(model)
            self._put_class("machine_classes", machine_class.key, _MACHINE.dump_json(machine_class))
            self._insert("probes", f"model, recipe, machine_class, {_PROBE}", rows)

    def probes(self, model_hash: str, recipe: str, machine_class: str) -> list[ProbeMeasurement]:
        """Return the probes of a model on a machine class (its key), with any settings, oldest first."""
        key = {"model": model_hash, "recipe": recipe, "machine_class": machine_class}
        return list(map(_probe, self._select("probes", _PROBE, key)))

    def neighbours(
        self, model: ModelProperties, recipe: str, machine_class: str, limit: int = 3
    ) -> list[Neighbour]:
        """Return the most similar models that were measured on a machine class (its key), nearest first.

        This model with this recipe is excluded. Models at the same distance are ordered by hash.
        """
        rows = self._select("probes", f"model, recipe, {_PROBE}", {"machine_class": machine_class})
        measured: dict[tuple[str, str], list[ProbeMeasurement]] = defaultdict(list)
        for other, other_recipe, *row in rows:
            measured[other, other_recipe].append(_probe(row))
        models = {other.hash: other for other in self.models()}
        found = [
            Neighbour(models[key[0]], key[1], _distance(model, models[key[0]]), tuple(probes))
            for key, probes in measured.items()
            if key != (model.hash, recipe) and key[0] in models and any(probe.has_fitted for probe in probes)
        ]
        found.sort(key=lambda neighbour: (neighbour.distance, neighbour.model.hash, neighbour.recipe))
        return found[:limit]

    def add_collectives(self, fleet_class: FleetClass, collectives: Sequence[CollectiveMeasurement]) -> None:
        """Store the times of sums over the ranks of a fleet."""
        with self._transaction("measurements are not stored"):
            self._put_class("fleet_classes", fleet_class.key, _FLEET.dump_json(fleet_class))
            rows = [(fleet_class.key, *astuple(sums)) for sums in collectives]
            self._insert("collectives", f"fleet_class, {_COLLECTIVE}", rows)

    def collectives(self, fleet_class: str) -> list[CollectiveMeasurement]:
        """Return the sums on a fleet class (its key), by any collective, oldest first."""
        rows = self._select("collectives", _COLLECTIVE, {"fleet_class": fleet_class})
        return list(starmap(CollectiveMeasurement, rows))

    def add_trial(
        self, model: ModelProperties, recipe: str, fleet_class: FleetClass, trial: TrialMeasurement
    ) -> None:
        """Store the result of a trial."""
        ranks = _RANKS.dump_json(trial.ranks).decode()
        row = (model.hash, recipe, fleet_class.key, ranks, *astuple(trial)[1:])
        with self._transaction("measurements are not stored"):
            self._put_model(model)
            self._put_class("fleet_classes", fleet_class.key, _FLEET.dump_json(fleet_class))
            self._insert("trials", f"model, recipe, fleet_class, {_TRIAL}", [row])

    def trials(self, model_hash: str, recipe: str, fleet_class: str) -> list[TrialMeasurement]:
        """Return the trials on a fleet class (its key), with any number of ranks, oldest first."""
        key = {"model": model_hash, "recipe": recipe, "fleet_class": fleet_class}
        return list(map(_trial, self._select("trials", _TRIAL, key)))

    def models(self) -> list[ModelProperties]:
        """Return all models with measurements, by name."""
        rows = self._select("models", "*", order="name, hash")
        return list(starmap(ModelProperties, rows))

    def find_models(self, name: str) -> list[ModelProperties]:
        """Return the models with this name (short or full) or hash prefix; raises InputError for none."""
        known = self.models()
        is_hash = len(name) >= MIN_HASH_LENGTH
        found = [
            model
            for model in known
            if name in (model.name, model.short_name) or (is_hash and model.hash.startswith(name))
        ]
        if not found:
            names = ", ".join(dict.fromkeys(model.short_name for model in known))
            raise InputError(
                f"no measurements of model {name!r}",
                remedy=f"known models: {names}" if names else "there are no measurements",
            )
        return found

    def forget(self, models: Sequence[ModelProperties] | None) -> Forgotten:
        """Remove the measurements of `models`; None: all measurements, including sums."""
        hashes = [(model.hash,) for model in models or ()]
        with self._transaction("measurements are not deleted"):
            if models is None:
                tables = "probes", "trials", "collectives"
                counts = [self._connection.execute(f"DELETE FROM {table}").rowcount for table in tables]
            else:
                counts = [
                    self._connection.executemany(f"DELETE FROM {table} WHERE model = ?", hashes).rowcount
                    for table in ("probes", "trials")
                ]
            for table, column, users in (
                ("models", "hash", "SELECT model FROM probes UNION SELECT model FROM trials"),
                ("machine_classes", "key", "SELECT machine_class FROM probes"),
                (
                    "fleet_classes",
                    "key",
                    "SELECT fleet_class FROM trials UNION SELECT fleet_class FROM collectives",
                ),
            ):
                self._connection.execute(f"DELETE FROM {table} WHERE {column} NOT IN ({users})")
        with contextlib.suppress(sqlite3.OperationalError):  # on a full disk, the file keeps its size
            self._connection.execute("VACUUM")
        return Forgotten(*counts)

    def overview(self) -> Overview:
        """Summarize all measurements: counts and extremes rather than every measurement."""
        with self._transaction("measurements cannot be read", begin="BEGIN"):
            contents = self._select("machine_classes", "*", order="key")
            machines = {key: _MACHINE.validate_json(content) for key, content in contents}
            contents = self._select("fleet_classes", "*", order="key")
            fleets = {key: _FLEET.validate_json(content) for key, content in contents}
            models = {model.hash: model for model in self.models()}
            probe_rows = self._select("probes", f"model, recipe, machine_class, {_PROBE}")
            sum_rows = self._select("collectives", f"fleet_class, {_COLLECTIVE}")
            trial_rows = self._select("trials", f"model, recipe, fleet_class, {_TRIAL}")
        order = {key: number for number, key in enumerate(models)}
        probes: dict[tuple[int, str, str, RuntimeSettings], list[ProbeMeasurement]] = defaultdict(list)
        for model, recipe, machine, *row in probe_rows:
            probe = _probe(row)
            probes[order[model], recipe, machine, probe.settings].append(probe)
        sums: dict[tuple[str, str, int, int], list[CollectiveMeasurement]] = defaultdict(list)
        for fleet, *row in sum_rows:
            timed = CollectiveMeasurement(*row)
            sums[fleet, timed.name, timed.num_ranks, timed.num_bytes].append(timed)
        known = list(models.values())
        return Overview(
            tuple(
                _summarize_probes(known[number], recipe, machines[machine], settings, group)
                for (number, recipe, machine, settings), group in sorted(probes.items())
            ),
            tuple(
                CollectiveSummary(
                    fleets[fleet],
                    name,
                    num_ranks,
                    num_bytes,
                    num_measured=len(group),
                    median_s=median(timed.seconds for timed in group),
                    measured_at=group[-1].measured_at,
                )
                for (fleet, name, num_ranks, num_bytes), group in sorted(sums.items())
            ),
            tuple(
                TrialSummary(models[model], recipe, fleets[fleet], _trial(row))
                for model, recipe, fleet, *row in trial_rows
            ),
        )

    def _select(
        self,
        table: str,
        columns: str,
        key: Mapping[str, str] = MappingProxyType({}),
        order: str = "measured_at, id",
    ) -> list[tuple[Any, ...]]:
        """Return rows of a table, those whose columns have the values of `key`."""
        where = " AND ".join(["TRUE", *(f"{column} = ?" for column in key)])
        try:
            query = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {order}"
            return self._connection.execute(query, tuple(key.values())).fetchall()
        except sqlite3.DatabaseError as error:
            self._fail("earlier measurements are not used", error)
            return []

    @contextlib.contextmanager
    def _transaction(self, failure: str, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        """Do everything in the block, or nothing; other writers wait."""
        try:
            with self._connection:
                self._connection.execute(begin)
                yield
        except sqlite3.DatabaseError as error:
            self._fail(failure, error)

    def _fail(self, failure: str, error: sqlite3.DatabaseError) -> None:
        if self._on_error is None:
            raise CsdctlError(f"{failure}: {error}", remedy=REMEDY) from error
        self._on_error(f"{failure}: {error}")

    def _put_model(self, model: ModelProperties) -> None:
        """Add a model, or update its features."""
        row = astuple(model)
        self._connection.execute("INSERT OR IGNORE INTO models VALUES (?, ?, ?, ?, ?, ?)", row)
        self._connection.execute(
            "UPDATE models SET (name, num_parameters, num_trainable, num_operations, input_elements)"
            " = (?, ?, ?, ?, ?) WHERE hash = ?",
            (*row[1:], row[0]),
        )

    def _put_class(self, table: str, key: str, content: bytes) -> None:
        self._connection.execute(f"INSERT OR IGNORE INTO {table} VALUES (?, ?)", (key, content.decode()))

    def _insert(self, table: str, columns: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Add measurements, and delete old ones of the same key."""
        places = ", ".join("?" for _ in columns.split(","))
        self._connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({places})", rows)
        self._connection.execute(
            f"DELETE FROM {table} WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER"
            f" (PARTITION BY {_REPEATED_BY[table]} ORDER BY measured_at DESC, id DESC) AS age FROM {table})"
            f" WHERE age > {NUM_KEPT})"
        )


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


def _probe(row: Sequence[Any]) -> ProbeMeasurement:
    threads, inter_op_threads, is_onednn, micro_batch_size, *rest = row
    settings = RuntimeSettings(threads, inter_op_threads, bool(is_onednn), micro_batch_size)
    return ProbeMeasurement(settings, *rest)


def _trial(row: Sequence[Any]) -> TrialMeasurement:
    return TrialMeasurement(_RANKS.validate_json(row[0]), *row[1:])


def _distance(model: ModelProperties, other: ModelProperties) -> float:
    return 0.0 if model.hash == other.hash else feature_distance(model, other)


def _summarize_probes(
    model: ModelProperties,
    recipe: str,
    machine_class: MachineClass,
    settings: RuntimeSettings,
    probes: Sequence[ProbeMeasurement],
) -> ProbeSummary:
    fitting = [probe for probe in probes if probe.has_fitted]
    sizes = [probe.batch_size for probe in fitting]
    best = max(fitting, key=lambda probe: probe.samples_per_s or 0.0, default=None)
    return ProbeSummary(
        model,
        recipe,
        machine_class,
        settings,
        num_probes=len(probes),
        smallest=min(sizes, default=None),
        largest=max(sizes, default=None),
        too_large=min((probe.batch_size for probe in probes if not probe.has_fitted), default=None),
        best_batch_size=best.batch_size if best else None,
        best_samples_per_s=best.samples_per_s if best else None,
        measured_at=probes[-1].measured_at,
    )
