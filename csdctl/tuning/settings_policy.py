"""Which other runtime settings to probe, and when to use them; pure.

Other settings are measured at a batch size that was measured with the default settings, on one machine of a
class, in two probes: a short first probe, and a second probe unless the first was much slower.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from csdctl.tuning.class_model import MAX_PROBES, ClassModel
from csdctl.tuning.fleet_model import FleetModel
from csdctl.tuning.measurements import RuntimeSettings
from csdctl.tuning.plan_choice import choose_class_sizes
from csdctl.tuning.search import Limits

MIN_SETTINGS_GAIN = 0.15
"""Other settings are used when a probe takes at least this share less time; less may be noise."""
COMPARABLE_FACTOR = 4
"""Other settings are probed with at least 1/COMPARABLE_FACTOR of the planned batch, where one was measured:
with few samples, different settings may be faster."""
PROBES_PER_VARIANT = 2
"""Maximum number of probes per variant. As many are reserved per class; more variants use leftover probes."""
WARM_UP_PROBE_S = 0.5
MAX_WARM_UP_RATIO = 1.5
"""Settings whose first probe takes more than this multiple of the usual step get no second probe."""
MANY_THREADS = 4


@dataclass(frozen=True)
class SettingsSearch:
    """The comparisons by class: the batch size, and the settings, most promising first."""

    sizes: Mapping[str, int]
    variants: Mapping[str, tuple[RuntimeSettings, ...]]


@dataclass(frozen=True)
class SettingsProbe:
    """A probe with other settings on one machine."""

    machine: str
    class_name: str
    settings: RuntimeSettings
    batch_size: int
    usual_step_s: float
    """Seconds of a step with the current settings of the class."""

    def is_promising(self, warm_up_s: float) -> bool:
        """Return whether a second probe is worthwhile after a first step of `warm_up_s` seconds."""
        return warm_up_s < self.usual_step_s * MAX_WARM_UP_RATIO


def plan_settings_search(model: FleetModel, limits: Limits) -> SettingsSearch:
    """Return what to compare: settings of classes without an earlier trial, at a measured size.

    Raises TuningError when no plan satisfies the limits.
    """
    planned = choose_class_sizes(model, limits, model.step_times())
    sizes: dict[str, int] = {}
    for name, known in model.classes.items():
        measured = [size for size in known.sizes if size <= planned.get(name, 0)]
        if measured and not known.has_earlier_trial:
            comparable = [size for size in measured if size * COMPARABLE_FACTOR >= planned[name]]
            sizes[name] = min(comparable, default=max(measured))
    return SettingsSearch(sizes, {name: _variants(model.classes[name].settings) for name in sizes})


def next_settings(model: FleetModel, search: SettingsSearch, round_number: int) -> list[SettingsProbe]:
    """Return the probes of round `round_number`, counted from 0; empty when the search is over."""
    probes = []
    for name, variants in search.variants.items():
        known = model.classes[name]
        if round_number < len(variants) and known.num_new_probes + PROBES_PER_VARIANT <= MAX_PROBES:
            machine = known.machines[round_number % len(known.machines)]
            size = search.sizes[name]
            settings = variants[round_number]
            probes.append(SettingsProbe(machine, name, settings, size, _usual_step_s(known, size)))
    return probes


def time_ratio(probe: SettingsProbe, step_time_s: float) -> float | None:
    """Return the time of the other settings relative to the usual time; None: the gain is too small."""
    ratio = step_time_s / probe.usual_step_s
    return ratio if ratio < 1 - MIN_SETTINGS_GAIN else None


def learn_settings(
    model: FleetModel, probe: SettingsProbe, num_probes: int, step_time_s: float | None
) -> FleetModel:
    """Return the model after `num_probes` with other settings, which it adopts when they are clearly faster.

    `step_time_s` is that of the second probe; None: no second probe, or the batch did not fit in memory. The
    latter is not recorded, because the process with the usual settings may have held the memory.
    """
    known = model.classes[probe.class_name]
    ratio = None if step_time_s is None else time_ratio(probe, step_time_s)
    changed = known if ratio is None else known.with_settings(probe.settings, ratio)
    changed = replace(changed, num_new_probes=known.num_new_probes + num_probes)
    return model.with_class(probe.class_name, changed)


def _usual_step_s(known: ClassModel, size: int) -> float:
    return median(point.step_time_s for point in known.points if point.batch_size == size)


def _variants(settings: RuntimeSettings) -> tuple[RuntimeSettings, ...]:
    variants = [replace(settings, is_onednn=not settings.is_onednn)]
    if settings.threads >= MANY_THREADS:  # two hardware threads share the units of one core
        variants.append(replace(settings, threads=settings.threads // 2))
    if settings.threads > 1:
        variants.append(replace(settings, inter_op_threads=2))
    return tuple(variants)
