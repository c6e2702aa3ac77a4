"""Earlier measurements as the start of a new tuning; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.class_model import ClassModel
from csdctl.tuning.measurements import ModelFeatures, ProbeMeasurement, RuntimeSettings, TrialMeasurement
from csdctl.tuning.memory import merge_peaks
from csdctl.tuning.step_time_fit import Point, fit_step_time
from csdctl.tuning.transfer import transfer_step_time

RecalledTrial = tuple[Sequence[tuple[StepTime, int]], float]
"""Step time and batch size of each rank, the host first, and the seconds of a step."""


def recall_class(blank: ClassModel, known: Sequence[ProbeMeasurement], threads: int = 0) -> ClassModel:
    """Return `blank` with the `known` probes of this model, recipe and machine class, oldest first.

    Settings are those of the newest trial; with `threads` set by the user (0: not set), of the newest one
    with that many.
    """
    tried = [one for one in known if one.is_from_trial and threads in (0, one.settings.threads)]
    settings = tried[-1].settings if tried else blank.settings
    too_large, peaks = _recall_memory([one for one in known if one.settings == settings])
    points = recall_points(known, settings)
    recalled = replace(blank, settings=settings, too_large=too_large, peaks=peaks, points=tuple(points))
    if not points:
        return recalled
    # A tuning that was interrupted has probes and no trial.
    recalled = replace(recalled, has_earlier_trial=bool(tried))
    shown = recall_in_step(known, settings, fit_step_time(points))
    return recalled.with_trial(*shown) if shown else recalled


def guess_class(
    blank: ClassModel,
    features: ModelFeatures,
    similar: Sequence[tuple[ModelFeatures, Sequence[ProbeMeasurement]]],
) -> ClassModel:
    """Return `blank` with a guess from `similar` models on the same machine class, nearest first."""
    neighbours = [
        (other, fit_step_time(points))
        for other, probes in similar
        if (points := points_with(probes, blank.settings))
    ]
    return replace(
        blank,
        guess=transfer_step_time(features, neighbours),
        guessed_from=tuple(dict.fromkeys(other.short_name for other, _ in neighbours)),
    )


def recall_trial(
    trials: Sequence[TrialMeasurement], step_times: Mapping[str, StepTime]
) -> RecalledTrial | None:
    """Return the newest of `trials`, oldest first, of several ranks; `step_times` by class name.

    None when there was none, or one with a class that `step_times` lacks.
    """
    of_several = [trial for trial in trials if len(trial.ranks) > 1]
    if not of_several:
        return None
    host, *nodes = of_several[-1].ranks
    ranks = [(HOST_NAME, host.batch_size), *((rank.machine_class, rank.batch_size) for rank in nodes)]
    if any(size and name not in step_times for name, size in ranks):
        return None
    # An idle rank computes nothing, whatever its step time, and takes part in the sum.
    any_step_time = next(iter(step_times.values()))
    return [(step_times.get(name, any_step_time), size) for name, size in ranks], of_several[-1].step_s


def points_with(probes: Sequence[ProbeMeasurement], settings: RuntimeSettings) -> list[Point]:
    """Return the probes with `settings` that fitted in memory, without steps from trials."""
    return [
        Point(one.batch_size, one.step_time_s)
        for one in probes
        if one.step_time_s is not None and one.settings == settings and not one.is_from_trial
    ]


def recall_points(known: Sequence[ProbeMeasurement], settings: RuntimeSettings) -> list[Point]:
    """Return the probes with `settings`; where they are few, those with other settings too, scaled to them.

    Settings that were taken after the batch sizes had been probed have few probes of their own.
    """
    own = points_with(known, settings)
    others = [points_with(known, other) for other in {probe.settings for probe in known} - {settings}]
    most = max(others, key=_num_sizes, default=[])
    if not own or _num_sizes(most) <= _num_sizes(own):
        return own
    fitted = fit_step_time(most)
    ratio = median(point.step_time_s / fitted.at(point.batch_size) for point in own)
    return [*(Point(one.batch_size, one.step_time_s * ratio) for one in most), *own]


def recall_in_step(
    known: Sequence[ProbeMeasurement], settings: RuntimeSettings, step_time: StepTime
) -> tuple[int, float] | None:
    """Return a batch size of the newest trial with `settings`, and its step's time over `step_time`.

    None when there was no trial with them.
    """
    tried = [one for one in known if one.is_from_trial and one.settings == settings]
    if not tried:
        return None
    newest = max(one.measured_at for one in tried)
    shown = [one for one in tried if one.measured_at == newest]
    ratio = median(
        one.step_time_s / step_time.at(one.batch_size) for one in shown if one.step_time_s is not None
    )
    return max(one.batch_size for one in shown), ratio


def _recall_memory(known: Sequence[ProbeMeasurement]) -> tuple[int | None, dict[int, int]]:
    """Return the smallest size that did not fit in memory, and the peaks of those that did."""
    too_large: int | None = None
    peaks: dict[int, int] = {}
    for probe in known:
        if probe.step_time_s is None:
            too_large = min(probe.batch_size, too_large or probe.batch_size)
        elif probe.peak_memory_bytes:
            peaks = merge_peaks(peaks, {probe.batch_size: probe.peak_memory_bytes})
            if too_large and probe.batch_size >= too_large:
                too_large = None  # another process had filled the memory that day
    return too_large, peaks


def _num_sizes(points: Sequence[Point]) -> int:
    return len({point.batch_size for point in points})
