"""Tuning by fit: few probes of each machine class, the cost of a sum, then a trial of the best plan.

The model of the fleet is an immutable value (csdctl/tuning/fleet_model.py). Each round measures, stores the
measurements in the measurements file, and continues with the model updated from them. A second tuning run
starts from the file: it needs no probe, and one trial confirms its plan.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from csdctl.errors import OutOfMemoryError
from csdctl.notify import Say
from csdctl.perfmodel.prediction import calibrate_overhead
from csdctl.tuning.fits import Point, fit_collective
from csdctl.tuning.fleet_model import (
    FleetModel,
    ProbeOutcome,
    TriedPlan,
    learn_probes,
    learn_trial,
)
from csdctl.tuning.measurements import CollectiveMeasurement, describe_runtime
from csdctl.tuning.plan_choice import choose_equal_plan, choose_plan, plan_ranks, predict_samples_per_s
from csdctl.tuning.probe_policy import (
    limit_sizes,
    next_probes,
    next_settings,
    plan_settings_search,
    settings_gain,
)
from csdctl.tuning.search import BestPlan, Limits
from csdctl.worker.protocol.orders import MAX_TIMED_SUM_S
from csdctl.worker.protocol.probe import ProbeRequest
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.tune.fleet_measurements import FleetMeasurements
from csdctl.workflows.tune.probing import FleetMeasurer

SUM_BYTES = (1 << 16, 1 << 20, 1 << 23)
"""Sizes of the vectors whose sums are timed, besides the model's own."""
TRIAL_S = 5.0
MIN_STEPS, MAX_STEPS = 2, 1000
"""Limits of the number of steps of a trial."""
MAX_TRIALS = 2
MAX_OOM_RETRIES = 3
"""Trials in which a rank runs out of memory before tuning fails."""
MIN_GAIN_FOR_TRIAL = 0.03
"""A trial may lead to another plan; that plan is tried too when it is better by more than this share."""


@dataclass(frozen=True)
class TunedFleet:
    """The result of a tuning run."""

    model: FleetModel
    tried: TriedPlan
    """The plan that reached the most samples/s in a trial."""
    gain: float | None = None
    """Gain in samples/s over the best equal batch size, as a share, at least 0; None: no such plan."""


