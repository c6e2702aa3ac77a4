"""One rank's training loop.

Owns the order of things in a run: load, warm up, step, merge, check, evaluate, save, say so. Time in
compute is taken before the collective and time in the collective is waiting, so that the slow rank can
be named.
"""

import hashlib
import math
import os
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.collective import Ranks, merge_batch_norm
from csdctl.worker.contract import (
    Checkpointed,
    EpochEnd,
    Evaluating,
    Finished,
    Progress,
    RankSpec,
    Ready,
    Recipe,
    RunSpec,
)
from csdctl.worker.data import Shard
from csdctl.worker.events import WorkerError, emit
from csdctl.worker.model import hash_weights, load, save_weights
from csdctl.worker.step import Step, Sums

EVALUATION_BATCH = 256
DIVERGED = (
    "lower recipe.learning_rate or lengthen recipe.warmup_epochs; "
    "the checkpoint of the last good epoch is in the run directory"
)


def learning_rate(recipe: Recipe, global_batch: int, step: int, steps_per_epoch: int) -> float:
    """The rate of `step`, counted from 0 over the whole run.

    Linear scaling lr · N / reference_batch, ramped from lr over the warm-up (Goyal et al. 2017, 2.1–2.2;
    paper, section IV).
    """
    target = recipe.learning_rate * global_batch / recipe.reference_batch
    warmup_steps = math.ceil(recipe.warmup_epochs * steps_per_epoch)
    if step >= warmup_steps:
        return target
    return recipe.learning_rate + (target - recipe.learning_rate) * (step + 1) / warmup_steps


def peak_memory_bytes() -> int:
    """The largest resident size this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Tally:
    """What happened since it was made; times in seconds."""

    started: float = field(default_factory=time.monotonic)
    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    loss: float = 0.0
    correct: float = 0.0
    global_samples: float = 0.0

    def add(self, samples: int, compute_s: float, wait_s: float, sums: Sums) -> None:
        """Count one step."""
        self.steps += 1
        self.samples += samples
        self.compute_s += compute_s
        self.wait_s += wait_s
        self.loss += sums.loss
        self.correct += sums.correct
        self.global_samples += sums.samples

    def local(self) -> dict[str, Any]:
        """The fields that every rank's events have."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "compute_s": round(self.compute_s, 6),
            "wait_s": round(self.wait_s, 6),
            "wall_s": round(time.monotonic() - self.started, 6),
        }

    def overall(self, *, has_accuracy: bool) -> dict[str, Any]:
        """The fields that rank 0 adds."""
        count = self.global_samples or math.nan
        return {
            "global_samples": int(self.global_samples),
            "loss": self.loss / count,
            "accuracy": self.correct / count if has_accuracy else None,
        }


