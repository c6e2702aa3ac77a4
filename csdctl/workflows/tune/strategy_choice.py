"""The strategy of a plan: data-parallel, features or split, whichever takes the least time for the job."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from csdctl.errors import CsdctlError, InputError, option
from csdctl.fleet.model import HOST_NAME
from csdctl.reporting.numbers import format_seconds
from csdctl.shipping.worker_calls import call_worker
from csdctl.tuning import fleet_model, measurements, plan_choice, strategies
from csdctl.tuning.plan import FEATURES, SPLIT, Plan, Strategy, StrategyPlan
from csdctl.tuning.strategies import MEASURED_BATCH, Shares, StrategyForecast, Training, choose_strategy
from csdctl.worker.protocol.features import FLOAT32
from csdctl.worker.protocol.model_info import CutInfo, PartsSpec, PartTimes
from csdctl.workflows.data.compile import as_prefix
from csdctl.workflows.train.request import AUTO
from csdctl.workflows.train.resolved import RunContext
from csdctl.workflows.train.strategies import bytes_for_host, check_split, find_cut, find_features
from csdctl.workflows.tune.tuning_run import run_trial
from csdctl.workflows.workspace.workspace import worker_on

MIN_PROMISE = 0.1
"""Cuts are timed if FLOPs promise that they take less time by this share. Less is within their error."""
MAX_CUTS = 5
"""Number of cuts whose parts are timed: those of which FLOPs promise most."""
SPLIT_TRIAL_S = 8.0
MIN_SPLIT_STEPS, MAX_SPLIT_STEPS = 4, 200


def check_possible(strategy: str, cut: str, context: RunContext) -> None:
    """Raise InputError if job, model or fleet do not allow the only strategy that is asked for."""
    info = context.prepared.model.info
    if strategy == FEATURES:
        find_features(context.prepared)
    elif strategy == SPLIT:
        check_split(context)
        if cut or not info.cuts:
            find_cut(info, cut)


@dataclass
class StrategyChooser:
    """Compares the strategies for one job with the data-parallel plan `plan`."""

    strategy: str
    """The strategy to compare: 'auto' for all of them. `check_possible` has accepted it, and `cut`."""
    cut: str
    context: RunContext
    plan: Plan
    tuned: plan_choice.TunedFleet
    errors: measurements.ForecastErrors
    process_s: float
    """Seconds in which the ranks start, with their links."""
    impossible: dict[Strategy, str] = field(default_factory=dict)

    def choose(self) -> Plan:
        """Return the plan with the strategy that takes the least time. Raises InputError if there is none."""
        feature_layer = self._find_feature_layer() if self.strategy in (AUTO, FEATURES) else ""
        cuts = self._find_cuts() if self.strategy in (AUTO, SPLIT) else []
        if not feature_layer and not cuts:
            return self._with_strategies(self.plan, [])
        try:
            times = self._time_parts(feature_layer, [cut.layer for cut in cuts])
        except CsdctlError as error:
            if self.strategy != AUTO:
                raise
            self.context.events.say(f"{error.message}: the strategies are not compared")
            self.impossible = {FEATURES: error.message, SPLIT: error.message, **self.impossible}
            return self._with_strategies(self.plan, [])
        if times.why_not:
            self.impossible[SPLIT] = times.why_not
        shares = strategies.measured_shares(times, self.context.prepared.model.info.cuts)
        forecasts = self._forecast(times, shares, feature_layer, cuts)
        chosen = self._choose(forecasts)
        if chosen.strategy == SPLIT:
            return self._try_split(chosen, forecasts, shares[chosen.cut])
        return self._with_strategies(self._follow(chosen), forecasts)

    def _find_feature_layer(self) -> str:
        try:
            return find_features(self.context.prepared).layer
        except InputError as error:
            self.impossible[FEATURES] = error.message
            return ""

    def _find_cuts(self) -> list[CutInfo]:
        """Return the cuts to time: at most MAX_CUTS, of which FLOPs promise a gain."""
        info = self.context.prepared.model.info
        try:
            check_split(self.context)
            if self.cut or not info.cuts:
                return [find_cut(info, self.cut)]
        except InputError as error:
            self.impossible[SPLIT] = error.message
            return []
        training = self._training
        most_s = self._forecast_data_parallel(training).epoch_s * (1 - MIN_PROMISE)
        promises: list[tuple[float, CutInfo]] = []
        for cut in info.cuts:
            shares = strategies.share_by_flops(cut, info.num_operations)
            if shares and (forecast := training.forecast_split(shares, self.tuned.limits)):
                promises.append((forecast.epoch_s, cut))
        promises.sort(key=lambda promise: promise[0])
        cuts = [cut for epoch_s, cut in promises if self.strategy == SPLIT or epoch_s < most_s]
        cuts = strategies.spread_cuts(cuts, info.num_operations)[:MAX_CUTS]
        if not cuts:
            self.impossible[SPLIT] = "no cut is expected to be faster, by FLOPs and bytes"
            if self.strategy == SPLIT:
                problem = f"{info.name}: {self.impossible[SPLIT]}"
                raise InputError(problem, remedy=f"name a cut: {option('cut')} LAYER")
        return cuts

    @property
    def _training(self) -> Training:
        """The training with the machines of the plan, as they compute together."""
        model, num_ranks, prepared = self._model, len(self.plan.ranks), self.context.prepared
        machine_times = model.step_times()
        times = {
            rank.node: machine_times[rank.node].scaled(model.overhead_factor)
            for rank in self.plan.ranks
            if rank.node in machine_times
        }
        cost, num_links = model.collective_cost, max(1, num_ranks - 1)
        return Training(
            times,
            lambda num_bytes: cost.at(num_bytes, num_ranks),
            # A sum moves each rank's vector to the host and the result back.
            byte_s=(cost.per_byte_s + cost.per_rank_byte_s * num_links) / (2 * num_links),
            start_s=self.context.space.opening_s + prepared.again_s + self.process_s,
            process_s=self.process_s,
            num_public=prepared.public.num_samples,
            num_private=prepared.num_private,
            num_validation=prepared.validation.num_samples if prepared.validation else 0,
            epochs=prepared.recipe.epochs,
            save_s=self.tuned.tried.result.save_s * (2 if prepared.validation else 1),
            is_repeating=self.context.job.is_repeating,
        )

    @property
    def _model(self) -> fleet_model.FleetModel:
        """The model of the fleet. A trial of a few samples on the host says nothing about many."""
        model = self.tuned.model
        host = model.classes.get(HOST_NAME)
        if host is None or max(host.trial_sizes, default=MEASURED_BATCH) >= MEASURED_BATCH:
            return model
        return model.with_class(HOST_NAME, replace(host, in_step_factor=1.0))

    def _forecast_data_parallel(self, training: Training) -> StrategyForecast:
        predicted = self.plan.predicted
        assert predicted is not None
        return training.forecast_data_parallel(
            {rank.node: rank.batch_size for rank in self.plan.ranks},
            compute_s={rank.node: rank.step_time_s or 0.0 for rank in self.plan.ranks},
            communication_s=predicted.step_s * predicted.communication_share,
            vector_bytes=self.tuned.model.vector_bytes,
        )

    def _time_parts(self, feature_layer: str, cuts: Sequence[str]) -> PartTimes:
        prepared, model = self.context.prepared, self.context.prepared.model
        layers = tuple(dict.fromkeys([*filter(None, [feature_layer]), *cuts]))
        spec = PartsSpec(
            model.architecture.path,
            model.weights.path,
            prepared.recipe,
            self.plan.ranks[0].runtime,
            data=prepared.public.element_spec,
            batch_size=MEASURED_BATCH,
            cuts=layers,
            prefix=as_prefix(self.context.compiler.parts(FLOAT32)[0]) if feature_layer else None,
            code=model.user_code,
        )
        self.context.events.say(f"timing parts of the model on the host: {', '.join(layers)}")
        host = worker_on(self.context.space, HOST_NAME, prepared.worker)
        return call_worker(*host, "parts", spec, PartTimes, doing="timing the model's parts")

    def _forecast(
        self, times: PartTimes, shares: dict[str, Shares], feature_layer: str, cuts: Sequence[CutInfo]
    ) -> list[StrategyForecast]:
        """Return the forecasts of all strategies, data-parallel first."""
        training = replace(self._training, evaluation_share=times.evaluation_s / times.step_s)
        data_parallel = self._forecast_data_parallel(training)
        forecasts = [data_parallel]
        if feature_layer:
            once = times.features_s / times.step_s
            frozen = shares.get(feature_layer) or Shares(feature_layer, once, 0.0, max(0.0, 1 - once))
            head = replace(frozen, vector_bytes=self.tuned.model.vector_bytes)
            views = max(1, self.context.prepared.recipe.views)
            features = training.forecast_features(data_parallel, head, once * views)
            if num_bytes := bytes_for_host(self.context.job, self.context.prepared):
                features = training.forecast_on_host(features, head, num_bytes)
            forecasts.append(features)
        timed = [shares[cut.layer] for cut in cuts if cut.layer in shares]
        splits = [training.forecast_split(parts, self.tuned.limits) for parts in timed]
        spread = self.errors.after_trial(self.tuned.tried.result.error)
        return [strategies.add_range(forecast, spread) for forecast in [*forecasts, *filter(None, splits)]]

    def _choose(self, forecasts: Sequence[StrategyForecast]) -> StrategyForecast:
        if self.strategy == AUTO:
            return choose_strategy(forecasts)
        requested = [forecast for forecast in forecasts if forecast.strategy == self.strategy]
        if not requested:
            problem = self.impossible.get(SPLIT) or "no batch sizes for a split satisfy the limits"
            raise InputError(problem, remedy=f"use other limits, or tune with another {option('strategy')}")
        return min(requested, key=lambda forecast: forecast.first_run_s)

    def _follow(self, chosen: StrategyForecast) -> Plan:
        """Return the plan with the strategy and the batch sizes that were chosen."""
        if chosen.strategy != SPLIT:
            changed = {"strategy": chosen.strategy, "trains_on_host": chosen.trains_on_host}
            return self.plan.model_copy(update=changed)
        times, sizes = self._training.step_times, chosen.batch_sizes
        planned = [rank for rank in self.plan.ranks if rank.node in sizes]
        ranks = [rank.with_step(sizes[rank.node], times[rank.node].at(sizes[rank.node])) for rank in planned]
        return self.plan.model_copy(update={"strategy": SPLIT, "cut": chosen.cut, "ranks": ranks})

    def _try_split(
        self, chosen: StrategyForecast, forecasts: Sequence[StrategyForecast], shares: Shares
    ) -> Plan:
        """Take steps with the split model. Return the plan of the strategy that then takes the least time."""
        plan, say = self._follow(chosen), self.context.events.say
        expected_s = self._training.split_step_s(chosen.batch_sizes, shares)
        num_steps = min(MAX_SPLIT_STEPS, max(MIN_SPLIT_STEPS, round(SPLIT_TRIAL_S / expected_s)))
        say(f"trying the split after {chosen.cut}: {num_steps} steps of all {len(plan.ranks)} ranks")
        without = [forecast for forecast in forecasts if forecast.strategy != SPLIT]
        try:
            result, process_s = run_trial(plan.ranks, self.context, num_steps, cut=chosen.cut)
        except CsdctlError as error:
            if self.strategy == SPLIT:
                raise
            self.impossible[SPLIT] = f"the trial failed: {error.message}"
            return self._with_strategies(self._follow(choose_strategy(without)), without)
        say(
            f"a step takes {format_seconds(result.step_s)}, forecast {format_seconds(expected_s)}: "
            f"{result.samples_per_s:.1f} samples/s"
        )
        training, spread = self._training, self.errors.after_trial(result.error)
        training = replace(training, start_s=training.start_s - self.process_s + process_s)
        corrected = {}
        for forecast in forecasts:
            if forecast.strategy == SPLIT:
                by_trial = training.correct(forecast, result.step_s / expected_s)
                by_trial = by_trial.changed(is_confirmed=forecast is chosen)
                corrected[forecast.cut] = strategies.add_range(by_trial, spread)
        tried = corrected.pop(chosen.cut)
        listed = [*without, *corrected.values(), tried]
        final = tried if self.strategy == SPLIT else choose_strategy([*without, tried])
        if final is not tried:
            return self._with_strategies(self._follow(final), listed)
        host_rate = plan_choice.predict_host_samples_per_s(self.tuned.model, self.tuned.limits)
        predicted = plan_choice.confirmed_prediction(plan.batch_sizes, result, self.errors, host_rate)
        peaks = zip(plan.ranks, result.peak_memory_bytes, strict=True)
        ranks = [replace(rank, peak_memory_bytes=peak) for rank, peak in peaks]
        plan = plan.model_copy(update={"predicted": predicted, "ranks": ranks})
        return self._with_strategies(plan, listed)

    def _with_strategies(self, plan: Plan, forecasts: Sequence[StrategyForecast]) -> Plan:
        """Return `plan` with the forecasts, then the strategies that are not possible."""
        impossible = [StrategyPlan(strategy=name, why_not=why) for name, why in self.impossible.items()]
        return plan.model_copy(update={"strategies": [*forecasts, *impossible]})
