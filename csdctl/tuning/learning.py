"""Updates of the fleet model after an observation: functions from model to model; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from csdctl.perfmodel.step_time import StepTime
from csdctl.tuning.collective_fit import fit_collective
from csdctl.tuning.fleet_model import FleetModel
from csdctl.tuning.measurements import CollectiveMeasurement
from csdctl.tuning.observations import ProbeOutcome, TriedPlan
from csdctl.tuning.scaling_curve import calibrate_overhead

OUTLIER_TOLERANCE = 0.1
"""A machine that differs from its class by more than this share in a trial gets a separate step time."""


def learn_collectives(model: FleetModel, measured: Sequence[CollectiveMeasurement]) -> FleetModel:
    """Return the model with the cost of a sum fitted to `measured`."""
    return replace(model, collective_cost=fit_collective(measured))


def learn_probes(model: FleetModel, outcomes: Mapping[str, ProbeOutcome]) -> FleetModel:
    """Return the model updated with one round of probes, by machine, with the settings of its class."""
    classes = {
        name: known.with_probes([outcomes[machine] for machine in known.machines if machine in outcomes])
        for name, known in model.classes.items()
    }
    return replace(model, classes=classes)


def learn_overhead(
    model: FleetModel, trial: tuple[Sequence[tuple[StepTime, int]], float] | None
) -> FleetModel:
    """Return the model with the overhead measured in an earlier trial; None: no overhead.

    `trial`: step time and batch size of each rank, the host first, and the seconds of a step.
    """
    if trial is None:
        return replace(model, overhead_factor=1.0)
    ranks, step_s = trial
    return replace(model, overhead_factor=calibrate_overhead(ranks, step_s, model.sum_s(len(ranks))))


def learn_trial(model: FleetModel, tried: TriedPlan) -> FleetModel:
    """Return the model updated with a trial: in-step factors of classes, outliers, and step overhead."""
    compute_s, sizes = tried.compute_s, tried.best.batch_sizes
    classes, outliers = dict(model.classes), dict(model.outlier_factors)
    for name, known in model.classes.items():
        step_time = known.step_time()
        training = [machine for machine in known.machines if machine in sizes]
        if not training:
            continue
        ratios = {machine: compute_s[machine] / step_time.at(sizes[machine]) for machine in training}
        usual = median(ratios.values())
        classes[name] = known.with_trial(max(sizes[machine] for machine in training), usual)
        outliers |= {machine: _outlier_factor(ratio / usual) for machine, ratio in ratios.items()}
    learned = replace(model, classes=classes, outlier_factors=outliers)
    step_times = learned.machine_step_times()
    ranks = [(step_times[machine], size) for machine, size in sizes.items()]
    sum_s = model.sum_s(len(tried.ranks))
    return replace(learned, overhead_factor=calibrate_overhead(ranks, tried.result.step_s, sum_s))


def learn_out_of_memory(model: FleetModel, machine: str, batch_size: int) -> FleetModel:
    """Return the model after a rank ran out of memory: its class computes smaller micro-batches."""
    return model.with_class(model.class_name(machine), model.class_of(machine).with_out_of_memory(batch_size))


def _outlier_factor(ratio: float) -> float:
    return ratio if abs(ratio - 1) > OUTLIER_TOLERANCE else 1.0
