"""What was measured before, as points for a fit; pure."""

from collections.abc import Sequence
from statistics import median

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.fit import Point, fit_step_time
from csdctl.tuning.measurements import ProbeMeasurement, RuntimeSettings


def points_with(probes: Sequence[ProbeMeasurement], settings: RuntimeSettings) -> list[Point]:
    """What fitted of what was probed with `settings`; what a trial has shown is not among it."""
    return [
        Point(one.batch_size, one.step_time_s)
        for one in probes
        if one.step_time_s is not None and one.settings == settings and not one.is_in_step
    ]


def recall_points(known: Sequence[ProbeMeasurement], settings: RuntimeSettings) -> list[Point]:
    """What was probed with `settings`; when that is little, what was with others too, scaled to it.

    Settings that were taken after the batch sizes had been probed have few probes of their own.
    """
    own = points_with(known, settings)
    others = [points_with(known, other) for other in {probe.settings for probe in known} - {settings}]
    most = max(others, key=_num_sizes, default=[])
    if not own or _num_sizes(most) <= _num_sizes(own):
        return own
    fit = fit_step_time(most)
    ratio = median(point.step_time_s / fit.at(point.batch_size) for point in own)
    return [*(Point(one.batch_size, one.step_time_s * ratio) for one in most), *own]


def recall_in_step(
    known: Sequence[ProbeMeasurement], settings: RuntimeSettings, fit: StepTime
) -> tuple[int, float] | None:
    """The newest trial with `settings`: a batch size, and how much longer than `fit` its steps took.

    None when there was no trial with them.
    """
    tried = [one for one in known if one.is_in_step and one.settings == settings]
    if not tried:
        return None
    newest = max(one.measured_at for one in tried)
    shown = [one for one in tried if one.measured_at == newest]
    ratio = median(one.step_time_s / fit.at(one.batch_size) for one in shown if one.step_time_s is not None)
    return max(one.batch_size for one in shown), ratio


def _num_sizes(points: Sequence[Point]) -> int:
    return len({point.batch_size for point in points})
