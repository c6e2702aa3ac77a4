"""A run as named numbers over time, for the tools that people already look at."""

from collections.abc import Iterator
from dataclasses import dataclass

from csdctl.reporting.results import RunResults


@dataclass(frozen=True)
class Scalar:
    """A number of a run at a time."""

    name: str
    """With `/` between its parts: epoch/loss, rank_3/wait_share."""
    step: int
    """The epoch, or the second since the start."""
    time_s: float
    """Unix time."""
    value: float


def scalars_of(run: RunResults) -> Iterator[Scalar]:
    """Yield the results of each epoch, then rates and waiting of each rank over time."""
    series = run.series
    for point in series.epochs:
        for name, value in point.results.items():
            yield Scalar(f"epoch/{name}", point.epoch, point.time_s, value)
        yield Scalar("epoch/samples_per_s", point.epoch, point.time_s, point.samples_per_s)
        if point.learning_rate is not None:
            yield Scalar("epoch/learning_rate", point.epoch, point.time_s, point.learning_rate)
    for change in series.batch_sizes:
        for rank, size in change.sizes.items():
            second = round(change.time_s - series.start_s)
            yield Scalar(f"rank_{rank}/batch_size", second, change.time_s, size)
    for rank, (samples, spent) in enumerate(zip(series.samples, series.spent_s, strict=True)):
        for number, count in enumerate(samples):
            since_s = (number + 1) * series.interval_s
            time_s, second = series.start_s + since_s, round(since_s)
            yield Scalar(f"rank_{rank}/samples_per_s", second, time_s, count / series.interval_s)
            for kind, seconds in spent.items():
                share = min(seconds[number] / series.interval_s, 1.0)
                yield Scalar(f"rank_{rank}/{kind}_share", second, time_s, share)


def parameters_of(run: RunResults) -> dict[str, str]:
    """Return what the run was set to, by name."""
    summary = run.summary
    parameters = {
        "strategy": summary.strategy,
        "method": summary.method,
        "num_ranks": str(summary.num_ranks),
        "global_batch": str(summary.global_batch),
        "source": run.measured,
        "csdctl": str(run.manifest.get("csdctl", "")),
    }
    recipe = run.manifest.get("recipe")
    if isinstance(recipe, dict):
        parameters |= {f"recipe.{key}": str(value)[:250] for key, value in recipe.items()}
    return parameters