class RankTraining:
    """Trains one rank of `spec` together with `ranks`."""

    def __init__(self, spec: RunSpec, ranks: Ranks, tf: Any, keras: Any) -> None:
        self._spec = spec
        self._ranks = ranks
        self._me: RankSpec = spec.ranks[ranks.rank]
        self._keras = keras
        self._tf = tf
        self._global_batch = sum(rank.batch_size for rank in spec.ranks)
        self._step_number = 0

    def run(self) -> None:
        """The whole training; raises WorkerError."""
        started = time.monotonic()
        self._load()
        self._warm_up()
        self._ranks.gather(None)
        emit(Ready(self._me.rank, self._me.node, len(self._shard), round(time.monotonic() - started, 3)))
        recipe = self._spec.recipe
        digest = ""
        for epoch in range(1, recipe.epochs + 1):
            digest = self._epoch(epoch)
            if self._is_over():
                break
        model_path = self._save_model() if self._me.rank == 0 else None
        emit(
            Finished(
                self._me.rank,
                self._me.node,
                epoch,
                self._step_number,
                digest,
                peak_memory_bytes(),
                model_path,
            )
        )

    def _load(self) -> None:
        recipe = self._spec.recipe
        self._model = load(Path(self._spec.architecture), Path(self._spec.weights), self._keras)
        # Other ranks draw other dropout masks; the weights are the same everywhere.
        self._keras.utils.set_random_seed((recipe.seed * 1009 + self._me.rank) % 2**31)
        self._shard = Shard(self._me.parts)
        if len(self._shard) != self._me.num_samples:
            raise WorkerError(
                f"the shard has {len(self._shard)} samples, the plan says {self._me.num_samples}",
                remedy="run `csdctl tune` again",
            )
        self._validation = (
            Shard([self._spec.validation]) if self._spec.validation and self._me.rank == 0 else None
        )
        self._step = Step(
            self._model, recipe, self._shard.read(np.zeros((0, 2), np.int64)), self._tf, self._keras
        )

    def _warm_up(self) -> None:
        """Trace the graphs and reach full speed before the clock runs; the weights stay as they were."""
        before = self._model.get_weights()
        first = next(self._shard.batches(self._me.batch_size, 1, (self._spec.recipe.seed, 0, self._me.rank)))
        for _ in range(2):
            self._step.local(*first)
        self._step.compile_apply()
        self._model.set_weights(before)

    def _epoch(self, epoch: int) -> str:
        spec, me = self._spec, self._me
        whole, since_report = Tally(), Tally()
        order = (spec.recipe.seed, epoch, me.rank)
        rate = 0.0
        for number, (images, labels) in enumerate(
            self._shard.batches(me.batch_size, spec.steps_per_epoch, order), start=1
        ):
            rate = learning_rate(spec.recipe, self._global_batch, self._step_number, spec.steps_per_epoch)
            self._step.set_learning_rate(rate)
            begun = time.perf_counter()
            vector = self._step.local(images, labels)
            computed = time.perf_counter()
            total = self._ranks.sum(vector)
            waited = time.perf_counter()
            sums = self._step.apply(total)
            times = (computed - begun + time.perf_counter() - waited, waited - computed)
            self._step_number += 1
            self._check(sums, epoch, number)
            for tally in (whole, since_report):
                tally.add(len(images), *times, sums)
            if time.monotonic() - since_report.started >= spec.progress_interval_s:
                self._report(Progress, epoch, since_report, step=number)
                since_report = Tally()
            if self._is_over():
                break
        return self._end_epoch(epoch, whole, rate)

    def _check_weights(self, epoch: int) -> None:
        """The loss of a step is that of the weights before it: the last step's are looked at here."""
        if not all(np.isfinite(weights).all() for weights in self._model.get_weights()):
            raise WorkerError(f"the weights are no longer finite after epoch {epoch}", remedy=DIVERGED)

    def _is_over(self) -> bool:
        return self._spec.max_steps is not None and self._step_number >= self._spec.max_steps

    def _check(self, sums: Sums, epoch: int, step: int) -> None:
        if not math.isfinite(sums.loss):
            raise WorkerError(
                f"the loss became {sums.loss} in epoch {epoch}, step {step}",
                remedy=DIVERGED,
            )

    def _report(self, kind: Any, epoch: int, tally: Tally, **more: Any) -> None:
        overall = tally.overall(has_accuracy=self._step.has_accuracy) if self._me.rank == 0 else {}
        emit(kind(rank=self._me.rank, node=self._me.node, epoch=epoch, **tally.local(), **overall, **more))

    def _end_epoch(self, epoch: int, tally: Tally, rate: float) -> str:
        merge_batch_norm(self._model, len(self._shard), self._ranks, self._keras)
        digest = hash_weights(self._model)
        self._compare(digest, epoch)
        local = tally.local()
        more: dict[str, Any] = {}
        self._check_weights(epoch)
        if self._me.rank == 0:
            more = {
                **tally.overall(has_accuracy=self._step.has_accuracy),
                "learning_rate": rate,
                **self._evaluate(),
            }
        emit(
            EpochEnd(
                rank=self._me.rank, node=self._me.node, epoch=epoch, weights_hash=digest, **local, **more
            )
        )
        if self._me.rank == 0:
            self._checkpoint(epoch)
        # All wait for rank 0's evaluation here, so that it does not count as waiting in the next epoch.
        self._ranks.gather(None)
        return digest

    def _compare(self, digest: str, epoch: int) -> None:
        """All ranks must hold the same weights, to the bit."""
        digests = self._ranks.gather(digest)
        if len(set(digests)) > 1:
            different = [self._spec.ranks[k].node for k, one in enumerate(digests) if one != digests[0]]
            raise WorkerError(
                f"after epoch {epoch} the weights of {', '.join(different)} differ from rank 0's",
                remedy="look for a failing memory or differing TensorFlow versions: `csdctl discover`",
            )

    def _evaluate(self) -> dict[str, float | None]:
        if self._validation is None:
            return {}
        results = []
        spoken = time.monotonic()
        for batch in self._validation.in_order(EVALUATION_BATCH):
            results.append(self._step.evaluate(*batch))
            if time.monotonic() - spoken >= self._spec.progress_interval_s:
                spoken = time.monotonic()
                done = sum(int(result.samples) for result in results)
                emit(Evaluating(self._me.rank, self._me.node, done, len(self._validation)))
        count = sum(result.samples for result in results)
        return {
            "validation_loss": sum(result.loss for result in results) / count,
            "validation_accuracy": (
                sum(result.correct for result in results) / count if self._step.has_accuracy else None
            ),
        }

    def _checkpoint(self, epoch: int) -> None:
        path = Path(self._spec.output_directory) / "checkpoints" / f"epoch-{epoch:04d}.weights.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_weights(path, self._model.get_weights())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        emit(Checkpointed(self._me.rank, self._me.node, epoch, str(path), digest))

    def _save_model(self) -> str:
        path = Path(self._spec.output_directory) / "model.keras"
        aside = path.with_name("part.keras")
        self._model.save(aside)
        os.replace(aside, path)
        return str(path)
