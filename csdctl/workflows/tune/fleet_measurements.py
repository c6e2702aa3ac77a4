"""Stored measurements of one model, trained by one job on one fleet, as tuning reads and extends them.

The model of the fleet is pure (csdctl/tuning/fleet_model.py). This module builds it from the measurements
file, and writes new measurements there with their time.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from csdctl.fleet.facts import Facts
from csdctl.fleet.hardware import classify_fleet, classify_machine
from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.fleet.names import names_by_value
from csdctl.job.model import Job, python_files
from csdctl.runs.measurements import PROBE, SUM, TRIAL, MeasurementStore
from csdctl.tuning import fleet_model
from csdctl.tuning import measurements as measured
from csdctl.tuning.fleet_model import ClassModel, FleetModel, TriedPlan
from csdctl.tuning.measurements import CollectiveMeasurement, ProbeMeasurement, ProbeOutcome
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.events import SumTimed
from csdctl.worker.protocol.run_spec import Runtime
from csdctl.workflows.train.plan import default_runtime


class FleetMeasurements:
    """The stored measurements of one model, trained by one job on one fleet."""

    def __init__(
        self,
        model: measured.ModelProperties,
        recipe: str,
        fleet: Fleet,
        facts: Mapping[str, Facts],
        store: MeasurementStore,
        *,
        errors: Sequence[float] = (),
        is_host_training: bool = True,
    ) -> None:
        """`recipe`: from `hash_recipe`. `facts` of the host and every node. `errors`: forecasts of runs."""
        self.model, self._recipe = model, recipe
        self.fleet, self._facts, self._store, self._errors = fleet, facts, store, errors
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

        The host's class is named 'host', a class of nodes by its key.
        """
        by_class = names_by_value(
            (name, HOST_NAME if name == HOST_NAME else self._machine_classes[name].key)
            for name in self._machines
        )
        classes: dict[str, ClassModel] = {}
        factors: dict[str, float] = {}
        for name, machines in by_class.items():
            blank = self._blank_class(machines)
            probes = self._store.find(
                PROBE, self._machine_classes[machines[0]].key, self.model.hash, self._recipe
            )
            classes[name] = fleet_model.recall_class(blank, probes)
            latest = {probe.node: probe.factor for probe in probes if probe.settings == blank.settings}
            factors |= {machine: latest[machine] for machine in machines if machine in latest}
        must_train = frozenset({HOST_NAME, *required, *(name for name, _ in self.fleet.networks)})
        return FleetModel(
            tuple(self._machines),
            classes,
            self.model.vector_bytes,
            required=must_train,
            outlier_factors=factors,
        )

    def _blank_class(self, machines: Sequence[str]) -> ClassModel:
        first, facts = machines[0], self._facts
        limits = (fleet_model.rank_memory_bytes(facts[machine].usable_memory_bytes) for machine in machines)
        return ClassModel(
            tuple(machines),
            default_runtime(first, self.fleet, facts),
            memory_bytes=min(filter(None, limits), default=None),
            is_divisible=self.model.is_divisible,
        )

    def recall_overhead(self, model: FleetModel) -> float | None:
        """Return the overhead factor of `model` in the newest trial on such a fleet. None without one."""
        return fleet_model.recall_overhead(self._trials(), model)

    def forecast_errors(self) -> measured.ForecastErrors:
        """Return the errors of earlier forecasts: of this model on such a fleet, and for runs."""
        errors = measured.compare_trials(self._trials())
        return replace(errors, tried=(*errors.tried, *self._errors))

    def _trials(self) -> list[measured.TrialMeasurement]:
        return self._store.find(TRIAL, self._fleet_class.key, self.model.hash, self._recipe)

    def collectives(self) -> list[CollectiveMeasurement]:
        """Return the sums that were timed on such a fleet."""
        return self._store.find(SUM, self._fleet_class.key)

    def store_sums(self, sums: Sequence[SumTimed]) -> None:
        """Store new timings of sums."""
        now = time.time()
        measured = [
            CollectiveMeasurement(len(timed.ranks), timed.num_bytes, timed.sum_s, now) for timed in sums
        ]
        self._store.add(SUM, self._fleet_class, measured)

    def learn_probes(self, model: FleetModel, outcomes: Mapping[str, measured.ProbeOutcome]) -> FleetModel:
        """Return the model updated with one round of probes, by machine, and store them.

        A size that was only predicted not to fit in memory is not stored: more may be free next time. Nor is
        a size at which a process was killed although a larger size fitted.
        """
        now, model = time.time(), fleet_model.learn_probes(model, outcomes)
        for machine, outcome in outcomes.items():
            members = model.class_of(machine)
            is_too_large = outcome.is_oom_kill and outcome.batch_size >= (members.too_large or math.inf)
            if outcome.step_time_s is not None or is_too_large:
                self._add_probe(model, machine, outcome, members.settings, measured_at=now)
        return model

    def learn_trial(self, model: FleetModel, tried: TriedPlan) -> FleetModel:
        """Return the model updated with a trial, and store it, outliers with the step time of their class."""
        now, result, model = time.time(), tried.result, fleet_model.learn_trial(model, tried)
        if len(tried.ranks) > 1:
            summed = CollectiveMeasurement(len(tried.ranks), self.model.vector_bytes, result.sum_s, now)
            self._store.add(SUM, self._fleet_class, [summed])
        ranks = tuple(
            measured.TrialRank(
                self._machine_classes[rank.node].key,
                rank.batch_size,
                rank.runtime,
                model.outlier_factors.get(rank.node, 1.0),
            )
            for rank in tried.ranks
        )
        predicted = tried.best.prediction.samples_per_s
        trial = measured.TrialMeasurement(ranks, result.step_s, result.samples_per_s, now, predicted)
        self._store.add(TRIAL, self._fleet_class, [trial], self.model, self._recipe)
        for rank in tried.ranks:
            if rank.batch_size:
                outcome = ProbeOutcome(rank.batch_size, tried.compute_s[rank.node], None)
                self._add_probe(model, rank.node, outcome, rank.runtime, measured_at=now)
        return model

    def _add_probe(
        self, model: FleetModel, machine: str, outcome: ProbeOutcome, settings: Runtime, *, measured_at: float
    ) -> None:
        """Store a measurement of a machine as its class' and its factor, by which it differs."""
        factor = model.outlier_factors.get(machine, 1.0)
        fields = asdict(outcome)
        if outcome.step_time_s is not None:
            fields["step_time_s"] = outcome.step_time_s / factor
        probe = ProbeMeasurement(
            **fields, settings=settings, measured_at=measured_at, node=machine, factor=factor
        )
        self._store.add(PROBE, self._machine_classes[machine], [probe], self.model, self._recipe)


def hash_recipe(job: Job, public: DatasetInfo) -> str:
    """Hash what a step's time depends on besides the model: optimizer, loss, metrics, shape of the data."""
    recipe = job.recipe
    form: dict[str, object] = {
        "optimizer": [recipe.optimizer, recipe.optimizer_args],
        "loss": [[name, asdict(term)] for name, term in sorted(recipe.losses.items())],
        "metrics": recipe.metrics,
        "compression": recipe.compression,
        "input_range": recipe.input_range,
        "noise": asdict(job.noise) if job.noise else None,
        "sample": [public.sample_shape, public.dtype, public.label_shape],
    }
    if recipe.augment:
        files = [file.read_bytes() for file in python_files(job.augment_roots)]
        content = hashlib.sha256(b"\0".join(files)).hexdigest()
        form["augment"] = [recipe.augment.rpartition(":")[2], content]
    return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()[:16]
