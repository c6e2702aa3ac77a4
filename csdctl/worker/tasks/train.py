"""The training loop of one rank: step, balance, evaluate, checkpoint, report.

Compute time ends where a sum begins, and time in the sum counts as waiting. So the slow rank can be found,
and gets smaller batches.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array, fields_of, hash_arrays
from csdctl.worker.data.prepared import PreparedSamples, sample_bytes
from csdctl.worker.engine.layout import GradientNoise, Sums, add_sums
from csdctl.worker.engine.step import StepEngine
from csdctl.worker.engine.tensorflow_c import are_finite
from csdctl.worker.group.communicator import Communicator
from csdctl.worker.group.values import LinkLostError, StepVoidError, is_minority, is_near
from csdctl.worker.process.errors import JobError, WorkerError
from csdctl.worker.protocol import events
from csdctl.worker.protocol.datasets import list_names
from csdctl.worker.protocol.recipe import learning_rate
from csdctl.worker.protocol.run_spec import BEST_MODEL, LAST_MODEL
from csdctl.worker.tasks.balancer import Balancer
from csdctl.worker.tasks.callbacks import Decision, after_epoch, check_monitors
from csdctl.worker.tasks.checkpointer import Checkpointer, keep_copy
from csdctl.worker.tasks.progress import CallbackState, Reporter, StepTotals, global_fields
from csdctl.worker.tasks.task import FINISHED, ModelTask

EVALUATION_BATCH = 256
MAX_SPANS = 1000
"""The state lists the reassigned parts of the epoch. With so many, no other batch sizes are tried."""
DIVERGED = "lower recipe.learning_rate or lengthen recipe.warmup_epochs"
LAST_GOOD = "; the model of the last good epoch is in the run directory"


class StepSums:
    """Sums the vectors of one step, and measures when. This rank's parts are in the communicator's `local`.

    Raises WorkerError for a sum that is impossible, and what `Train.check_finite` raises.
    """

    def __init__(
        self,
        train: "Train",
        communicator: Communicator,
        started: float,
        batch: tuple[Array, Array],
        samples_by_rank: Mapping[int, int],
    ) -> None:
        """`started`: when this rank began to compute."""
        self._train, self._communicator, self._batch, self._started = train, communicator, batch, started
        self._samples_by_rank = samples_by_rank
        self.waited_s = 0.0
        """Seconds in all sums but the last, and of waiting for other ranks to compute."""
        self.began = self.ended = started
        """When the latest sum began and ended."""
        self.tail: Array = np.zeros(0)
        """The end of the latest sum, from the stop request on."""
        self.noise = GradientNoise()
        """The noise of the gradient, on rank 0."""

    def __call__(self, number: int, part: Array) -> Array:
        """Return the sum of the vectors in `local`."""
        train, communicator = self._train, self._communicator
        self.waited_s += self.ended - self.began
        layout, is_last = train.summed.layouts[number], number == len(train.summed.layouts) - 1
        norm = train.step.square_norm(communicator.local[layout.step]) if train.tells_noise else 0.0
        self.began = time.perf_counter()
        compute_s = train.apply_s + self.began - self._started - self.waited_s if is_last else 0.0
        total = self._sum(layout, compute_s, norm, is_last=is_last)
        self.ended = time.perf_counter()
        step_total: Array = total[layout.step]
        self.tail = total[layout.step_size :][: 3 + len(train.spec.ranks)].copy()
        loss = 0.0 if train.step.info.sums else train.step.read_sums(step_total[layout.sums]).loss
        train.check_finite(loss, float(np.add.reduce(step_total)), communicator, *self._batch)
        if train.is_root and train.tells_noise:
            self.noise = GradientNoise.estimate(
                parts=float(self.tail[-1]),
                batch=train.step.square_norm(step_total),
                num_parts=sum(bool(self._samples_by_rank[rank]) for rank in communicator.counted),
                count=float(step_total[layout.count]),
            )
        return step_total

    def _sum(self, layout: Any, compute_s: float, norm: float, *, is_last: bool) -> Array:
        """Sum the vector in `local`, whose part of the step is filled in. The hub names a rank at fault."""
        train, communicator = self._train, self._communicator
        vector = communicator.local
        is_stopping = is_last and train.is_root and train.orders.is_stopping
        tail = vector[layout.step_size :][: 3 + len(train.spec.ranks)]
        tail[:] = 0
        tail[0], tail[2 + train.me.rank], tail[-1] = is_stopping, compute_s, norm
        tail[1] = train.duration_s if train.is_root else 0.0
        weighed = train.progress.weigh(train.progress.step_samples)
        counts = dict(zip(communicator.members, weighed, strict=True))
        # With loss scaling, the optimizer skips a gradient that overflowed.
        total = communicator.sum(vector, counts, checks_finite=not train.step.info.has_loss_scaling)
        count, expected = float(total[layout.count]), sum(counts[rank] for rank in communicator.counted)
        if not is_near(count, expected):
            raise WorkerError(
                f"the sum over the ranks is of {count:g} samples, expected {expected:g}",
                remedy="please report it, with the model",
            )
        return total


class Train(ModelTask):
    """Trains the model on the run's data."""

    def load(self) -> None:
        """Load everything, and the state of an earlier process of this run, if there is one."""
        validation = self.spec.validation
        self._validation = PreparedSamples(validation) if validation and self.is_root else None
        super().load()
        info = self.step.info
        check_monitors(self.spec.recipe, [*(metric.name for metric in info.metrics), *info.logs])
        self.balancer = Balancer(self.max_batch_sizes) if self.spec.is_balanced else None
        is_plain = not (
            self.spec.split
            or self.step.info.sums
            or self.step.has_noise
            or self.step.layout.has_summed
            or self.step.info.has_loss_scaling
        )
        self.tells_noise = is_plain and all(rank.weight == 1.0 for rank in self.spec.ranks)
        """Whether the gradient noise follows from the norms of the ranks' gradients."""
        self._weights_hash = ""
        self._since_report = StepTotals()

    def restore(self) -> None:
        """Load the state that this rank saved, if any: rank 0, or the rank of another server for its copy."""
        self._checkpointer: Checkpointer | None = None
        is_copy = bool(self.spec.manifest) and self.me.server == self.me.rank
        if not self.is_root and not is_copy:
            return
        self._checkpointer = Checkpointer(
            self.spec if self.is_root else keep_copy(self.spec),
            self.reporter,
            self.step,
            samples=self.progress.samples,
            save_trained=self.save_trained,
        )
        if self._checkpointer.position:
            self.progress.position = self._checkpointer.position

    def run(self, communicator: Communicator) -> str:
        """Train until the end."""
        if self.balancer:  # the position is rank 0's: an open trial of before is over
            self.balancer.forget()
        self.apply_s = 0.0
        try:
            while not self._is_over:  # it may have been decided before a link was lost
                if reason := self._run_epoch(communicator):
                    return self._end_early(communicator, reason)
                self._end_epoch(communicator)
            return events.EARLY_STOPPING if self.progress.position.callbacks.is_stopping else FINISHED
        finally:
            if self._since_report.steps:  # the link is lost, or the run is stopped, within an epoch
                self.reporter.progress(self.progress.position, self._since_report, is_over=True)

    @property
    def _is_over(self) -> bool:
        position = self.progress.position
        return position.callbacks.is_stopping or position.epoch > self.spec.recipe.epochs

    def finish(self, reason: str) -> None:
        """Save the model and report the completion record."""
        position, weights_hash = self.progress.position, self._weights_hash
        if not weights_hash:  # resumed after the last epoch
            weights_hash = hash_arrays(self.summed.weights)
            self.step.set_step(position.total_steps, self._last_learning_rate())
        self.reporter.finished(position, weights_hash, self.save_model(), reason)

    def save_model(self) -> str | None:
        """Save the trained model on rank 0. Returns its path."""
        return self._checkpointer.save_model(LAST_MODEL) if self._checkpointer and self.is_root else None

    def compare_weights(self, communicator: Communicator) -> str:
        """Return the hash of the weights. Raises WorkerError unless they are finite.

        A minority of ranks whose weights differ from rank 0's is lost. If most ranks differ, rank 0 may be at
        fault.
        """
        epoch = self.progress.position.epoch
        if not all(map(are_finite, self.step.weights)):
            raise WorkerError(f"the weights are no longer finite after epoch {epoch}", remedy=DIVERGED)
        weights_hash, different = self.share_hash(communicator)
        if is_minority(different, len(communicator.counted)):
            for rank in different:
                communicator.evict(rank, f"has other weights than rank 0 after epoch {epoch}")
        elif different:
            raise self.other_weights(f"epoch {epoch}", different)
        return weights_hash

    def _run_epoch(self, communicator: Communicator) -> str:
        progress, max_steps = self.progress, self.spec.max_steps
        self.reader.set_epoch(progress.position.epoch)
        self._epoch_totals, self._since_report = StepTotals(), StepTotals()
        self._sum_ended = self.duration_s = 0.0
        while progress.position.step < progress.segment.stop_step:
            self._admit(communicator)
            before = communicator.members
            try:
                step = self._run_step(communicator)
            except StepVoidError:  # with the ranks that are left, the same step again
                communicator.counted = before
                self._settle(communicator, before)
                self._sum_ended = self.duration_s = 0.0
                continue
            for totals in (self._epoch_totals, self._since_report):
                totals.add(step)
            if self._checkpointer:
                self._checkpointer.checkpoint_if_due(progress.position)
            if time.monotonic() - self._since_report.started >= self.spec.progress_interval_s:
                slow_link = self._slowest_link(communicator)
                self.reporter.progress(progress.position, self._since_report, slow_link=slow_link)
                self._since_report = StepTotals()
            if step.is_stopping:
                return events.STOPPED
            if max_steps is not None and progress.position.total_steps >= max_steps:
                return events.MAX_STEPS
        return ""

    def _admit(self, communicator: Communicator) -> None:
        if self.is_root:
            communicator.look()
            communicator.admit([*communicator.joining])
            if communicator.is_alone and communicator.admitted:
                communicator.gather(None, type(None))
                self._settle(communicator, (self.me.rank,))

    def _settle(self, communicator: Communicator, before: Sequence[int]) -> None:
        """Continue with the present ranks. If they have changed, begin to observe the balance again."""
        if communicator.admitted or not tuple(before) == communicator.members == communicator.counted:
            if self.balancer:  # batch sizes whose trial is open are taken back
                self.progress.plan_batch_sizes(self.balancer.forget())
            self.settle(communicator, before)

    def _slowest_link(self, communicator: Communicator) -> tuple[int, float, int] | None:
        """Return `Progress.slow_link`. None if the waiting ended when the ranks had computed."""
        waited: dict[int, list[float]] = {}
        for rank, wait_s in communicator.waits:
            waited.setdefault(rank, []).append(wait_s)
        communicator.waits, others_s = [], self._since_report.others_s
        slowest = max(waited, key=lambda rank: sum(waited[rank]), default=0)
        if not (slowest and self.is_root) or others_s is None or sum(waited[slowest]) <= others_s:
            return None
        num_bytes = 2 * communicator.local.nbytes * len(waited[slowest])  # vectors up, and sums down
        return slowest, round(sum(waited[slowest]) - others_s, 6), num_bytes

    def _run_step(self, communicator: Communicator) -> StepTotals:
        began = time.perf_counter()
        before = communicator.members
        samples_by_rank = dict(zip(before, self.progress.step_samples, strict=True))
        share = self.progress.share_of(self.me.rank)
        reassigned = self.exchange_reassigned(communicator)
        received = time.perf_counter()
        images, labels = self.reader.read(share, reassigned)
        input_s = time.perf_counter() - received
        self.step.set_step(self.progress.position.total_steps, self._learning_rate())
        shares = self.progress.segment.shares
        is_full = all(samples_by_rank[share.rank] == share.batch_size for share in shares)
        copies = self.reader.private_copies(share) if self.step.has_noise else None
        if communicator.is_alone:
            self._sum_ended = self.duration_s = 0.0
            sums = self.step.alone(images, labels, private_copies=copies)
            self.check_finite(sums.loss, sums.loss, communicator, images, labels)
            global_samples = len(images)
            self._end_step(communicator, before, sums, global_samples)
            return StepTotals(
                steps=1,
                samples=len(images),
                compute_s=time.perf_counter() - received,
                input_s=input_s,
                sums=sums,
                global_samples=global_samples,
                is_stopping=self.orders.is_stopping,
            )
        summed = StepSums(self, communicator, received, (images, labels), samples_by_rank)
        sums = self._take(communicator, images, labels, copies, summed)
        self.check_finite(sums.loss, 0.0, communicator, images, labels)
        tail = summed.tail
        is_stopping, duration_s, times_s = bool(tail[0] > 0), float(tail[1]), tail[2:-1].astype(float)
        global_samples = sum(samples_by_rank[rank] for rank in communicator.counted)
        self._end_step(communicator, before, sums, global_samples)
        if is_full and before == communicator.members == communicator.counted:
            self._balance(times_s, duration_s)
        self.duration_s = summed.ended - self._sum_ended if self._sum_ended else 0.0
        self._sum_ended = summed.ended
        self.apply_s = time.perf_counter() - summed.ended
        return StepTotals(
            steps=1,
            samples=len(images),
            compute_s=summed.began - received - summed.waited_s + self.apply_s,
            wait_s=summed.ended - summed.began + received - began + summed.waited_s,
            input_s=input_s,
            others_s=None if self.spec.split else float(times_s.max() - times_s[self.me.rank]),
            sums=sums,
            global_samples=global_samples,
            noise=summed.noise,
            is_stopping=is_stopping,
        )

    def _take(
        self, communicator: Communicator, images: Array, labels: Array, copies: Array | None, sums: "StepSums"
    ) -> Sums:
        return self.step.run(images, labels, sums, communicator.local, private_copies=copies)

    def exchange_reassigned(self, communicator: Communicator) -> bytes | bytearray | None:
        """Exchange the samples that other ranks read from the host in this step. Return this rank's."""
        progress, received = self.progress, None
        for share in progress.segment.shares[1:]:
            if not share.reassigned or not (batch := share.batch(progress.step_in_segment)).reassigned:
                continue
            if self.is_root:
                communicator.send(share.rank, self.reader.pack_reassigned(batch.reassigned), events.SAMPLES)
            elif share.rank == self.me.rank:
                num_bytes = batch.num_reassigned * sample_bytes(*self.reader.first(0))
                received = communicator.receive(0, num_bytes, events.SAMPLES)
        return received

    def _learning_rate(self) -> float:
        progress = self.progress
        size = progress.segment.global_batch
        return self._learning_rate_at(progress.position.total_steps, size, progress.epochs_done)

    def _last_learning_rate(self) -> float:
        """Return the rate of the last step of a run that is over, which its optimizer is saved with."""
        position, num_epochs = self.progress.position, self.progress.position.epoch - 1
        epochs_done = num_epochs - 0.5 * num_epochs / max(1, position.total_steps)
        size = sum(position.batch_sizes.values())
        return self._learning_rate_at(position.total_steps - 1, size, epochs_done)

    def _learning_rate_at(self, step: int, global_batch: int, epochs_done: float) -> float:
        scheduled = self.step.scheduled_rate(step)
        rate = learning_rate(self.spec.recipe, global_batch, epochs_done, scheduled)
        return rate * self.progress.position.callbacks.rate_factor

    def _end_step(
        self, communicator: Communicator, before: Sequence[int], sums: Sums, global_samples: int
    ) -> None:
        """Count the step of the ranks `before`, and write the state to a place that survives this process."""
        self.progress.end_step(sums, global_samples)
        self._settle(communicator, before)
        if self._checkpointer:
            has_others = len(self.progress.segment.shares) > 1
            self._checkpointer.after_step(self.progress.position, has_others=has_others)

    def _balance(self, times_s: Array, previous_step_s: float) -> None:
        """Try other batch sizes if a rank computes longer than others. Every rank makes the same decision."""
        progress = self.progress
        if not self.balancer or progress.position.step >= progress.segment.stop_step - 1:
            return
        sizes = {share.rank: share.batch_size for share in progress.segment.shares}
        self.balancer.observe({rank: float(times_s[rank]) for rank in sizes}, previous_step_s)
        num_spans = sum(len(share.reassigned) for share in progress.segment.shares)
        change = self.balancer.decide(sizes, progress.least_batch_sizes, may_try=num_spans < MAX_SPANS)
        if change is None:
            return
        if self.is_root:
            position = progress.position
            self.reporter.emit(
                events.Rebalanced,
                epoch=position.epoch,
                step=position.step,
                slowest=self.spec.ranks[change.slowest].node,
                slowdown=round(change.slowdown, 3),
                batch_sizes={str(rank): size for rank, size in change.batch_sizes.items()},
                outcome=change.outcome,
                gain=None if change.outcome == events.TRIED else round(change.gain, 4),
            )
        if change.batch_sizes != sizes:
            progress.change_batch_sizes(change.batch_sizes)

    def check_finite(self, loss: float, total: float, communicator: Communicator, *batch: Array) -> None:
        """Raise an error before a non-finite gradient is applied. All ranks see the same sum.

        The hub leaves a minority of non-finite vectors out of the sum. So the samples of most `batch`es are
        the cause, or the training diverges. Rank 0 raises WorkerError. The other ranks wait for its end.
        """
        # With loss scaling, the optimizer skips a gradient that overflowed and lowers the scale.
        if math.isfinite(loss) and (math.isfinite(total) or self.step.info.has_loss_scaling):
            return
        fields = [values for array in batch for values in fields_of(array).values()]
        are_inputs_finite = communicator.gather(all(np.isfinite(values).all() for values in fields), bool)
        if not self.is_root:
            communicator.gather(None, type(None))
            raise LinkLostError
        cause = f"the loss became {loss}" if not math.isfinite(loss) else "the gradient overflowed"
        remedy, position = DIVERGED, self.progress.position
        if wrong := [rank for rank, is_finite in are_inputs_finite.items() if not is_finite]:
            nodes = [self.spec.ranks[rank].node for rank in wrong]
            cause = f"samples of {list_names(nodes)} have NaN or infinity: {cause}"
            remedy = "remove or replace them: np.isfinite finds them"
        remedy += LAST_GOOD * (self._checkpointer is not None and self._checkpointer.save_last_good())
        raise WorkerError(f"{cause} in epoch {position.epoch}, step {position.step + 1}", remedy)

    def _end_early(self, communicator: Communicator, reason: str) -> str:
        self._weights_hash = self.compare_weights(communicator)
        if reason == events.MAX_STEPS:
            self._report_epoch_end({})
        if self._checkpointer:
            self._checkpointer.checkpoint(self.progress.position)
        return reason

    def _end_epoch(self, communicator: Communicator) -> None:
        before = communicator.members
        self._weights_hash = self.compare_weights(communicator)
        results: dict[str, Any] = {}
        decision: list[Any] | None = None
        if self.is_root:
            if self._validation is not None:
                results = evaluate(self.step, self._validation, self.reporter, self.spec.progress_interval_s)
            callbacks, is_best = self._decide(results)
            decision = [dataclasses.asdict(callbacks), is_best]
        self._report_epoch_end(results)
        # The decision of rank 0 counts.
        decided = communicator.gather(decision, Decision | None)[0]
        if decided is None:
            raise LinkLostError
        callbacks, is_best = decided
        self.progress.end_epoch(callbacks)
        if self._checkpointer:
            # First: after a loss in between, the end of the epoch is repeated.
            if is_best and self._validation is not None:
                self._checkpointer.save_model(BEST_MODEL)
            self._checkpointer.checkpoint(self.progress.position, is_best=is_best)
            self._checkpointer.write_step_file(self.progress.position)
        self.reporter.traffic(communicator)
        if self._is_over:
            return
        if self.is_root:
            communicator.look()
            communicator.admit([*communicator.joining])
        # All ranks wait for rank 0 here, so that this does not count as waiting in the next epoch.
        communicator.gather(None, type(None))
        # A rank that was lost meanwhile, and has joined, has joined for all ranks.
        counted, members = communicator.counted, communicator.members
        before = tuple(rank for rank in before if rank in counted or rank not in members)
        communicator.counted = tuple(sorted({*before, *members}))  # in the latest step
        self.progress.regroup(communicator.members)
        self._settle(communicator, before)

    def _decide(self, results: dict[str, Any]) -> tuple[CallbackState, bool]:
        epoch_results = self._epoch_results()
        monitored: dict[str, float | None] = {"loss": epoch_results["loss"], **epoch_results["metrics"]}
        monitored["validation_loss"] = results.get("validation_loss")
        metrics = results.get("validation_metrics", {})
        monitored |= {f"validation_{name}": value for name, value in metrics.items()}
        position = self.progress.position
        return after_epoch(self.spec.recipe, position.callbacks, position.epoch, monitored)

    def _epoch_results(self) -> dict[str, Any]:
        """Return samples, loss and metrics of the epoch so far, over all ranks, also ranks that were lost."""
        totals = self.progress.position.totals
        if not (totals.weight or self.step.has_noise):
            raise _no_weight(f"epoch {self.progress.position.epoch}")
        sums = Sums(totals.loss, totals.states, totals.weight)
        return global_fields(sums, totals.samples, self.step.metrics(sums))

    def _report_epoch_end(self, results: dict[str, Any]) -> None:
        fields: dict[str, Any] = {}
        if self.is_root:  # a rank that has joined at the end of the epoch has set no rate yet
            rates = self.step.rates if self._epoch_totals.steps else []
            rate = float(rates[0]) if rates else self._learning_rate()
            fields = {
                **self._epoch_results(),
                "learning_rate": rate,
                "num_lost": self.progress.num_lost(),
                **results,
                "stepped_samples": self._epoch_totals.global_samples,
                "noise_scale": self._epoch_totals.noise.scale,
            }
        fields |= {"epoch": self.progress.position.epoch, "weights_hash": self._weights_hash}
        self.reporter.emit(events.EpochEnd, **self._epoch_totals.local_fields(), **fields)
        self._since_report = StepTotals()


