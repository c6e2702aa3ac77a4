"""Earlier measurements as the start of a new tuning; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from csdctl.fleet.model import HOST_NAME
from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.fits import Point, fit_step_time
from csdctl.tuning.fleet_model import ClassModel, merge_peaks
from csdctl.tuning.measurements import ProbeMeasurement, TrialMeasurement

RecalledTrial = tuple[Sequence[tuple[StepTime, int]], float]
"""Step time and batch size of each rank, the host first, and the seconds of a step."""


def recall_class(blank: ClassModel, known: Sequence[ProbeMeasurement], threads: int = 0) -> ClassModel:
    """Return `blank` with the `known` probes of this model, recipe and machine class, oldest first.

    Settings are those of the newest trial, with `threads` if the user set that (0: not set). Probes with
    other settings do not count.
    """
    tried = [probe for probe in known if probe.is_from_trial and threads in (0, probe.settings.threads)]
    blank = replace(blank, settings=tried[-1].settings) if tried else blank
    known = [probe for probe in known if probe.settings == blank.settings]
    too_large, peaks = _recall_memory(known)
    points = points_of(known)
    recalled = replace(blank, too_large=too_large, peaks=peaks, points=tuple(points))
    # An interrupted tuning has probes but no trial.
    shown = recall_in_step(known, fit_step_time(points)) if points else None
    return recalled.with_trial(*shown) if shown else recalled


def recall_trial(
    trials: Sequence[TrialMeasurement], step_times: Mapping[str, StepTime]
) -> RecalledTrial | None:
    """Return the newest of `trials`, oldest first, of several ranks; `step_times` by class name.

    None without such a trial, or when it has a class that is not in `step_times`.
    """
    of_several = [trial for trial in trials if len(trial.ranks) > 1]
    if not of_several:
        return None
    host, *nodes = of_several[-1].ranks
    ranks = [(HOST_NAME, host.batch_size), *((rank.machine_class, rank.batch_size) for rank in nodes)]
    if any(size and name not in step_times for name, size in ranks):
        return None
    # An idle rank computes nothing, but takes part in the sum; its step time does not matter.
    any_step_time = next(iter(step_times.values()))
    return [(step_times.get(name, any_step_time), size) for name, size in ranks], of_several[-1].step_s


def points_of(probes: Sequence[ProbeMeasurement]) -> list[Point]:
    """Return the probes that fitted in memory, without steps from trials."""
    return [
        Point(probe.batch_size, probe.step_time_s)
        for probe in probes
        if probe.step_time_s is not None and not probe.is_from_trial
    ]


def recall_in_step(known: Sequence[ProbeMeasurement], step_time: StepTime) -> tuple[int, float] | None:
    """Return a batch size of the newest trial and its time relative to `step_time`; None without a trial."""
    tried = [probe for probe in known if probe.is_from_trial]
    if not tried:
        return None
    newest = max(probe.measured_at for probe in tried)
    shown = [probe for probe in tried if probe.measured_at == newest]
    ratio = median(
        probe.step_time_s / step_time.at(probe.batch_size) for probe in shown if probe.step_time_s is not None
    )
    return max(probe.batch_size for probe in shown), ratio


def _recall_memory(known: Sequence[ProbeMeasurement]) -> tuple[int | None, dict[int, int]]:
    """Return the smallest size that did not fit in memory, and the peaks of the sizes that did."""
    too_large: int | None = None
    peaks: dict[int, int] = {}
    for probe in known:
        if probe.step_time_s is None:
            too_large = min(probe.batch_size, too_large or probe.batch_size)
        elif probe.peak_memory_bytes:
            peaks = merge_peaks(peaks, {probe.batch_size: probe.peak_memory_bytes})
            if too_large and probe.batch_size >= too_large:
                too_large = None  # another process had used the memory at that time
    return too_large, peaks
