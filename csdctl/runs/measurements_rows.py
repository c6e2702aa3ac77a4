"""The rows of the measurements tables: convert values to rows and back, and delete old rows."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from sqlite3 import Connection
from typing import Any

from csdctl.documents import check_values, parse_json_document
from csdctl.fleet.hardware import FleetClass, MachineClass
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelProperties,
    ProbeMeasurement,
    RuntimeSettings,
    TrialMeasurement,
    TrialRank,
)

MODEL_COLUMNS = "hash, name, num_parameters, num_trainable, num_operations, input_elements"
SETTINGS_COLUMNS = "threads, inter_op_threads, is_onednn, micro_batch_size"
PROBE_COLUMNS = f"{SETTINGS_COLUMNS}, batch_size, measured_at, step_time_s, num_steps, peak_memory_bytes"
COLLECTIVE_COLUMNS = "name, num_ranks, num_bytes, seconds, measured_at"
TRIAL_COLUMNS = "ranks, step_s, samples_per_s, measured_at, predicted_samples_per_s"

NUM_KEPT = 50
"""Repeated measurements that are kept, the newest: the file stays small."""

_REPEATED_BY = {
    "probes": f"model, recipe, machine_class, {SETTINGS_COLUMNS}, batch_size",
    "collectives": "fleet_class, name, num_ranks, num_bytes",
    "trials": "model, recipe, fleet_class",
}


def put_model(connection: Connection, model: ModelProperties) -> None:
    """Add a model, or update its features."""
    _insert(connection, "models", MODEL_COLUMNS, [_model_row(model)], verb="INSERT OR IGNORE")
    connection.execute(
        f"UPDATE models SET ({MODEL_COLUMNS}) = (?, ?, ?, ?, ?, ?) WHERE hash = ?",
        (*_model_row(model), model.hash),
    )


def put_machine_class(connection: Connection, machine_class: MachineClass) -> None:
    """Add a machine class, unless it exists."""
    row = (machine_class.key, json.dumps(asdict(machine_class)))
    _insert(connection, "machine_classes", "key, content", [row], verb="INSERT OR IGNORE")


def put_fleet_class(connection: Connection, fleet_class: FleetClass) -> None:
    """Add a fleet class, unless it exists."""
    row = (fleet_class.key, json.dumps(asdict(fleet_class)))
    _insert(connection, "fleet_classes", "key, content", [row], verb="INSERT OR IGNORE")


def select_models(connection: Connection) -> list[ModelProperties]:
    """Return all models, by name."""
    found = connection.execute(f"SELECT {MODEL_COLUMNS} FROM models ORDER BY name, hash")
    return [ModelProperties(*row) for row in found]


def select_machine_classes(connection: Connection) -> dict[str, MachineClass]:
    """Return all machine classes by the keys they were stored with."""
    found = connection.execute("SELECT key, content FROM machine_classes ORDER BY key")
    return {key: _read(content, MachineClass, key) for key, content in found}


def select_fleet_classes(connection: Connection) -> dict[str, FleetClass]:
    """Return all fleet classes by the keys they were stored with."""
    found = connection.execute("SELECT key, content FROM fleet_classes ORDER BY key")
    return {key: _read(content, FleetClass, key) for key, content in found}


def insert_probes(
    connection: Connection, key: tuple[str, str, str], probes: Iterable[ProbeMeasurement]
) -> None:
    """Add probes of (model hash, recipe, machine class key)."""
    rows = [
        (
            *key,
            *_settings_row(probe.settings),
            probe.batch_size,
            probe.measured_at,
            probe.step_time_s,
            probe.num_steps,
            probe.peak_memory_bytes,
        )
        for probe in probes
    ]
    _insert(connection, "probes", f"model, recipe, machine_class, {PROBE_COLUMNS}", rows)
    _delete_old(connection, "probes")


def select_probes(connection: Connection, key: tuple[str, str, str]) -> list[ProbeMeasurement]:
    """Return the probes of (model hash, recipe, machine class key), oldest first."""
    rows = connection.execute(
        f"SELECT {PROBE_COLUMNS} FROM probes WHERE (model, recipe, machine_class) = (?, ?, ?)"
        " ORDER BY measured_at, id",
        key,
    )
    return [ProbeMeasurement(settings_of(row[:4]), *row[4:]) for row in rows]


def select_measured(connection: Connection, machine_class: str) -> list[tuple[ModelProperties, str]]:
    """Return the models and recipes with a batch size that fitted on a machine class (its key)."""
    found = connection.execute(
        f"SELECT DISTINCT {MODEL_COLUMNS}, recipe FROM probes JOIN models ON model = hash"
        " WHERE machine_class = ? AND step_time_s IS NOT NULL",
        (machine_class,),
    )
    return [(ModelProperties(*row[:-1]), row[-1]) for row in found]


def insert_collectives(
    connection: Connection, fleet_class: str, collectives: Iterable[CollectiveMeasurement]
) -> None:
    """Add sums that were timed on a fleet class."""
    rows = [
        (fleet_class, sums.name, sums.num_ranks, sums.num_bytes, sums.seconds, sums.measured_at)
        for sums in collectives
    ]
    _insert(connection, "collectives", f"fleet_class, {COLLECTIVE_COLUMNS}", rows)
    _delete_old(connection, "collectives")


def select_collectives(connection: Connection, fleet_class: str) -> list[CollectiveMeasurement]:
    """Return sums on a fleet class (its key), oldest first."""
    found = connection.execute(
        f"SELECT {COLLECTIVE_COLUMNS} FROM collectives WHERE fleet_class = ? ORDER BY measured_at, id",
        (fleet_class,),
    )
    return [CollectiveMeasurement(*row) for row in found]


def insert_trial(connection: Connection, key: tuple[str, str, str], trial: TrialMeasurement) -> None:
    """Add a trial of (model hash, recipe, fleet class key)."""
    ranks = json.dumps([asdict(rank) for rank in trial.ranks])
    row = (*key, ranks, trial.step_s, trial.samples_per_s, trial.measured_at, trial.predicted_samples_per_s)
    _insert(connection, "trials", f"model, recipe, fleet_class, {TRIAL_COLUMNS}", [row])
    _delete_old(connection, "trials")


def select_trials(connection: Connection, key: tuple[str, str, str]) -> list[TrialMeasurement]:
    """Return the trials of (model hash, recipe, fleet class key), oldest first."""
    found = connection.execute(
        f"SELECT {TRIAL_COLUMNS} FROM trials WHERE (model, recipe, fleet_class) = (?, ?, ?)"
        " ORDER BY measured_at, id",
        key,
    )
    return [trial_of(row) for row in found]


def trial_of(row: tuple[Any, ...]) -> TrialMeasurement:
    """Return the trial in a row of TRIAL_COLUMNS."""
    return TrialMeasurement(_read(row[0], tuple[TrialRank, ...], "trial"), *row[1:])


def settings_of(row: tuple[Any, ...]) -> RuntimeSettings:
    """Return the settings in a row of SETTINGS_COLUMNS."""
    threads, inter_op_threads, is_onednn, micro_batch_size = row
    return RuntimeSettings(threads, inter_op_threads, bool(is_onednn), micro_batch_size)


def delete_unused(connection: Connection) -> None:
    """Delete models and classes without measurements."""
    for table, key, users in (
        ("models", "model", ("probes", "trials")),
        ("machine_classes", "machine_class", ("probes",)),
        ("fleet_classes", "fleet_class", ("collectives", "trials")),
    ):
        used = " UNION ".join(f"SELECT {key} FROM {user}" for user in users)
        column = "hash" if table == "models" else "key"
        connection.execute(f"DELETE FROM {table} WHERE {column} NOT IN ({used})")


def _read(content: str, expected: Any, name: str) -> Any:
    """Return a value from JSON; raises InputError."""
    where = f"measurements, {name}"
    return check_values(parse_json_document(content, where), expected, where)


def _model_row(model: ModelProperties) -> tuple[str | int, ...]:
    return (
        model.hash,
        model.name,
        model.num_parameters,
        model.num_trainable,
        model.num_operations,
        model.input_elements,
    )


def _settings_row(settings: RuntimeSettings) -> tuple[int, ...]:
    return (
        settings.threads,
        settings.inter_op_threads,
        int(settings.is_onednn),
        settings.micro_batch_size,
    )


def _insert(
    connection: Connection, table: str, columns: str, rows: list[tuple[Any, ...]], verb: str = "INSERT"
) -> None:
    places = ", ".join("?" for _ in columns.split(","))
    connection.executemany(f"{verb} INTO {table} ({columns}) VALUES ({places})", rows)


def _delete_old(connection: Connection, table: str) -> None:
    connection.execute(
        f"DELETE FROM {table} WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER"
        f" (PARTITION BY {_REPEATED_BY[table]} ORDER BY measured_at DESC, id DESC) AS age FROM {table})"
        f" WHERE age > {NUM_KEPT})"
    )
