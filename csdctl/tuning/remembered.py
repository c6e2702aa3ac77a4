"""What was measured before, as points for a fit; pure."""

from collections.abc import Sequence
from statistics import median

from csdctl.tuning.fit import Point, fit_step_time
from csdctl.tuning.measured import Probe, Settings

IN_STEP_WEIGHT = 24
"""Of a trial's time in a fit, against a probe's: beside others that compute as in training, a machine takes
what it will take; a probe is made while the others do little. Three times all probes of a class together."""


def points_with(probes: Sequence[Probe], settings: Settings) -> list[Point]:
    """The points that were measured with `settings`, as they counted when they were new."""
    return [
        Point(one.batch_size, one.step_time_s, _weigh(one))
        for one in probes
        if one.step_time_s is not None and one.settings == settings
    ]


def recall_points(known: Sequence[Probe], settings: Settings) -> list[Point]:
    """What was measured with `settings`; when that is little, what was with others too, scaled to it.

    Settings that were taken after the batch sizes had been probed have few probes of their own.
    """
    own = points_with(known, settings)
    others = [points_with(known, other) for other in {probe.settings for probe in known} - {settings}]
    most = max(others, key=_num_sizes, default=[])
    if not own or _num_sizes(most) <= _num_sizes(own):
        return own
    fit = fit_step_time(most)
    ratio = median(point.step_time_s / fit.at(point.batch_size) for point in own)
    return [*(Point(one.batch_size, one.step_time_s * ratio, one.weight) for one in most), *own]


def _num_sizes(points: Sequence[Point]) -> int:
    return len({point.batch_size for point in points})


def _weigh(probe: Probe) -> int:
    """What a trial left has no peak of memory: it was no process of its own that was measured."""
    return IN_STEP_WEIGHT if probe.peak_memory_bytes is None else 1
