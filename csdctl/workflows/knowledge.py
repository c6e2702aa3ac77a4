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
from csdctl.runs.history import History
from csdctl.tuning.adaptive import ClassState
from csdctl.tuning.fit import fit_step_time
from csdctl.tuning.measured import Collective, ModelFeatures, Probe, Settings, Trial, TrialRank
from csdctl.tuning.memory import largest_fitting
from csdctl.tuning.remembered import points_with, recall_points
from csdctl.tuning.similar import MAX_DISTANCE, transfer_step_time
from csdctl.worker.contract import DatasetInfo, ProbeResult, Runtime
from csdctl.workflows.probing import MEMORY_SHARE, default_runtime


@dataclass
class Kind:
    """Machines of one class, the host for itself, and what is known of them with one set of settings."""

    machine_class: MachineClass
    settings: Settings
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
            bounds.append(max(fitting, max(self.state.sizes, default=1)))
        if self.state.too_large is not None:
            bounds.append(max(1, self.state.too_large - 1))
        return min(bounds, default=None)

    def step_time(self) -> StepTime:
        """The fit; beyond what fits into memory, pieces that do."""
        fit = fit_step_time(self.state.probes)
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


class Knowledge:
    """What the history holds of one model, trained by one job on one fleet."""

    def __init__(
        self,
        features: ModelFeatures,
        recipe: str,
        fleet: Fleet,
        facts: Mapping[str, Facts],
        history: History,
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
        classes = {name: classify_machine(facts[name], num_emulated=num_emulated) for name in machines}
        self._fleet_class = classify_fleet(
            classes[HOST_NAME], [classes[name] for name in machines[1:]], fleet.network
        )
        trials = self.trials()
        self.kinds: dict[str, Kind] = {}
        """By a name for each: the host's, the class's key for nodes."""
        for name in machines if is_host_training else machines[1:]:
            key = HOST_NAME if name == HOST_NAME else classes[name].key
            if key in self.kinds:
                kind = self.kinds[key]
                kind.state.machines = [*kind.state.machines, name]
                known = [size for size in (kind.memory_bytes, _memory(facts[name])) if size]
                kind.memory_bytes = min(known, default=None)
                continue
            runtime = default_runtime(name, fleet, facts)
            settings = _newest_settings(trials, classes[name].key, is_host=name == HOST_NAME)
            settings = settings or Settings(runtime.threads, runtime.inter_threads, runtime.onednn)
            kind = Kind(classes[name], settings, ClassState([name]), memory_bytes=_memory(facts[name]))
            self.kinds[key] = kind
            if not is_fresh:
                self._recall(kind)

    def _recall(self, kind: Kind) -> None:
        state = kind.state
        known = self._history.probes(self.features.hash, self._recipe, kind.machine_class.key)
        for probe in known:
            if probe.settings != kind.settings:
                continue
            if probe.step_time_s is None:
                state.too_large = min(probe.batch_size, state.too_large or probe.batch_size)
            elif probe.peak_memory_bytes:
                peak = kind.peaks.get(probe.batch_size, 0)
                kind.peaks[probe.batch_size] = max(probe.peak_memory_bytes, peak)
        state.probes = recall_points(known, kind.settings)
        if state.probes:
            state.is_remembered = len(state.sizes) > 1
            return
        neighbours = [
            (one.model, fit_step_time(points))
            for one in self._history.neighbours(self.features, self._recipe, kind.machine_class.key)
            if one.distance <= MAX_DISTANCE and (points := points_with(one.probes, kind.settings))
        ]
        state.guess = transfer_step_time(self.features, neighbours)
        kind.guessed_from = tuple(dict.fromkeys(model.short_name for model, _ in neighbours))

    def trials(self) -> list[Trial]:
        """What was tried of this model on such a fleet before, oldest first."""
        if self._is_fresh:
            return []
        return self._history.trials(self.features.hash, self._recipe, self._fleet_class.key)

    def collectives(self) -> list[Collective]:
        """Sums timed on such a fleet before."""
        return [] if self._is_fresh else self._history.collectives(self._fleet_class.key)

    def keep_collectives(self, timed: Sequence[tuple[str, int, int, float]]) -> list[Collective]:
        """Keep sums: the way, ranks, bytes, seconds of each."""
        kept = [Collective(*one, measured_at=time.time()) for one in timed]
        self._history.add_collectives(self._fleet_class, kept)
        return kept

    def keep_probes(
        self, kind: Kind, settings: Settings, measured: Sequence[tuple[int, ProbeResult | None]]
    ) -> None:
        """Keep what was measured on machines of `kind`: batch sizes, and None for what did not fit."""
        now = time.time()
        probes = [
            Probe(
                settings,
                size,
                now,
                result.step_time_s if result else None,
                result.num_steps if result else 0,
                result.peak_memory_bytes if result else None,
            )
            for size, result in measured
        ]
        self._history.add_probes(self.features, self._recipe, kind.machine_class, probes)

    def keep_trial(
        self,
        ranks: Sequence[tuple[Kind | None, int]],
        compute_s: Sequence[float],
        num_steps: int,
        reached: tuple[float, float],
        predicted_images_per_s: float,
    ) -> None:
        """Keep a trial: kind and batch size of each rank, its compute time, step time and images/s of all.

        A host that sits out is of no kind.
        """
        now = time.time()
        host = self._fleet_class.host.key
        tried = tuple(
            TrialRank(kind.machine_class.key, size, kind.settings)
            if kind
            else TrialRank(host, size, Settings(1))
            for kind, size in ranks
        )
        self._history.add_trial(
            self.features,
            self._recipe,
            self._fleet_class,
            Trial(tried, *reached, now, predicted_images_per_s),
        )
        for (kind, size), step_time_s in zip(ranks, compute_s, strict=True):
            if kind is None:
                continue
            probe = Probe(kind.settings, size, now, step_time_s, num_steps)
            self._history.add_probes(self.features, self._recipe, kind.machine_class, [probe])


def runtime_of(settings: Settings) -> Runtime:
    """How TensorFlow is to run."""
    return Runtime(settings.threads, settings.inter_op_threads, settings.is_onednn)


def _memory(facts: Facts) -> int | None:
    usable = facts.usable_memory_bytes
    return int(usable * MEMORY_SHARE) if usable else None


def _newest_settings(trials: Sequence[Trial], class_key: str, *, is_host: bool) -> Settings | None:
    """What a class ran with in the newest trial; None when it had no part in any."""
    for trial in reversed(trials):
        for rank in trial.ranks[:1] if is_host else trial.ranks[1:]:
            if rank.machine_class == class_key and rank.batch_size:
                return rank.settings
    return None


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