def evaluate(
    step: StepEngine, validation: PreparedSamples, reporter: Reporter, progress_interval_s: float
) -> dict[str, Any]:
    """Return mean loss and metrics over `validation` as fields of an EpochEnd. Emit progress meanwhile."""
    results: list[Sums] = []
    reported = time.monotonic()
    for start in range(0, len(validation), EVALUATION_BATCH):
        batch = validation.span(start, EVALUATION_BATCH)
        results.append(step.evaluate(*batch, start // EVALUATION_BATCH))
        if time.monotonic() - reported >= progress_interval_s:
            reported = time.monotonic()
            num_done = min(len(results) * EVALUATION_BATCH, len(validation))
            reporter.emit(events.Evaluating, num_done, len(validation))
    total = add_sums(results)
    if not total.count:
        raise _no_weight("the validation data")
    metrics = step.metrics(total)
    return {
        "validation_loss": total.mean_loss,
        "validation_accuracy": metrics.get("accuracy"),
        "validation_metrics": metrics,
    }


def _no_weight(where: str) -> WorkerError:
    return JobError(
        f"{where} has no loss: the weights of all samples are 0 or add up to 0, or all of them are masked",
        "fix the weights (sample_weight, class_weight), or what the model masks (mask_zero, ignore_class)",
    )
