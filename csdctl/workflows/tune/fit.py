"""Tuning by fit: few probes of each class of machines, the cost of a sum, then the best plan, tried.

What was measured before is in the history: the second time nothing is probed, and one trial confirms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from csdctl.errors import OutOfMemoryError
from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import Job
from csdctl.notify import Say
from csdctl.perfmodel.collective import CollectiveCost
from csdctl.perfmodel.prediction import RankModel, predict
from csdctl.perfmodel.step_time import StepTime
from csdctl.runs.measurements import open_measurements_to_write
from csdctl.tuning.collective_fit import fit_collective
from csdctl.tuning.fit import Point
from csdctl.tuning.host_choice import find_best_ranks
from csdctl.tuning.limits import default_limits
from csdctl.tuning.measurements import RuntimeSettings, describe_model
from csdctl.tuning.memory import predict_peak_bytes
from csdctl.tuning.plan import Plan, Predicted, RankPlan
from csdctl.tuning.probe_policy import MAX_PROBES, measure_classes
from csdctl.tuning.scaling_curve import calibrate_stretch
from csdctl.tuning.search import BestPlan, Limits, RankCandidate, best_equal, find_best
from csdctl.worker.protocol.probe import ProbeRequest, ProbeResult
from csdctl.workflows.data.prepare import Prepared
from csdctl.workflows.preflight.mpi_check import measure_sums
from csdctl.workflows.tune.class_models import ClassModel, FleetMeasurements, hash_recipe, runtime_of
from csdctl.workflows.tune.probing import OnProbes, ProbeRounds
from csdctl.workflows.tune.trial import TrialResult, run_trial
from csdctl.workflows.tune.tune import FIT, TuneOptions
from csdctl.workflows.workspace.workspace import Workspace

SUM_BYTES = (1 << 16, 1 << 20, 1 << 23)
"""Sizes of the vectors whose sums are timed, beside the model's own."""
TRIAL_S = 5.0
LEAST_STEPS, MOST_STEPS = 2, 1000
MAX_TRIALS = 2
MAX_DEATHS = 3
"""Trials that a rank dies in before tuning is given up."""
SMALLER_PIECE = 0.6
"""Of what did not fit in a trial, what is tried next."""
WORTH_A_TRIAL = 0.03
"""What a trial has shown may lead to a plan that is better by more than this share: it is tried as well."""
ODD = 0.1
"""A machine that differs by more than this share from its class in a trial has a step time of its own."""
SETTINGS_GAIN = 0.15
"""Other settings are taken when one probe shows this share less time; less may be its noise."""
ALIKE = 4
"""Other settings are probed with a batch that is, where one was measured, this part of the planned one at
least: with few samples others may be the better ones."""
LOOKS = 2
"""At one variant of the settings at most: a glance, and when that is hopeful another one. So many probes are
set aside for it; further variants take what is left of the class's."""
GLANCE_S = 0.5
HOPEFUL = 1.5
"""Other settings that take more than so many times the usual step at a glance are not looked at again."""
MANY_THREADS = 4


def tune_by_fit(
    job: Job, prepared: Prepared, space: Workspace, options: TuneOptions, say: Say, on_probes: OnProbes
) -> Plan:
    """The plan with most samples/s under `options.limits`.

    Raises TuningError when there is none, and what probes and a trial's ranks raise.
    """
    with open_measurements_to_write(space.project.measurements, say) as history:
        knowledge = FleetMeasurements(
            describe_model(prepared.model.info, prepared.model.architecture.sha256),
            hash_recipe(job, prepared.public),
            space.fleet,
            space.facts,
            history,
            is_fresh=options.is_fresh,
            is_host_training=options.is_host_training,
        )
        return _FitTuning(job, prepared, space, options, say, on_probes, knowledge).run()


@dataclass(frozen=True)
class _Tried:
    best: BestPlan
    ranks: tuple[RankPlan, ...]
    result: TrialResult


