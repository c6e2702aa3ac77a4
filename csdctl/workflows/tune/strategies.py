"""The choice of the strategy: compare what is possible, time the parts of the model, try the split."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.reporting.numbers import format_seconds
from csdctl.shipping.worker_calls import call_worker
from csdctl.tuning.fleet_model import FleetModel
from csdctl.tuning.measurements import ForecastErrors
from csdctl.tuning.plan import DATA_PARALLEL, FEATURES, SPLIT, Plan, RankPlan, Strategy, StrategyPlan
from csdctl.tuning.plan_choice import confirmed_prediction
from csdctl.tuning.search import Limits
from csdctl.tuning.strategies import (
    MEASURED_BATCH,
    Shares,
    StrategyForecast,
    Training,
    choose_strategy,
    measured_shares,
    share_by_flops,
    spread_cuts,
)
from csdctl.worker.protocol.model_info import CutInfo
from csdctl.worker.protocol.probe import PartsSpec, PartTimes
from csdctl.worker.protocol.run_spec import Prefix, SplitSpec
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.train.options import AUTO
from csdctl.workflows.train.spec import RunContext
from csdctl.workflows.train.strategies.features import bytes_for_host, find_features
from csdctl.workflows.train.strategies.strategy import check_job, check_split, find_cut
from csdctl.workflows.tune.options import TuneOptions
from csdctl.workflows.tune.probing import TuneWatch, run_trial


def node_memory(ranks: Sequence[RankPlan]) -> int | None:
    """Return the largest peak memory of a node that was measured."""
    known = (rank.peak_memory_bytes for rank in ranks if rank.node != HOST_NAME)
    return max((peak for peak in known if peak), default=None)


MAX_CUTS = 5
"""Cuts whose parts are timed: those that FLOPs promise most of."""
TRIAL_S, MIN_STEPS, MAX_STEPS = 8.0, 4, 200


def check_possible(request: TuneOptions, job: Job, prepared: Prepared) -> None:
    """Raise InputError if only one strategy is asked for, and the job or the model does not allow it."""
    info = prepared.model.info
    if request.strategy == FEATURES:
        find_features(prepared)
    elif request.strategy == SPLIT:
        check_job(job)
        if request.cut or not info.cuts:
            find_cut(info, request.cut)


@dataclass
class StrategyChooser:
    """Compares the strategies for one job with the plan `plan` for whole models."""

    request: TuneOptions
    """Its `strategy` and `cut` say what to compare; `check_possible` has accepted them."""
    context: RunContext
    plan: Plan
    model: FleetModel
    limits: Limits
    start_s: float
    """Seconds of a training besides its epochs."""
    process_s: float
    """The part of `start_s` until TensorFlow has started on all machines."""
    watch: TuneWatch
    impossible: dict[Strategy, str] = field(default_factory=dict)
    """Strategies that are not possible, and why."""

    def choose(self) -> Plan:
        """Return the plan with the strategy that takes the least time.

        Raises InputError when no batch sizes are possible.
        """
        if self.request.strategy == DATA_PARALLEL:
            return self.plan
        feature_layer = ""
        cuts: tuple[CutInfo, ...] = ()
        if self.request.strategy in (AUTO, FEATURES):
            feature_layer = self._find_feature_layer()
        if self.request.strategy in (AUTO, SPLIT):
            cuts = self._find_cuts()
        if not feature_layer and not cuts:
            return self._with_strategies(self.plan, [])
        try:
            times = self._time_parts(feature_layer, [cut.layer for cut in cuts])
        except CsdctlError as error:
            if self.request.strategy != AUTO:
                raise
            self.context.observer.say(f"{error.message}: the strategies are not compared")
            for strategy in (FEATURES, SPLIT):
                self.impossible.setdefault(strategy, error.message)
            return self._with_strategies(self.plan, [])
        if times.why_not:
            self.impossible[SPLIT] = times.why_not
        found = self._forecast(times, feature_layer, cuts)
        chosen = self._choose(found)
        if chosen.strategy == SPLIT:
            return self._try_split(chosen, found, times)
        return self._with_strategies(self._follow(chosen), found)

    def _find_feature_layer(self) -> str:
        try:
            return find_features(self.context.prepared).layer
        except InputError as error:
            self.impossible[FEATURES] = error.message
            return ""

    def _find_cuts(self) -> tuple[CutInfo, ...]:
        """Return the cuts to time: at most MAX_CUTS, of which FLOPs promise a gain."""
        info = self.context.prepared.model.info
        try:
            check_split(self.context)
            if self.request.cut or not info.cuts:
                return (find_cut(info, self.request.cut),)
        except InputError as error:
            self.impossible[SPLIT] = error.message
            return ()
        training = self._training
        whole = self._forecast_whole(training)
        promised = {}
        for cut in info.cuts:
            shares = share_by_flops(cut, info.num_operations)
            if shares and (found := training.forecast_split(shares, self.limits)):
                promised[cut.layer] = found.epoch_s
        cuts = sorted(
            (cut for cut in info.cuts if cut.layer in promised), key=lambda cut: promised[cut.layer]
        )
        if self.request.strategy == AUTO:
            cuts = [cut for cut in cuts if promised[cut.layer] < whole.epoch_s]
        cuts = spread_cuts(cuts, info.num_operations)[:MAX_CUTS]
        if not cuts:
            self.impossible[SPLIT] = "no cut is expected to be faster, by FLOPs and bytes"
            if self.request.strategy == SPLIT:
                raise InputError(f"{info.name}: {self.impossible[SPLIT]}", remedy="name a cut: --cut LAYER")
        return tuple(cuts)

    @property
    def _training(self) -> Training:
        """The training with the machines of the plan, as they compute together."""
        model, num_ranks, prepared = self._model, len(self.plan.ranks), self.context.prepared
        known = model.machine_step_times()
        host = known.get(HOST_NAME)
        times = {} if host is None else {HOST_NAME: host.scaled(model.overhead_factor)}
        nodes = [rank.node for rank in self.plan.ranks if rank.node in known and rank.node != HOST_NAME]
        times |= {name: known[name].scaled(model.overhead_factor) for name in nodes}
        cost = model.collective_cost
        others = max(1, num_ranks - 1)
        return Training(
            times,
            lambda num_bytes: cost.at(num_bytes, num_ranks),
            # A sum moves each rank's vector to the host and the result back.
            (cost.per_byte_s + cost.per_rank_byte_s * others) / (2 * others),
            self.start_s,
            self.process_s,
            prepared.public.num_samples,
            prepared.num_private,
            prepared.validation.num_samples if prepared.validation else 0,
            prepared.recipe.epochs,
            self.context.job.is_repeating,
        )

    @property
    def _model(self) -> FleetModel:
        """The model of the fleet; a trial of a few samples on the host says nothing about many."""
        known = self.model.classes.get(HOST_NAME)
        if known is None or max(known.trial_sizes, default=MEASURED_BATCH) >= MEASURED_BATCH:
            return self.model
        return self.model.with_class(HOST_NAME, replace(known, in_step_factor=1.0))

    def _forecast_whole(self, training: Training) -> StrategyForecast:
        predicted = self.plan.predicted
        assert predicted is not None
        found = training.forecast_data_parallel(
            {rank.node: rank.batch_size for rank in self.plan.ranks},
            {rank.node: rank.step_time_s or 0.0 for rank in self.plan.ranks},
            predicted.step_s * predicted.communication_share,
            self.model.vector_bytes,
        )
        return found.model_copy(update={"node_memory_bytes": node_memory(self.plan.ranks)})

    def _time_parts(self, feature_layer: str, cuts: Sequence[str]) -> PartTimes:
        prepared, model = self.context.prepared, self.context.prepared.model
        prefix = None
        if feature_layer:
            architecture, weights, *_ = model.parts
            prefix = Prefix(
                architecture.path, weights.path, prepared.recipe.input_range, code=model.user_code
            )
        layers = tuple(dict.fromkeys([*([feature_layer] if feature_layer else []), *cuts]))
        self.context.observer.say(f"timing parts of the model on the host: {', '.join(layers)}")
        host = self.plan.ranks[0]
        spec = PartsSpec(
            model.architecture.path,
            model.weights.path,
            prepared.recipe,
            host.runtime,
            prepared.public.element_spec,
            MEASURED_BATCH,
            layers,
            prefix,
            model.user_code,
        )
        return call_worker(
            self.context.space.sessions[HOST_NAME],
            sys.executable,
            prepared.worker.path,
            "parts",
            spec,
            PartTimes,
            doing="timing the model's parts",
        )

    def _forecast(
        self, times: PartTimes, feature_layer: str, cuts: Sequence[CutInfo]
    ) -> list[StrategyForecast]:
        """Return the forecasts of all strategies, whole models first."""
        training = replace(self._training, evaluation_share=times.evaluation_s / times.step_s)
        whole = self._forecast_whole(training)
        found = [whole]
        shares = measured_shares(times, self.context.prepared.model.info.cuts)
        if feature_layer:
            share = times.features_s / times.step_s * max(1, self.context.prepared.recipe.views)
            of_frozen = shares.get(feature_layer) or Shares(feature_layer, share, 0.0, max(0.0, 1 - share))
            of_head = replace(of_frozen, vector_bytes=self.model.vector_bytes)
            by_features = training.forecast_features(whole, of_head, share)
            if num_bytes := bytes_for_host(self.context.job, self.context.prepared):
                by_features = training.forecast_on_host(by_features, of_head, num_bytes)
            found.append(by_features)
        for cut in cuts:
            measured = shares.get(cut.layer)
            if measured and (split := training.forecast_split(measured, self.limits)):
                found.append(split)
        return found

    def _choose(self, found: Sequence[StrategyForecast]) -> StrategyForecast:
        if self.request.strategy == AUTO:
            return choose_strategy(found)
        asked_for = [one for one in found if one.strategy == self.request.strategy]
        if not asked_for:
            raise InputError(
                self.impossible.get(SPLIT) or "no batch sizes for a split satisfy the limits",
                remedy="use other limits, or tune with another --strategy",
            )
        return min(asked_for, key=lambda one: one.first_run_s)

    def _follow(self, chosen: StrategyForecast) -> Plan:
        """Return the plan with the strategy and the batch sizes that were chosen."""
        if chosen.strategy != SPLIT:
            changed = {"strategy": chosen.strategy, "trains_on_host": chosen.trains_on_host}
            return self.plan.model_copy(update=changed)
        times = self._training.step_times
        by_name = {rank.node: rank for rank in self.plan.ranks}
        ranks = [
            by_name[name].with_step(size, times[name].at(size)) for name, size in chosen.batch_sizes.items()
        ]
        return self.plan.model_copy(update={"strategy": SPLIT, "cut": chosen.cut, "ranks": ranks})

    def _try_split(
        self,
        chosen: StrategyForecast,
        found: list[StrategyForecast],
        times: PartTimes,
    ) -> Plan:
        """Take steps with the split model; return the plan of the strategy that then takes the least time."""
        plan = self._follow(chosen)
        shares = measured_shares(times, self.context.prepared.model.info.cuts)[chosen.cut]
        expected_s = self._training.split_step_s(chosen.batch_sizes, shares)
        num_steps = min(MAX_STEPS, max(MIN_STEPS, round(TRIAL_S / expected_s)))
        self.context.observer.say(
            f"trying the split after {chosen.cut}: {num_steps} steps of all {len(plan.ranks)} ranks"
        )
        self.watch.on_trial(num_steps, chosen.batch_sizes)
        try:
            result = run_trial(
                plan.ranks,
                self.context,
                num_steps,
                split=SplitSpec(chosen.cut),
                on_event=self.watch.on_event,
            )
        except CsdctlError as error:
            if self.request.strategy == SPLIT:
                raise
            self.impossible[SPLIT] = f"the trial failed: {error.message}"
            rest = [one for one in found if one.strategy != SPLIT]
            return self._with_strategies(self._follow(choose_strategy(rest)), rest)
        ratio = result.step_s / expected_s
        self.context.observer.say(
            f"a step takes {format_seconds(result.step_s)}, forecast {format_seconds(expected_s)}: "
            f"{result.samples_per_s:.1f} samples/s"
        )
        # The trial started TensorFlow itself.
        before_s = self.context.space.opening_s + self.context.prepared.again_s
        training = replace(self._training, start_s=before_s + result.fixed_s)
        memory = result.peak_memory_bytes[1:]
        known = {"node_memory_bytes": max(memory, default=None)}
        tried = training.confirm(chosen, ratio).model_copy(update=known)
        others = [training.confirm_cut(one, ratio) for one in found if one is not chosen]
        listed = sorted([*others, tried], key=lambda one: one.strategy != DATA_PARALLEL)
        rest = [one for one in listed if one.strategy != SPLIT]
        final = tried if self.request.strategy == SPLIT else choose_strategy([*rest, tried])
        if final is not tried:
            return self._with_strategies(self._follow(final), listed)
        predicted = confirmed_prediction(plan.ranks, result, ForecastErrors())
        plan = plan.model_copy(update={"predicted": predicted})
        return self._with_strategies(plan, listed)

    def _with_strategies(self, plan: Plan, found: Sequence[StrategyForecast]) -> Plan:
        """Return `plan` with the forecasts, then the strategies that are not possible."""
        impossible = [StrategyPlan(strategy=name, why_not=why) for name, why in self.impossible.items()]
        return plan.model_copy(update={"strategies": [*found, *impossible]})
