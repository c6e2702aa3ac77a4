"""What tuning knows of the machines before and after it measures: the history, and the kinds of machines."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from csdctl.fleet.facts import Facts
from csdctl.fleet.machine_class import MachineClass, classify_fleet, classify_machine
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Job
from csdctl.perfmodel.step_time import StepTime
from csdctl.runs.measurements import MeasurementStore
from csdctl.tuning.fit import fit_step_time
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelFeatures,
    ProbeMeasurement,
    RuntimeSettings,
    TrialMeasurement,
    TrialRank,
)
from csdctl.tuning.memory import largest_fitting, rank_memory_bytes
from csdctl.tuning.probe_policy import ClassState
from csdctl.tuning.recall import points_with, recall_in_step, recall_points
from csdctl.tuning.transfer import MAX_DISTANCE, transfer_step_time
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.probe import ProbeResult
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.train.plan_choice import default_runtime


@dataclass
class ClassModel:
    """Machines of one class, the host for itself, and what is known of them with one set of settings."""

    machine_class: MachineClass
    settings: RuntimeSettings
    state: ClassState
    peaks: dict[int, int] = field(default_factory=dict)
    """Batch sizes at once, and the most memory that a process had held by then, in bytes."""
    memory_bytes: int | None = None
    """What a rank may fill."""
    guessed_from: tuple[str, ...] = ()
    """The models, nearest first, that the guess of the state comes from."""

    @property
    def max_at_once(self) -> int | None:
        """The largest batch that fits into memory at once; None when no end is known."""
        bounds = []
        if self.memory_bytes and (fitting := largest_fitting(self.peaks, self.memory_bytes)):
            bounds.append(max(fitting, *self.peaks))
        if self.state.too_large is not None:
            bounds.append(max(1, self.state.too_large - 1))
        return min(bounds, default=None)

    def step_time(self) -> StepTime:
        """The fit, or the guess, of which there must be one; beyond what fits into memory, pieces that do."""
        fit = self.state.fit()
        assert fit is not None
        at_once = self.max_at_once
        if at_once is None:
            return fit
        a_piece_s = fit.at(at_once) / at_once
        if fit.knee is not None and fit.beyond_s is not None and fit.knee < at_once:
            return StepTime(fit.fixed_s, fit.per_sample_s, fit.knee, max(fit.beyond_s, a_piece_s))
        return StepTime(fit.fixed_s, fit.per_sample_s, at_once, a_piece_s)

    @property
    def runtime(self) -> Runtime:
        """How TensorFlow runs with its settings."""
        return runtime_of(self.settings)


class FleetMeasurements:
    """What the history holds of one model, trained by one job on one fleet."""

    def __init__(
        self,
        features: ModelFeatures,
        recipe: str,
        fleet: Fleet,
        facts: Mapping[str, Facts],
        history: MeasurementStore,
        *,
        is_fresh: bool = False,
        is_host_training: bool = True,
    ) -> None:
        """`recipe` as `hash_recipe` has it; `facts` of the host and every node of `fleet`.

        `is_fresh`: nothing is recalled; what is measured is kept all the same.
        """
        self.features = features
        self._recipe = recipe
        self._history = history
        self._is_fresh = is_fresh
        machines = fleet.machines
        num_emulated = len(fleet.nodes) if fleet.emulated else 0
        classes = {
            name: classify_machine(facts[name], num_emulated=num_emulated, is_host=name == HOST_NAME)
            for name in machines
        }
        self._fleet_class = classify_fleet(
            classes[HOST_NAME], [classes[name] for name in machines[1:]], fleet.network
        )
        self.kinds: dict[str, ClassModel] = {}
        """By a name for each: the host's, the class's key for nodes."""
        for name in machines if is_host_training else machines[1:]:
            key = HOST_NAME if name == HOST_NAME else classes[name].key
            memory_bytes = rank_memory_bytes(facts[name].usable_memory_bytes)
            if key in self.kinds:
                kind = self.kinds[key]
                kind.state.machines = [*kind.state.machines, name]
                known = [size for size in (kind.memory_bytes, memory_bytes) if size]
                kind.memory_bytes = min(known, default=None)
                continue
            runtime = default_runtime(name, fleet, facts)
            settings = RuntimeSettings(runtime.threads, runtime.inter_threads, runtime.onednn)
            kind = ClassModel(classes[name], settings, ClassState([name]), memory_bytes=memory_bytes)
            self.kinds[key] = kind
            if not is_fresh:
                self._recall(kind, fleet.host.threads if name == HOST_NAME else 0)

    def _recall(self, kind: ClassModel, threads: int) -> None:
        """Take in what is known; `threads` that the user has set, 0 for none, are kept to."""
        state = kind.state
        known = self._history.probes(self.features.hash, self._recipe, kind.machine_class.key)
        tried = [one for one in known if one.is_in_step and threads in (0, one.settings.threads)]
        if tried:
            kind.settings = tried[-1].settings
        for probe in known:
            if probe.settings != kind.settings:
                continue
            if probe.step_time_s is None:
                state.too_large = min(probe.batch_size, state.too_large or probe.batch_size)
            elif probe.peak_memory_bytes:
                peak = kind.peaks.get(probe.batch_size, 0)
                kind.peaks[probe.batch_size] = max(probe.peak_memory_bytes, peak)
                if state.too_large and probe.batch_size >= state.too_large:
                    state.too_large = None  # something else had filled the memory that day
        state.probes = recall_points(known, kind.settings)
        if state.probes:
            # Who pressed Ctrl-C in the middle of a tuning has probes, and no trial.
            state.is_remembered = bool(tried)
            shown = recall_in_step(known, kind.settings, fit_step_time(state.probes))
            if shown:
                state.learn_in_step(*shown)
            return
        neighbours = [
            (one.model, fit_step_time(points))
            for one in self._history.neighbours(self.features, self._recipe, kind.machine_class.key)
            if one.distance <= MAX_DISTANCE and (points := points_with(one.probes, kind.settings))
        ]
        state.guess = transfer_step_time(self.features, neighbours)
        kind.guessed_from = tuple(dict.fromkeys(model.short_name for model, _ in neighbours))

    def trials(self) -> list[TrialMeasurement]:
        """What was tried of this model on such a fleet before, oldest first."""
        if self._is_fresh:
            return []
        return self._history.trials(self.features.hash, self._recipe, self._fleet_class.key)

    def newest_trial(
        self, steps: Mapping[str, StepTime]
    ) -> tuple[Sequence[tuple[StepTime, int]], float] | None:
        """The newest trial of several ranks: step time, of `steps` by kind, and batch size of each; seconds.

        None when there was none, or one with a kind that `steps` lack.
        """
        trials = [trial for trial in self.trials() if len(trial.ranks) > 1]
        if not trials:
            return None
        host, *nodes = trials[-1].ranks
        ranks = [(HOST_NAME, host.batch_size), *((rank.machine_class, rank.batch_size) for rank in nodes)]
        if any(size and key not in steps for key, size in ranks):
            return None
        # An idle rank computes nothing, whatever its step time, and has its part in the sum.
        usual = next(iter(steps.values()))
        return [(steps.get(key, usual), size) for key, size in ranks], trials[-1].step_s

    def collectives(self) -> list[CollectiveMeasurement]:
        """Sums timed on such a fleet before."""
        return [] if self._is_fresh else self._history.collectives(self._fleet_class.key)

    def keep_collectives(self, timed: Sequence[tuple[str, int, int, float]]) -> list[CollectiveMeasurement]:
        """Keep sums: the way, ranks, bytes, seconds of each."""
        kept = [CollectiveMeasurement(*one, measured_at=time.time()) for one in timed]
        self._history.add_collectives(self._fleet_class, kept)
        return kept

    def keep_probes(
        self,
        kind: ClassModel,
        settings: RuntimeSettings,
        measured: Sequence[tuple[int, ProbeResult | None, int]],
    ) -> None:
        """Keep what was measured on machines of `kind`.

        Batch sizes, results, None for what did not fit, and each size's own peak of memory; 0: not known.
        """
        now = time.time()
        probes = [
            ProbeMeasurement(settings, size, now, result.step_time_s, result.num_steps, peak)
            if result
            else ProbeMeasurement(settings, size, now, None)
            for size, result, peak in measured
        ]
        self._history.add_probes(self.features, self._recipe, kind.machine_class, probes)

    def keep_trial(
        self,
        ranks: Sequence[tuple[ClassModel | None, int]],
        compute_s: Sequence[float],
        num_steps: int,
        reached: tuple[float, float],
        predicted_samples_per_s: float,
    ) -> None:
        """Keep a trial: kind and batch size of each rank, its compute time, step time and samples/s of all.

        `compute_s` as its class would have taken. A host that may not train is of no kind.
        """
        now = time.time()
        host = self._fleet_class.host.key
        tried = tuple(
            TrialRank(kind.machine_class.key, size, kind.settings)
            if kind
            else TrialRank(host, size, RuntimeSettings(1))
            for kind, size in ranks
        )
        self._history.add_trial(
            self.features,
            self._recipe,
            self._fleet_class,
            TrialMeasurement(tried, *reached, now, predicted_samples_per_s),
        )
        for (kind, size), step_time_s in zip(ranks, compute_s, strict=True):
            if kind is None or not size:
                continue
            probe = ProbeMeasurement(kind.settings, size, now, step_time_s, num_steps)
            self._history.add_probes(self.features, self._recipe, kind.machine_class, [probe])


def runtime_of(settings: RuntimeSettings) -> Runtime:
    """How TensorFlow is to run."""
    return Runtime(settings.threads, settings.inter_op_threads, settings.is_onednn)


def hash_recipe(job: Job, public: DatasetInfo) -> str:
    """What a step's time depends on beside the model: optimizer, loss, metrics, the form of the data."""
    recipe = job.recipe
    form: Mapping[str, object] = {
        "optimizer": [recipe.optimizer, recipe.optimizer_args],
        "loss": recipe.loss,
        "metrics": recipe.metrics,
        "input_range": recipe.input_range,
        "noise": asdict(job.noise) if job.noise else None,
        "sample": [public.sample_shape, public.dtype, public.label_shape],
    }
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:16]