class _FitTuning:
    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        space: Workspace,
        options: TuneOptions,
        say: Say,
        on_probes: OnProbes,
        knowledge: FleetMeasurements,
    ) -> None:
        self._job = job
        self._prepared = prepared
        self._space = space
        self._options = options
        self._say = say
        self._on_probes = on_probes
        self._knowledge = knowledge
        self._kinds = knowledge.kinds
        machines = space.fleet.machines
        self._machines = machines if options.is_host_training else machines[1:]
        """Those that train."""
        self._num_ranks = len(machines)
        self._kind_of = {name: kind for kind in self._kinds.values() for name in kind.state.machines}
        self._limits = _limits(options.limits, job, prepared)
        self._cost = CollectiveCost()
        self._stretch = 1.0
        """A step's time but for the sum, over the compute time of its slowest rank."""
        self._odd: dict[str, float] = {}
        """Machines that are slower or quicker than their class, by this factor."""
        self._num_probes = 0
        self._measuring_s = 0.0

    def run(self) -> Plan:
        self._cost = self._measure_collective()
        runtimes = {name: self._kind_of[name].runtime for name in self._machines}
        with ProbeRounds(
            self._job, self._prepared, self._space, runtimes, self._on_probes, self._say
        ) as rounds:
            self._measure_steps(rounds)
            if self._options.is_exploring:
                self._explore(rounds)
            self._num_probes = rounds.num_probes
            self._measuring_s += rounds.measuring_s
            self._stretch = self._recall_stretch()
            return self._plan(self._confirm(rounds))

    def _measure_collective(self) -> CollectiveCost:
        """The cost of a sum on this fleet, as remembered or timed now."""
        num_ranks, vector_bytes = self._num_ranks, self._knowledge.features.vector_bytes
        known = self._knowledge.collectives()
        if not any(one.num_ranks == num_ranks and one.num_bytes >= vector_bytes for one in known):
            self._say(f"timing sums over {num_ranks} ranks")
            wanted = [
                (ranks, size)
                for ranks in sorted({min(2, num_ranks), num_ranks})
                for size in sorted({*SUM_BYTES, vector_bytes})
            ]
            summed = measure_sums(
                self._space.fleet, self._space.facts, self._space.sessions, self._space.project, wanted
            )
            timed = [(one.collective, one.num_ranks, one.num_bytes, one.sum_s) for one in summed]
            known = [*known, *self._knowledge.keep_collectives(timed)]
            self._measuring_s += sum(one.sum_s for one in summed)
        cost = fit_collective(known)
        self._say(
            f"a sum of the model's {vector_bytes / 1e6:.1f} MB over {num_ranks} ranks takes "
            f"{cost.at(vector_bytes, num_ranks) * 1000:.1f} ms"
        )
        return cost

    def _measure_steps(self, rounds: ProbeRounds) -> None:
        """Probe until every kind's step time is known where it matters."""
        most = self._limits.most
        for kind in self._kinds.values():
            state = kind.state
            state.max_size = max(1, most - len(self._machines) + 1) if most else None
            if self._options.is_exploring:
                state.max_new -= LOOKS  # kept for other settings

        def measure(sizes: Mapping[str, int]) -> dict[str, float | None]:
            results = rounds.measure(
                {name: self._request(size) for name, size in sizes.items()}, is_keeping_busy=True
            )
            for name in sizes:
                peaks = self._kind_of[name].peaks
                for size, peak in rounds.probers[name].peaks.items():
                    peaks[size] = max(peak, peaks.get(size, 0))
            for kind in self._kinds.values():
                asked = [name for name in kind.state.machines if name in sizes]
                self._keep(
                    rounds, kind, kind.settings, {name: (sizes[name], results[name]) for name in asked}
                )
                rounds.share_work(kind.state.machines)
            return {name: result.step_time_s if result else None for name, result in results.items()}

        measure_classes({key: kind.state for key, kind in self._kinds.items()}, measure, self._choose)

    def _keep(
        self,
        rounds: ProbeRounds,
        kind: ClassModel,
        settings: RuntimeSettings,
        measured: Mapping[str, tuple[int, ProbeResult | None]],
    ) -> None:
        """Into the history, but for what was only foreseen not to fit: another day there is more memory.

        Nor does what died of something else, because more fitted.
        """
        probers = rounds.probers
        fitting = max(kind.peaks, default=0)
        kept = [
            (size, result, probers[name].peaks.get(size, 0))
            for name, (size, result) in measured.items()
            if result or (size in probers[name].killing and size > fitting)
        ]
        if kept:
            self._knowledge.keep_probes(kind, settings, kept)

    def _request(self, size: int) -> ProbeRequest:
        # A size that is new costs one step to find memory and kernels; the next shows what it takes.
        return ProbeRequest(size, min_steps=1, min_duration_s=self._options.probe_duration_s, warm_up_steps=1)

    def _choose(self, fits: Mapping[str, StepTime]) -> dict[str, int]:
        """The batch size of each kind in the best plan that `fits` lead to; none for a kind left out."""
        chosen = self._best({key: fits[key] for key in self._kinds}).batch_sizes
        return {
            key: max(chosen[name] for name in taking_part)
            for key, kind in self._kinds.items()
            if (taking_part := [name for name in kind.state.machines if name in chosen])
        }

    def _best(self, fits: Mapping[str, StepTime]) -> BestPlan:
        candidates = self._candidates(fits)
        if candidates[0].node != HOST_NAME:
            return find_best(candidates, self._limits, self._collective_s, self._stretch)
        return find_best_ranks(candidates[0], candidates[1:], self._limits, self._collective_s, self._stretch)

    def _candidates(self, fits: Mapping[str, StepTime]) -> list[RankCandidate]:
        time_of = {name: fits[key] for key, kind in self._kinds.items() for name in kind.state.machines}
        return [
            RankCandidate(
                name,
                time_of[name].scaled(self._odd.get(name, 1.0)),
                is_required=name == HOST_NAME or name in self._prepared.private,
            )
            for name in self._machines
        ]

    def _collective_s(self, num_training: int) -> float:
        """Of a sum when so many machines train; the host has a part in it also when it sits out."""
        return self._sum_s(num_training + (self._num_ranks - len(self._machines)))

    def _sum_s(self, num_ranks: int) -> float:
        return self._cost.at(self._knowledge.features.vector_bytes, num_ranks)

    def _fits(self) -> dict[str, StepTime]:
        return {key: kind.step_time() for key, kind in self._kinds.items()}

    def _explore(self, rounds: ProbeRounds) -> None:
        """Probe other runtime settings of kinds that are new, at a size that was measured."""
        planned = self._choose(self._fits())
        sizes: dict[str, int] = {}
        for key, kind in self._kinds.items():
            measured = [size for size in kind.state.sizes if size <= planned.get(key, 0)]
            if measured and not kind.state.is_remembered:
                alike = [size for size in measured if size * ALIKE >= planned[key]]
                sizes[key] = min(alike, default=max(measured))
        variants = {key: _variants(self._kinds[key]) for key in sizes}
        for number in range(max(map(len, variants.values()), default=0)):
            machines = {key: self._kinds[key].state.machines for key in sizes}
            tried = {
                machines[key][number % len(machines[key])]: (key, of_kind[number])
                for key, of_kind in variants.items()
                if number < len(of_kind) and self._kinds[key].state.num_new + LOOKS <= MAX_PROBES
            }
            if not tried:
                break
            self._try_settings(rounds, tried, sizes)

    def _try_settings(
        self, rounds: ProbeRounds, tried: Mapping[str, tuple[str, RuntimeSettings]], sizes: Mapping[str, int]
    ) -> None:
        """Measure machines with other settings, while the rest is at work as before.

        A glance, of one step where steps are long, tells who is not worth a second look. That one counts:
        in the first step memory is found and kernels are made.
        """
        rounds.switch(
            {name: runtime_of(settings) for name, (_, settings) in tried.items()},
            {name: max(self._kinds[key].peaks.values(), default=0) for name, (key, _) in tried.items()},
        )
        usual = {
            name: median(
                one.step_time_s for one in self._kinds[key].state.probes if one.batch_size == sizes[key]
            )
            for name, (key, _) in tried.items()
        }
        glances = {
            name: ProbeRequest(sizes[key], min_steps=1, min_duration_s=GLANCE_S, warm_up_steps=0)
            for name, (key, _) in tried.items()
        }
        first = rounds.measure(glances, is_keeping_busy=True)
        again = {
            name: replace(glances[name], min_duration_s=self._options.probe_duration_s)
            for name, result in first.items()
            if result and result.step_time_s < usual[name] * HOPEFUL
        }
        second = rounds.measure(again, is_keeping_busy=True) if again else {}
        for name, (key, settings) in tried.items():
            kind = self._kinds[key]
            result = second.get(name)
            kind.state.num_new += 1 + (name in again)
            if result is None:  # also where it did not fit, which is not remembered: another session is there
                continue
            self._keep(rounds, kind, settings, {name: (sizes[key], result)})
            ratio = result.step_time_s / usual[name]
            if ratio < 1 - SETTINGS_GAIN:
                self._say(f"{name}: {settings.name}: takes {1 - ratio:.0%} less time: taken")
                kind.settings = settings
                kind.state.probes = [
                    Point(one.batch_size, one.step_time_s * ratio) for one in kind.state.probes
                ]

    def _confirm(self, rounds: ProbeRounds) -> _Tried:
        """Try the best plan, and another when the trial shows one; returns the better of what was tried."""
        tried: list[_Tried] = []
        num_deaths = 0
        while True:
            best = self._best(self._fits())
            ranks = tuple(self._rank_plan(name, size) for name, size in best.batch_sizes.items())
            if HOST_NAME not in best.batch_sizes:
                ranks = (RankPlan(node=HOST_NAME, batch_size=0, threads=1), *ranks)
            steps = round(TRIAL_S / best.prediction.step_s)
            steps = min(MOST_STEPS, max(LEAST_STEPS, steps))
            # A host that sits out has a worker with fewer threads, which starts when it is tried.
            enlist = rounds.prepare_trial({rank.node: rank.runtime for rank in ranks if rank.batch_size})
            self._say(f"trying the plan: {steps} steps of all {len(ranks)} ranks")
            try:
                result = run_trial(self._job, ranks, self._prepared, self._space, steps, enlist)
            except OutOfMemoryError as error:
                num_deaths += 1
                if num_deaths > MAX_DEATHS or error.node not in best.batch_sizes:
                    raise
                rounds.end_sessions()  # with one rank the others went
                self._learn_death(error.node, best.batch_sizes[error.node])
                continue
            self._measuring_s += result.wall_s
            tried.append(_Tried(best, ranks, result))
            self._learn(tried[-1])
            gain = self._best(self._fits()).prediction.samples_per_s / self._predict(best.batch_sizes) - 1
            if not self._num_probes or len(tried) == MAX_TRIALS or gain < WORTH_A_TRIAL:
                return max(tried, key=lambda one: one.result.samples_per_s)

    def _learn_death(self, name: str, batch_size: int) -> None:
        """A rank died of memory in a trial: from now on it computes in smaller pieces.

        It does not go into the history, because another process of that machine may be to blame.
        """
        kind = self._kind_of[name]
        at_once = min(batch_size, kind.max_at_once or batch_size)
        kind.state.too_large = max(2, round(at_once * SMALLER_PIECE))
        self._say(
            f"{name}: {at_once} samples at once did not fit in memory beside the other ranks; "
            f"planning for at most {kind.max_at_once}"
        )

    def _learn(self, tried: _Tried) -> None:
        """Take in what a trial has shown: steps beside others, odd machines, what being in step costs."""
        result, sizes = tried.result, tried.best.batch_sizes
        names = [rank.node for rank in tried.ranks]
        computed = dict(zip(names, result.compute_s, strict=True))
        for kind in self._kinds.values():
            fit = kind.step_time()
            members = [name for name in kind.state.machines if name in sizes]
            ratios = {name: computed[name] / fit.at(sizes[name]) for name in members}
            if not ratios:
                continue
            usual = median(ratios.values())
            kind.state.learn_in_step(max(sizes[name] for name in members), usual)
            for name, ratio in ratios.items():
                odd = ratio / usual
                self._odd[name] = odd if abs(odd - 1) > ODD else 1.0
        vector_bytes = self._knowledge.features.vector_bytes
        if len(names) > 1:
            self._knowledge.keep_collectives([(result.collective, len(names), vector_bytes, result.sum_s)])
        self._knowledge.keep_trial(
            [(self._kind_of.get(name), tried.best.batch_sizes.get(name, 0)) for name in names],
            [computed[name] / self._odd.get(name, 1.0) for name in names],
            result.num_steps,
            (result.step_s, result.samples_per_s),
            tried.best.prediction.samples_per_s,
        )
        times = {one.node: one.step_time for one in self._candidates(self._fits())}
        shown = [(times[name], size) for name, size in sizes.items()]
        self._stretch = calibrate_stretch(shown, result.step_s, self._sum_s(len(names)))

    def _recall_stretch(self) -> float:
        """As the newest trial showed it; 1 when there was none."""
        newest = self._knowledge.newest_trial(self._fits())
        if newest is None:
            return 1.0
        ranks, step_s = newest
        return calibrate_stretch(ranks, step_s, self._sum_s(len(ranks)))

    def _predict(self, batch_sizes: Mapping[str, int]) -> float:
        """Images a second with these batch sizes, as all that was measured suggests."""
        members = [one for one in self._candidates(self._fits()) if one.node in batch_sizes]
        models = [RankModel(one.node, one.step_time) for one in members]
        sum_s = self._sum_s(len(members) + (HOST_NAME not in batch_sizes))
        return predict(models, [*batch_sizes.values()], sum_s, self._stretch).samples_per_s

    def _rank_plan(self, name: str, batch_size: int) -> RankPlan:
        kind = self._kind_of[name]
        at_once = kind.max_at_once
        step_time_s = kind.step_time().scaled(self._odd.get(name, 1.0)).at(batch_size)
        return RankPlan(
            node=name,
            batch_size=batch_size,
            threads=kind.settings.threads,
            inter_threads=kind.settings.inter_op_threads,
            onednn=kind.settings.is_onednn,
            # A batch that grows in a run goes on in pieces that fit.
            micro_batch_size=at_once if at_once is not None and at_once < 2 * batch_size else None,
            step_time_s=round(step_time_s, 6),
            samples_per_s=round(batch_size / step_time_s, 2),
            peak_memory_bytes=predict_peak_bytes(kind.peaks, min(batch_size, at_once or batch_size)),
        )

    def _plan(self, tried: _Tried) -> Plan:
        result = tried.result
        models = [
            RankModel(rank.node, StepTime(0.0, seconds / rank.batch_size))
            for rank, seconds in zip(tried.ranks, result.compute_s, strict=True)
            if rank.batch_size
        ]
        sizes = [rank.batch_size for rank in tried.ranks if rank.batch_size]
        # What the trial took beyond the slowest rank's compute time is communication, whatever the sum alone.
        waited_s = max(0.0, result.step_s - max(result.compute_s))
        shown = predict(models, sizes, waited_s)
        equal = best_equal(self._candidates(self._fits()), self._limits, self._collective_s, self._stretch)
        gain = self._predict(tried.best.batch_sizes) / equal - 1 if equal else None
        return Plan(
            job=self._job.name,
            job_fingerprint=self._job.fingerprint(),
            method=FIT,
            emulated=self._space.fleet.emulated,
            method_arguments={**self._limits.given},
            num_probes=self._num_probes,
            measuring_s=round(self._measuring_s, 2),
            predicted=Predicted(
                global_batch=sum(sizes),
                step_s=round(result.step_s, 6),
                samples_per_s=round(result.samples_per_s, 2),
                compute_share=round(shown.compute_share, 4),
                imbalance_share=round(shown.imbalance_share, 4),
                communication_share=round(shown.communication_share, 4),
                gain=None if gain is None else round(gain, 3),
                is_confirmed=True,
            ),
            left_out=list(tried.best.left_out),
            ranks=[
                rank
                if not rank.batch_size
                else rank.model_copy(
                    update={
                        "step_time_s": round(seconds, 6),
                        "samples_per_s": round(rank.batch_size / seconds, 2),
                    }
                )
                for rank, seconds in zip(tried.ranks, result.compute_s, strict=True)
            ],
        )


def _variants(kind: ClassModel) -> list[RuntimeSettings]:
    """Settings worth a probe, most promising first."""
    settings = kind.settings
    variants = [replace(settings, is_onednn=not settings.is_onednn)]
    if settings.threads >= MANY_THREADS:  # two of a core's hardware threads share what computes
        variants.append(replace(settings, threads=settings.threads // 2))
    if settings.threads > 1:
        variants.append(replace(settings, inter_op_threads=2))
    return variants


def _limits(given: Limits, job: Job, prepared: Prepared) -> Limits:
    num_samples = prepared.public.num_samples + sum(one.num_samples for one in prepared.private.values())
    return default_limits(given, job.recipe.reference_batch, num_samples, 1 + len(prepared.private))
