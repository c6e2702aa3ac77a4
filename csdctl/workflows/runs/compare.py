"""Compare two runs: what they were given, and what came of it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
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
"""Of manifest.json; what follows from them is left out."""
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
    settings = [dict(_settings(run.load_manifest())) for run in runs]
    results = [dict(_results(run)) for run in runs]
    return (
        *runs,
        [*_differences(*settings, is_result=False), *_differences(*results, is_result=True)],
    )


def _settings(manifest: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in _flatten({key: manifest.get(key) for key in SETTINGS}):
        if not name.startswith(NO_SETTINGS):
            yield name, value


def _results(run: RunDirectory) -> Iterator[tuple[str, object]]:
    if run.events.exists():
        summary = asdict(summarize_run(run))
        yield from ((name, summary[name]) for name in RESULTS)


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


def _differences(
    first: Mapping[str, object], second: Mapping[str, object], *, is_result: bool
) -> Iterator[Difference]:
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            yield Difference(name, first.get(name), second.get(name), is_result)
