"""Which other runtime settings to probe, and when to take them; pure.

Other settings are measured at a batch size that was measured with the usual ones, on one machine of a class,
in two probes: a short first one, and a second one unless the first was hopelessly slow.
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
"""Other settings are taken when a probe shows this share less time; less may be its noise."""
COMPARABLE_FACTOR = 4
"""Other settings are probed with a batch of at least this part of the planned one, where one was measured:
with few samples, other settings may win."""
PROBES_PER_VARIANT = 2
"""At most. This many probes per class are held back for settings; further variants take what is left."""
WARM_UP_PROBE_S = 0.5
MAX_WARM_UP_RATIO = 1.5
"""Other settings whose first probe takes more than this many times the usual step get no second one."""
MANY_THREADS = 4


@dataclass(frozen=True)
class SettingsSearch:
    """What to compare, by class: the batch size, and the settings, most promising first."""

    sizes: Mapping[str, int]
    variants: Mapping[str, tuple[RuntimeSettings, ...]]


@dataclass(frozen=True)
class SettingsProbe:
    """One machine that measures with other settings."""

    machine: str
    class_name: str
    settings: RuntimeSettings
    batch_size: int
    usual_step_s: float
    """With the settings that the class has now."""

    def is_promising(self, warm_up_s: float) -> bool:
        """Return whether a first step of `warm_up_s` seconds leaves a second probe worthwhile."""
        return warm_up_s < self.usual_step_s * MAX_WARM_UP_RATIO


def plan_settings_search(model: FleetModel, limits: Limits) -> SettingsSearch:
    """Return what to compare: the settings of classes that are new, at a size that was measured.

    Raises TuningError when no plan keeps to the limits.
    """
    planned = choose_class_sizes(model, limits, model.step_times())
    sizes: dict[str, int] = {}
    for name, one in model.classes.items():
        measured = [size for size in one.sizes if size <= planned.get(name, 0)]
        if measured and not one.has_earlier_trial:
            comparable = [size for size in measured if size * COMPARABLE_FACTOR >= planned[name]]
            sizes[name] = min(comparable, default=max(measured))
    return SettingsSearch(sizes, {name: _variants(model.classes[name].settings) for name in sizes})


def next_settings(model: FleetModel, search: SettingsSearch, round_number: int) -> list[SettingsProbe]:
    """Return the probes of round `round_number`, from 0; none: the search is over."""
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
    """Return the share of the usual time that the other settings take; None: not little enough."""
    ratio = step_time_s / probe.usual_step_s
    return ratio if ratio < 1 - MIN_SETTINGS_GAIN else None


def learn_settings(
    model: FleetModel, probe: SettingsProbe, num_probes: int, step_time_s: float | None
) -> FleetModel:
    """Return the model after `num_probes` with other settings: with them when they are clearly faster.

    `step_time_s` of the second probe; None: there was none, or the batch did not fit in memory. That is not
    kept, because the process with the usual settings may have held the memory.
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
