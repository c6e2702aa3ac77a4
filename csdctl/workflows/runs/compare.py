"""Compare two runs: what they were given, and what came of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from csdctl.reporting.results import summarize_run
from csdctl.runs.directory import ProjectDirectory, RunDirectory

SETTINGS = (
    "csdctl",
    "python",
    "versions",
    "job",
    "recipe",
    "noise",
    "data",
    "strategy",
    "cut",
    "features",
    "plan",
)
"""Keys of manifest.json that are compared; what follows from them is left out."""
NO_SETTINGS = ("plan.made_for", "plan.strategies", "plan.predicted", "plan.measuring_s", "plan.num_probes")
RESULTS = (
    "state",
    "epochs",
    "steps",
    "samples",
    "training_s",
    "samples_per_s",
    "efficiency",
    "loss",
    "accuracy",
    "validation_loss",
    "validation_accuracy",
    "lost_nodes",
    "num_rebalanced",
)


@dataclass(frozen=True)
class Difference:
    """One value in which two runs differ; None where a run has none."""

    name: str
    first: object
    second: object
    is_result: bool


def compare_runs(
    project: ProjectDirectory, first: str, second: str
) -> tuple[RunDirectory, RunDirectory, list[Difference]]:
    """Return two runs and the values in which they differ, settings before results; raises InputError."""
    runs = project.find_run(first), project.find_run(second)
    found = []
    for read in (_settings, _results):
        one, other = (read(run) for run in runs)
        found += [
            Difference(name, one.get(name), other.get(name), read is _results)
            for name in dict.fromkeys([*one, *other])
            if one.get(name) != other.get(name)
        ]
    return *runs, found


def _settings(run: RunDirectory) -> dict[str, object]:
    manifest: Mapping[str, Any] = run.load_manifest()
    values = _flatten({key: manifest.get(key) for key in SETTINGS})
    return {name: value for name, value in values if not name.startswith(NO_SETTINGS)}


def _results(run: RunDirectory) -> dict[str, object]:
    summary = summarize_run(run) if run.events.exists() else None
    return {name: getattr(summary, name) for name in RESULTS} if summary else {}


def _flatten(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield nested values by a name such as plan.host.batch_size; ranks by their node."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and all(isinstance(inner, Mapping) and "node" in inner for inner in value):
        for inner in value:
            yield from _flatten(inner, f"{name}.{inner['node']}")
    else:
        yield name, value
