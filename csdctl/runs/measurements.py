"""Stored measurements, by model, recipe, machine class and settings, for the next tuning run.

Values in and out are those of tuning/measurements.py; the caller gives the time. Of repeated measurements
only the newest are kept (measurements_rows.py). measurements_file.py has the file itself and its errors.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import TypeVar

from csdctl.errors import CsdctlError, DamagedMeasurementsError, InputError
from csdctl.fleet.hardware import FleetClass, MachineClass
from csdctl.notify import Say
from csdctl.runs import measurements_rows as rows
from csdctl.runs.measurements_file import MeasurementsFile, set_measurements_aside
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelProperties,
    ProbeMeasurement,
    TrialMeasurement,
)
from csdctl.tuning.transfer import feature_distance

MIN_HASH_LENGTH = 6

ValueT = TypeVar("ValueT")


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


class MeasurementStore:
    """An open measurements file. Every method is one transaction, and raises CsdctlError when the file fails.

    With `on_error` the failure is reported instead: nothing is stored or recalled, and the caller continues.
    """

    def __init__(self, file: MeasurementsFile, on_error: Say | None = None) -> None:
        self.file = file
        self._on_error = on_error

    def add_probes(
        self,
        model: ModelProperties,
        recipe: str,
        machine_class: MachineClass,
        probes: Sequence[ProbeMeasurement],
    ) -> None:
        """Store probes of one machine class; `recipe` is a hash of what else a step's time depends on."""

        def write(connection: Connection) -> None:
            rows.put_model(connection, model)
            rows.put_machine_class(connection, machine_class)
            rows.insert_probes(connection, (model.hash, recipe, machine_class.key), probes)

        self._write(write)

    def probes(self, model_hash: str, recipe: str, machine_class: str) -> list[ProbeMeasurement]:
        """Return the probes of a model on a machine class (its key), with any settings, oldest first."""
        key = (model_hash, recipe, machine_class)
        return self._read(lambda connection: rows.select_probes(connection, key))

    def neighbours(
        self, model: ModelProperties, recipe: str, machine_class: str, limit: int = 3
    ) -> list[Neighbour]:
        """Return the most similar models that were measured on a machine class (its key), nearest first.

        This model with this recipe is excluded. Models at the same distance are ordered by hash.
        """

        def read(connection: Connection) -> list[Neighbour]:
            others = [
                (_distance(model, other), other, other_recipe)
                for other, other_recipe in rows.select_measured(connection, machine_class)
                if (other.hash, other_recipe) != (model.hash, recipe)
            ]
            others.sort(key=lambda neighbour: (neighbour[0], neighbour[1].hash, neighbour[2]))
            return [
                Neighbour(other, other_recipe, distance, tuple(rows.select_probes(connection, key)))
                for distance, other, other_recipe in others[:limit]
                for key in [(other.hash, other_recipe, machine_class)]
            ]

        return self._read(read)

    def add_collectives(self, fleet_class: FleetClass, collectives: Sequence[CollectiveMeasurement]) -> None:
        """Store the times of sums over the ranks of a fleet."""

        def write(connection: Connection) -> None:
            rows.put_fleet_class(connection, fleet_class)
            rows.insert_collectives(connection, fleet_class.key, collectives)

        self._write(write)

    def collectives(self, fleet_class: str) -> list[CollectiveMeasurement]:
        """Return the sums on a fleet class (its key), by any collective, oldest first."""
        return self._read(lambda connection: rows.select_collectives(connection, fleet_class))

    def add_trial(
        self, model: ModelProperties, recipe: str, fleet_class: FleetClass, trial: TrialMeasurement
    ) -> None:
        """Store the result of a trial."""

        def write(connection: Connection) -> None:
            rows.put_model(connection, model)
            rows.put_fleet_class(connection, fleet_class)
            rows.insert_trial(connection, (model.hash, recipe, fleet_class.key), trial)

        self._write(write)

    def trials(self, model_hash: str, recipe: str, fleet_class: str) -> list[TrialMeasurement]:
        """Return the trials on a fleet class (its key), with any number of ranks, oldest first."""
        key = (model_hash, recipe, fleet_class)
        return self._read(lambda connection: rows.select_trials(connection, key))

    def models(self) -> list[ModelProperties]:
        """Return all models with measurements, by name."""
        return self._read(rows.select_models)

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
        with self.file.writing() as connection:
            if models is None:
                counts = [
                    connection.execute(f"DELETE FROM {table}").rowcount
                    for table in ("probes", "trials", "collectives")
                ]
            else:
                counts = [
                    sum(
                        connection.execute(f"DELETE FROM {table} WHERE model = ?", (model.hash,)).rowcount
                        for model in models
                    )
                    for table in ("probes", "trials")
                ]
            rows.delete_unused(connection)
        self.file.shrink()
        return Forgotten(*counts)

    def _read(self, read: Callable[[Connection], list[ValueT]]) -> list[ValueT]:
        try:
            with self.file.reading() as connection:
                return read(connection)
        except CsdctlError as error:
            if self._on_error is None:
                raise
            self._on_error(f"earlier measurements are not used: {error}")
            return []

    def _write(self, write: Callable[[Connection], None]) -> None:
        try:
            with self.file.writing() as connection:
                write(connection)
        except CsdctlError as error:
            if self._on_error is None:
                raise
            self._on_error(f"measurements are not stored: {error}")


@contextlib.contextmanager
def open_measurements(path: Path) -> Iterator[MeasurementStore]:
    """Open the measurements at `path`, creating the file if missing; raises as MeasurementsFile does."""
    with contextlib.closing(MeasurementsFile(path)) as file:
        yield MeasurementStore(file)


@contextlib.contextmanager
def open_measurements_to_write(path: Path, say: Say) -> Iterator[MeasurementStore]:
    """Open the measurements at `path` even if they are unusable: tuning works without earlier measurements.

    A damaged file is set aside and replaced by a new one. If no file can be created, an empty one in
    memory is used. `say` reports this, and measurements that cannot be stored later.
    """
    with contextlib.closing(_open_anyway(path, say)) as file:
        yield MeasurementStore(file, say)


def _open_anyway(path: Path, say: Say) -> MeasurementsFile:
    try:
        try:
            return MeasurementsFile(path)
        except DamagedMeasurementsError as error:
            say(f"{error.message}; kept as {set_measurements_aside(path).name}, and replaced by a new file")
            return MeasurementsFile(path)
    except (CsdctlError, OSError) as error:
        say(f"continuing without earlier measurements: {error}")
        return MeasurementsFile(None)


def _distance(model: ModelProperties, other: ModelProperties) -> float:
    return 0.0 if model.hash == other.hash else feature_distance(model, other)