@dataclass(frozen=True)
class FitTuner:
    """The rounds of a tuning run: each takes a model of the fleet, and returns the updated model."""

    measurer: FleetMeasurer
    measurements: FleetMeasurements
    limits: Limits
    say: Say
    is_exploring: bool = True
    probe_duration_s: float = 1.0

    def tune(self, model: FleetModel) -> TunedFleet:
        """Measure until the best plan has been tried.

        Raises TuningError when no plan is within the limits, and what probes and the ranks of a trial raise.
        """
        model = self._measure_collectives(model)
        model = self._measure_steps(limit_sizes(model, self.limits))
        if self.is_exploring:
            model = self._measure_steps(self._explore_settings(model))
        factor = 1.0
        if recalled := self.measurements.recall_trial(model.step_times()):
            ranks, step_s = recalled
            factor = calibrate_overhead(ranks, step_s, model.sum_s(len(ranks)))
        return self._confirm(replace(model, overhead_factor=factor))

    def _measure_collectives(self, model: FleetModel) -> FleetModel:
        num_ranks = len(model.machines) + (not model.is_host_training)
        known = self.measurements.collectives()
        if not any(_covers(sums, num_ranks, model.vector_bytes) for sums in known):
            self.say(f"timing sums over {num_ranks} ranks")
            sizes = [
                (ranks, size)
                for ranks in sorted({min(2, num_ranks), num_ranks})
                for size in sorted({*SUM_BYTES, model.vector_bytes})
            ]
            known = [*known, *self.measurements.store_collectives(self.measurer.time_sums(sizes))]
        model = replace(model, collective_cost=fit_collective(known))
        self.say(
            f"a sum of the model's {model.vector_bytes / 1e6:.1f} MB over {num_ranks} ranks takes "
            f"{model.sum_s(num_ranks) * 1000:.1f} ms"
        )
        return model

    def _measure_steps(self, model: FleetModel) -> FleetModel:
        """Probe until the step time of every class is known where it matters."""
        while sizes := next_probes(model, self.limits):
            outcomes = self._probe(
                {name: (model.class_of(name).settings, sizes.get(name)) for name in model.machines}
            )
            self.measurements.store_probes(model, outcomes)
            model = learn_probes(model, outcomes)
        return model

    def _probe(self, probes: Mapping[str, tuple[Runtime, int | None]]) -> dict[str, ProbeOutcome]:
        """Start machines with the settings, and measure those with a batch size."""
        self.measurer.switch({name: settings for name, (settings, _) in probes.items()})
        # A new size costs one step to allocate memory and choose kernels; the next one shows its time.
        return self.measurer.probe(
            {
                name: ProbeRequest(size, min_steps=1, min_duration_s=self.probe_duration_s, warm_up_steps=1)
                for name, (_, size) in probes.items()
                if size
            }
        )

    def _explore_settings(self, model: FleetModel) -> FleetModel:
        """Probe other runtime settings of new classes, and select those that are clearly faster."""
        search = plan_settings_search(model, self.limits)
        while True:
            probes, search = next_settings(model, search)
            if not probes:
                return model
            outcomes = self._probe(probes)
            others = [name for name in probes if probes[name][0] != model.class_of(name).settings]
            usual = {name: outcome for name, outcome in outcomes.items() if name not in others}
            self.measurements.store_probes(model, usual)
            model = learn_probes(model, usual)
            for name in others:
                model = self._compare_settings(model, name, probes[name][0], outcomes[name])

    def _compare_settings(
        self, model: FleetModel, machine: str, settings: Runtime, outcome: ProbeOutcome
    ) -> FleetModel:
        """Return the model after a probe with other settings, which the class takes if they are faster."""
        known = model.class_of(machine)
        known = replace(known, num_new_probes=known.num_new_probes + 1)
        if outcome.step_time_s is not None:
            self.measurements.store_class_probes(machine, settings, [outcome])
            probed = Point(outcome.batch_size, outcome.step_time_s)
            if gain := settings_gain(known, probed):
                self.say(f"{machine}: {describe_runtime(settings)}: takes {gain:.0%} less time: selected")
                known = replace(known, settings=settings, points=(probed,))
        return model.with_class(model.class_name(machine), known)

    def _confirm(self, model: FleetModel) -> TunedFleet:
        """Try the best plan, and another plan when the trial predicts a gain; return the better one."""
        tried: list[TriedPlan] = []
        num_oom = 0
        while True:
            best = choose_plan(model, self.limits)
            try:
                tried.append(self._try(model, best))
            except OutOfMemoryError as error:
                num_oom += 1
                if num_oom > MAX_OOM_RETRIES or error.node not in best.batch_sizes:
                    raise
                model = self._limit_memory(model, error.node, best.batch_sizes[error.node])
                continue
            model = learn_trial(model, tried[-1])
            self.measurements.store_trial(model, tried[-1])
            gain = self._gain_of_another(model, best)
            is_last = not self.measurer.num_probes or len(tried) == MAX_TRIALS
            if is_last or gain < MIN_GAIN_FOR_TRIAL:
                return self._compare_with_equal(model, max(tried, key=_rate))

    def _compare_with_equal(self, model: FleetModel, tried: TriedPlan) -> TunedFleet:
        """Return the tried plan, or that of equal batch sizes if these are faster.

        These are tried only when the model, which was fitted to the trials before, predicts that they are.
        """
        equal = choose_equal_plan(model, self.limits)
        if equal is None:
            return TunedFleet(model, tried)
        rate, num_samples = equal.prediction.samples_per_s, sum(equal.batch_sizes.values())
        is_allowed = self.limits.global_batch in (None, num_samples)
        if rate > _rate(tried) and is_allowed and equal.batch_sizes != tried.best.batch_sizes:
            size = next(iter(equal.batch_sizes.values()))
            self.say(f"equal batch sizes of {size} are predicted to be faster: trying them")
            with suppress(OutOfMemoryError):
                other = self._try(model, equal)
                model, rate = learn_trial(model, other), _rate(other)
                self.measurements.store_trial(model, other)
                tried = max(tried, other, key=_rate)
        return TunedFleet(model, tried, max(0.0, _rate(tried) / rate - 1))

    def _try(self, model: FleetModel, best: BestPlan) -> TriedPlan:
        ranks = plan_ranks(model, best)
        num_steps = min(MAX_STEPS, max(MIN_STEPS, round(TRIAL_S / best.prediction.step_s)))
        return TriedPlan(best, ranks, self.measurer.run_trial(ranks, num_steps))

    def _limit_memory(self, model: FleetModel, machine: str, batch_size: int) -> FleetModel:
        """Continue with smaller micro-batches on `machine` after its rank ran out of memory in a trial.

        The failure is not stored as a measurement: another process on that machine may be the cause.
        """
        at_once = model.class_of(machine).limit_at_once(batch_size)
        known = model.class_of(machine).with_out_of_memory(batch_size)
        model = model.with_class(model.class_name(machine), known)
        self.say(
            f"{machine}: {at_once} samples at once did not fit in memory beside the other ranks; "
            f"planning for at most {known.max_at_once}"
        )
        return model

    def _gain_of_another(self, model: FleetModel, best: BestPlan) -> float:
        """Return the predicted gain of the plan that is best now over the one that was tried."""
        rate = choose_plan(model, self.limits).prediction.samples_per_s
        return rate / predict_samples_per_s(model, best.batch_sizes) - 1


def _rate(tried: TriedPlan) -> float:
    return tried.result.samples_per_s


def _covers(sums: CollectiveMeasurement, num_ranks: int, num_bytes: int) -> bool:
    """Return whether a sum over the ranks was timed that is as large, or nearly too slow to be timed."""
    forecast_s = sums.seconds * num_bytes / max(1, sums.num_bytes)
    return sums.num_ranks == num_ranks and (sums.num_bytes >= num_bytes or forecast_s > MAX_TIMED_SUM_S)
