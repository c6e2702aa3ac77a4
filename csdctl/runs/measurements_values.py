"""Find values in a measurements file that nobody can have measured: SQLite takes any value in any column."""

from collections.abc import Iterator
from sqlite3 import Connection

MAX_COUNT = 10**15
MAX_SECONDS = 10**9
MAX_UNIX_TIME = 10**11
MAX_BATCH_SIZE = 1 << 20
MAX_TEXT = 4096


def _whole(least: int, most: int = MAX_COUNT) -> str:
    return f"typeof({{0}}) = 'integer' AND {{0}} BETWEEN {least} AND {most}"


def _number(most: float, *, is_zero_allowed: bool = False) -> str:
    least = ">=" if is_zero_allowed else ">"
    return f"typeof({{0}}) IN ('real', 'integer') AND {{0}} {least} 0 AND {{0}} <= {most}"


def _or_null(rule: str) -> str:
    return f"{{0}} IS NULL OR ({rule})"


_TEXT = f"typeof({{0}}) = 'text' AND length({{0}}) BETWEEN 1 AND {MAX_TEXT}"
_CONTENT = "typeof({0}) = 'text'"
_TIME = _number(MAX_UNIX_TIME, is_zero_allowed=True)

_RULES = {
    "models": {
        "hash": _TEXT,
        "name": _TEXT,
        "num_parameters": _whole(0),
        "num_trainable": _whole(0),
        "num_operations": _whole(0),
        "input_elements": _whole(0),
    },
    "machine_classes": {"key": _TEXT, "content": _CONTENT},
    "fleet_classes": {"key": _TEXT, "content": _CONTENT},
    "probes": {
        "model": _TEXT,
        "recipe": _TEXT,
        "machine_class": _TEXT,
        "threads": _whole(1, 1024),
        "inter_op_threads": _whole(1, 1024),
        "is_onednn": _whole(0, 1),
        "micro_batch_size": _whole(0, MAX_BATCH_SIZE),
        "batch_size": _whole(1, MAX_BATCH_SIZE),
        "step_time_s": _or_null(_number(MAX_SECONDS)),
        "num_steps": _whole(0),
        "peak_memory_bytes": _or_null(_whole(0)),
        "measured_at": _TIME,
    },
    "collectives": {
        "fleet_class": _TEXT,
        "name": _TEXT,
        "num_ranks": _whole(1, 10**6),
        "num_bytes": _whole(0),
        "seconds": _number(MAX_SECONDS, is_zero_allowed=True),
        "measured_at": _TIME,
    },
    "trials": {
        "model": _TEXT,
        "recipe": _TEXT,
        "fleet_class": _TEXT,
        "ranks": _CONTENT,
        "step_s": _number(MAX_SECONDS),
        "samples_per_s": _number(MAX_COUNT),
        "predicted_samples_per_s": _or_null(_number(MAX_COUNT)),
        "measured_at": _TIME,
    },
}
"""For each column, an SQL condition on `{0}`."""

_PARENTS = (
    ("probes", "model", "models", "hash"),
    ("probes", "machine_class", "machine_classes", "key"),
    ("collectives", "fleet_class", "fleet_classes", "key"),
    ("trials", "model", "models", "hash"),
    ("trials", "fleet_class", "fleet_classes", "key"),
)


def find_impossible_values(connection: Connection) -> Iterator[str]:
    """Yield a description of the first impossible value of every column."""
    for table, rules in _RULES.items():
        for column, rule in rules.items():
            shown = f"substr(quote({column}), 1, 40)"
            wrong = f"({rule.format(column)}) IS NOT TRUE"
            for row, found in connection.execute(f"SELECT rowid, {shown} FROM {table} WHERE {wrong} LIMIT 1"):
                yield f"row {row} of {table} has `{column}` {found}"
    for table, column, parent, key in _PARENTS:
        query = f"SELECT rowid FROM {table} WHERE {column} NOT IN (SELECT {key} FROM {parent}) LIMIT 1"
        for (row,) in connection.execute(query):
            yield f"row {row} of {table} has a `{column}` that is not in {parent}"
