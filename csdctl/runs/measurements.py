"""The history: what was measured, by model, recipe, machine class and settings; for the next tune.

Values in and out are those of tuning/measurements.py; whoever measures says when. Of equal measurements only
the newest are kept (history_rows.py). The file itself and its troubles are in history_file.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import TypeVar

from csdctl.errors import CsdctlError, DamagedMeasurementsError, InputError
from csdctl.fleet.machine_class import FleetClass, MachineClass
from csdctl.notify import Say
from csdctl.runs import measurements_rows as rows
from csdctl.runs.measurements_file import MeasurementsFile, set_measurements_aside
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelFeatures,
    ProbeMeasurement,
    TrialMeasurement,
)
from csdctl.tuning.transfer import feature_distance

LEAST_HASH_LENGTH = 6

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Neighbour:
    """Another model, or the same one trained otherwise, that was measured on the same machine class."""

    model: ModelFeatures
    recipe: str
    distance: float
    """See tuning/transfer.py; 0 for the same model with another recipe."""
    probes: tuple[ProbeMeasurement, ...]
    """Oldest first."""


@dataclass(frozen=True)
class Forgotten:
    """How much was removed."""

    num_probes: int = 0
    num_trials: int = 0
    num_collectives: int = 0


class MeasurementStore:
    """An open history. Every method is one transaction, and raises CsdctlError when the file refuses.

    With `on_refused` it is told so instead, nothing is kept, and nothing is known: whoever measures goes on.
    """

    def __init__(self, file: MeasurementsFile, on_refused: Say | None = None) -> None:
        self.file = file
        self._on_refused = on_refused

    def add_probes(
        self,
        model: ModelFeatures,
        recipe: str,
        machine_class: MachineClass,
        probes: Sequence[ProbeMeasurement],
    ) -> None:
        """Keep what was measured on one machine; `recipe` is a hash of what else a step's time depends on."""

        def write(connection: Connection) -> None:
            rows.put_model(connection, model)
            rows.put_machine_class(connection, machine_class)
            rows.insert_probes(connection, (model.hash, recipe, machine_class.key), probes)

        self._write(write)

    def probes(self, model_hash: str, recipe: str, machine_class: str) -> list[ProbeMeasurement]:
        """What is known of a model on a machine class (its key), with any settings, oldest first."""
        key = (model_hash, recipe, machine_class)
        return self._read(lambda connection: rows.select_probes(connection, key))

    def neighbours(
        self, model: ModelFeatures, recipe: str, machine_class: str, limit: int = 3
    ) -> list[Neighbour]:
        """The most similar that was measured on a machine class (its key), nearest first.

        This model with this recipe is not among them. Equally near ones come in the order of their hashes.
        """

        def read(connection: Connection) -> list[Neighbour]:
            others = [
                (_distance(model, other), other, its_recipe)
                for other, its_recipe in rows.select_measured(connection, machine_class)
                if (other.hash, its_recipe) != (model.hash, recipe)
            ]
            others.sort(key=lambda one: (one[0], one[1].hash, one[2]))
            return [
                Neighbour(other, its_recipe, distance, tuple(rows.select_probes(connection, key)))
                for distance, other, its_recipe in others[:limit]
                for key in [(other.hash, its_recipe, machine_class)]
            ]

        return self._read(read)

    def add_collectives(self, fleet_class: FleetClass, collectives: Sequence[CollectiveMeasurement]) -> None:
        """Keep how long sums over the ranks of a fleet took."""

        def write(connection: Connection) -> None:
            rows.put_fleet_class(connection, fleet_class)
            rows.insert_collectives(connection, fleet_class.key, collectives)

        self._write(write)

    def collectives(self, fleet_class: str) -> list[CollectiveMeasurement]:
        """What is known of sums on a fleet class (its key), done in any way, oldest first."""
        return self._read(lambda connection: rows.select_collectives(connection, fleet_class))

    def add_trial(
        self, model: ModelFeatures, recipe: str, fleet_class: FleetClass, trial: TrialMeasurement
    ) -> None:
        """Keep what a whole plan reached."""

        def write(connection: Connection) -> None:
            rows.put_model(connection, model)
            rows.put_fleet_class(connection, fleet_class)
            rows.insert_trial(connection, (model.hash, recipe, fleet_class.key), trial)

        self._write(write)

    def trials(self, model_hash: str, recipe: str, fleet_class: str) -> list[TrialMeasurement]:
        """The plans that were tried on a fleet class (its key), with any number of ranks, oldest first."""
        key = (model_hash, recipe, fleet_class)
        return self._read(lambda connection: rows.select_trials(connection, key))

    def models(self) -> list[ModelFeatures]:
        """All models of which something is known, by name."""
        return self._read(rows.select_models)

    def find_models(self, wanted: str) -> list[ModelFeatures]:
        """The models of that name, short or whole, or whose hash starts so; raises InputError for none."""
        known = self.models()
        is_hash = len(wanted) >= LEAST_HASH_LENGTH
        found = [
            one
            for one in known
            if wanted in (one.name, one.short_name) or (is_hash and one.hash.startswith(wanted))
        ]
        if not found:
            names = ", ".join(dict.fromkeys(one.short_name for one in known))
            raise InputError(
                f"the history has no model {wanted!r}",
                remedy=f"known models: {names}" if names else "it is empty",
            )
        return found

    def forget(self, models: Sequence[ModelFeatures] | None) -> Forgotten:
        """Remove what is known of `models`; None: everything, what is known of the network too."""
        with self.file.writing() as connection:
            if models is None:
                counts = [
                    connection.execute(f"DELETE FROM {table}").rowcount
                    for table in ("probes", "trials", "collectives")
                ]
            else:
                counts = [
                    sum(
                        connection.execute(f"DELETE FROM {table} WHERE model = ?", (one.hash,)).rowcount
                        for one in models
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
            if self._on_refused is None:
                raise
            self._on_refused(f"the history is not used: {error}")
            return []

    def _write(self, write: Callable[[Connection], None]) -> None:
        try:
            with self.file.writing() as connection:
                write(connection)
        except CsdctlError as error:
            if self._on_refused is None:
                raise
            self._on_refused(f"not kept in the history: {error}")


@contextlib.contextmanager
def open_measurements(path: Path) -> Iterator[MeasurementStore]:
    """The history at `path`, made when there is none; raises CsdctlError as HistoryFile does."""
    with contextlib.closing(MeasurementsFile(path)) as file:
        yield MeasurementStore(file)


@contextlib.contextmanager
def open_measurements_to_write(path: Path, say: Say) -> Iterator[MeasurementStore]:
    """The history at `path`, whatever is wrong with it: measuring needs none.

    A damaged file is set aside and a new one begun; where there can be none, an empty one in memory serves.
    `say` is told so, and what could not be kept later.
    """
    with contextlib.closing(_open_anyway(path, say)) as file:
        yield MeasurementStore(file, say)


def _open_anyway(path: Path, say: Say) -> MeasurementsFile:
    try:
        try:
            return MeasurementsFile(path)
        except DamagedMeasurementsError as error:
            say(f"{error.message}; kept as {set_measurements_aside(path).name}, and begun anew")
            return MeasurementsFile(path)
    except (CsdctlError, OSError) as error:
        say(f"going on without the history: {error}")
        return MeasurementsFile(None)


def _distance(model: ModelFeatures, other: ModelFeatures) -> float:
    return 0.0 if model.hash == other.hash else feature_distance(model, other)
