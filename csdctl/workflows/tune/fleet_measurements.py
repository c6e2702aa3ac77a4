"""Stored measurements of one model, trained by one job on one fleet, as tuning reads and extends them.

The model of the fleet is pure (csdctl/tuning/fleet_model.py). This module builds it from the measurements
file, and writes new measurements there with their time.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from csdctl.fleet.facts import Facts
from csdctl.fleet.hardware import classify_fleet, classify_machine
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import names_by_value
from csdctl.job.model import Job, python_files
from csdctl.perfmodel.prediction import StepTime
from csdctl.runs.measurements import PROBE, SUM, TRIAL, MeasurementStore
from csdctl.tuning.fleet_model import (
    ClassModel,
    FleetModel,
    ProbeOutcome,
    RecalledTrial,
    TriedPlan,
    rank_memory_bytes,
    recall_class,
    recall_trial,
)
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ForecastErrors,
    ModelProperties,
    ProbeMeasurement,
    TrialMeasurement,
    TrialRank,
    compare_trials,
)
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.events import SumTimed
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.train.plan import default_runtime


class FleetMeasurements:
    """The stored measurements of one model, trained by one job on one fleet."""

    def __init__(
        self,
        features: ModelProperties,
        recipe: str,
        fleet: Fleet,
        facts: Mapping[str, Facts],
        store: MeasurementStore,
        errors: Sequence[float] = (),
        *,
        is_host_training: bool = True,
    ) -> None:
        """`recipe` as from `hash_recipe`. `facts` of the host and every node of `fleet`. `errors` of runs."""
        self._errors = errors
        self.features = features
        self._recipe = recipe
        self._fleet = fleet
        self.is_emulated = fleet.emulated
        self._facts = facts
        self._store = store
        self._machines = fleet.machines if is_host_training else fleet.machines[1:]
        num_emulated = len(fleet.nodes) if fleet.emulated else 0
        self._machine_classes = {
            name: classify_machine(facts[name], num_emulated=num_emulated, is_host=name == HOST_NAME)
            for name in fleet.machines
        }
        host, *nodes = (self._machine_classes[name] for name in fleet.machines)
        networks = [fleet.network, *(network for _, network in fleet.networks), fleet.between]
        self._fleet_class = classify_fleet(host, nodes, " ".join(filter(None, networks)))

    def recall_fleet(self, required: Sequence[str] = ()) -> FleetModel:
        """Return the fleet as earlier measurements describe it. No plan leaves out the `required` nodes.

        The host's class is named 'host', one of nodes by its key.
        """
        by_class = names_by_value(
            (name, HOST_NAME if name == HOST_NAME else self._machine_classes[name].key)
            for name in self._machines
        )
        classes = {name: self._recall_class(machines) for name, machines in by_class.items()}
        must_train = frozenset({HOST_NAME, *required, *(name for name, _ in self._fleet.networks)})
        return FleetModel(tuple(self._machines), classes, self.features.vector_bytes, must_train)

    def recall_trial(self, step_times: Mapping[str, StepTime]) -> RecalledTrial | None:
        """Return the newest trial of this model on such a fleet. `step_times` by class name.

        None without a trial, or when `step_times` lacks a class of it.
        """
        return recall_trial(self._trials(), step_times)

    def forecast_errors(self) -> ForecastErrors:
        """Return the errors of earlier forecasts: of this model on such a fleet, and for runs."""
        found = compare_trials(self._trials())
        return replace(found, tried=(*found.tried, *self._errors))

    def collectives(self) -> list[CollectiveMeasurement]:
        """Return the sums that were timed on such a fleet before."""
        return self._store.find(SUM, self._fleet_class.key)

    def store_collectives(self, timed: Sequence[SumTimed]) -> list[CollectiveMeasurement]:
        """Store new timings of sums, and return them as measurements."""
        now = time.time()
        kept = [
            CollectiveMeasurement(len(timing.ranks), timing.num_bytes, timing.sum_s, now) for timing in timed
        ]
        self._store.add(SUM, self._fleet_class, kept)
        return kept

    def store_probes(self, model: FleetModel, outcomes: Mapping[str, ProbeOutcome]) -> None:
        """Store one round of probes, by machine, with the settings that `model` has for each class.

        A size that was only predicted not to fit in memory is not stored: more may be free next time.
        Nor is a size at which a process was killed although a larger size fitted.
        """
        for class_model in model.classes.values():
            measured = [outcomes[name] for name in class_model.machines if name in outcomes]
            peaks = [class_model.peaks, *(outcome.peaks for outcome in measured)]
            largest = max((size for sizes in peaks for size in sizes), default=0)
            kept = [
                outcome
                for outcome in measured
                if outcome.step_time_s is not None or (outcome.is_oom_kill and outcome.batch_size > largest)
            ]
            self.store_class_probes(class_model.machines[0], class_model.settings, kept)

    def store_class_probes(self, machine: str, settings: Runtime, outcomes: Sequence[ProbeOutcome]) -> None:
        """Store probes of machines of the class of `machine`, all with these settings."""
        now = time.time()
        probes = [
            ProbeMeasurement(
                settings,
                outcome.batch_size,
                now,
                outcome.step_time_s,
                outcome.num_steps,
                outcome.peak_memory_bytes,
            )
            for outcome in outcomes
        ]
        if probes:
            self._add_probes(machine, probes)

    def store_trial(self, model: FleetModel, tried: TriedPlan) -> None:
        """Store a trial that `model` includes. Outliers are stored with the step time of their class."""
        now, result = time.time(), tried.result
        num_ranks, vector_bytes = len(tried.ranks), self.features.vector_bytes
        if num_ranks > 1:
            summed = CollectiveMeasurement(num_ranks, vector_bytes, result.sum_s, now)
            self._store.add(SUM, self._fleet_class, [summed])
        ranks = tuple(
            TrialRank(self._machine_classes[rank.node].key, rank.batch_size, rank.runtime)
            for rank in tried.ranks
        )
        predicted = tried.best.prediction.samples_per_s
        trial = TrialMeasurement(ranks, result.step_s, result.samples_per_s, now, predicted)
        self._store.add(TRIAL, self._fleet_class, [trial], self.features, self._recipe)
        for rank in tried.ranks:
            if rank.batch_size:
                step_time_s = tried.compute_s[rank.node] / model.outlier_factors.get(rank.node, 1.0)
                probe = ProbeMeasurement(rank.runtime, rank.batch_size, now, step_time_s, result.num_steps)
                self._add_probes(rank.node, [probe])

    def _recall_class(self, machines: Sequence[str]) -> ClassModel:
        known = (rank_memory_bytes(self._facts[machine].usable_memory_bytes) for machine in machines)
        settings = default_runtime(machines[0], self._fleet, self._facts)
        memory_bytes = min(filter(None, known), default=None)
        is_divisible = self.features.is_divisible
        blank = ClassModel(tuple(machines), settings, memory_bytes=memory_bytes, is_divisible=is_divisible)
        key = self._machine_classes[machines[0]].key
        threads = self._fleet.host.threads if machines[0] == HOST_NAME else 0
        return recall_class(blank, self._store.find(PROBE, key, self.features.hash, self._recipe), threads)

    def _trials(self) -> list[TrialMeasurement]:
        return self._store.find(TRIAL, self._fleet_class.key, self.features.hash, self._recipe)

    def _add_probes(self, machine: str, probes: Sequence[ProbeMeasurement]) -> None:
        self._store.add(PROBE, self._machine_classes[machine], probes, self.features, self._recipe)


def hash_recipe(job: Job, public: DatasetInfo) -> str:
    """Hash what a step's time depends on besides the model: optimizer, loss, metrics, shape of the data."""
    recipe = job.recipe
    form: Mapping[str, object] = {
        "optimizer": [recipe.optimizer, recipe.optimizer_args],
        "loss": [[name, asdict(term)] for name, term in sorted(recipe.loss.items())],
        "metrics": recipe.metrics,
        "compression": recipe.compression,
        "input_range": recipe.input_range,
        "noise": asdict(job.noise) if job.noise else None,
        "sample": [public.sample_shape, public.dtype, public.label_shape],
    }
    if job.recipe.augment:
        files = [file.read_bytes() for file in python_files(job.augment_roots)]
        content = hashlib.sha256(b"\0".join(files)).hexdigest()
        form = {**form, "augment": [job.recipe.augment.rpartition(":")[2], content]}
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:16]
