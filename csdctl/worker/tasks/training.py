"""One rank's training.

Owns the order of things in a run: load, warm up, join the others, step, evaluate, save, say so; and what
happens when the others are lost: wait for a new group, agree with it on the state of the last completed step,
go on. Time in compute is taken before the collective, and time in the collective is waiting, so that the
slow rank can be named and relieved.
"""

import contextlib
import dataclasses
import math
import queue
import time
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.evaluation import evaluate
from csdctl.worker.compute.learning_rate import learning_rate
from csdctl.worker.compute.model import hash_weights, load
from csdctl.worker.compute.recipe import load_own_metrics
from csdctl.worker.compute.step import Step, Sums
from csdctl.worker.data.arrays import Array
from csdctl.worker.data.prepared import EpochReader, PreparedSamples
from csdctl.worker.data.schedule import OwnSamples, Segment, Share, begin_epoch, change_segment
from csdctl.worker.data.synthetic import SyntheticReader
from csdctl.worker.group.communicator import Communicator, SoloCommunicator
from csdctl.worker.group.link import LinkCommunicator, LinkLostError, Listener, SharedVectors
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.events import EARLY_STOPPING, MAX_STEPS, SAMPLES, STATE, STOPPED
from csdctl.worker.protocol.json_codec import from_dict
from csdctl.worker.protocol.orders import FormGroup
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.balancer import Balancer
from csdctl.worker.tasks.callbacks import after_epoch
from csdctl.worker.tasks.checkpointer import BEST_MODEL, LAST_MODEL, Checkpointer
from csdctl.worker.tasks.orders import Orders
from csdctl.worker.tasks.reporter import Reporter
from csdctl.worker.tasks.state import CallbackState, EpochTotals, Position, pack, unpack
from csdctl.worker.tasks.totals import StepTotals, add_sums, overall
from csdctl.worker.tasks.verify import verify

ORPHAN_S = 600.0
"""A rank that belongs to no group and hears nothing for so long is forgotten, and leaves."""
GROWTH_LIMIT = 2
"""A rank whose memory nobody measured gets at most this many times its planned batch size."""
DIVERGED = (
    "lower recipe.learning_rate or lengthen recipe.warmup_epochs; "
    "the model of the last good epoch is in the run directory"
)
PAUSED, FINISHED = "paused", "finished"


class RankTraining:
    """Trains rank `rank` of `spec`, as `orders` come, with whom they say."""

    def __init__(self, spec: RunSpec, rank: int, tf: Any, keras: Any, step: Step | None = None) -> None:
        """`step`: the one to take, of the same model, recipe and noise, by a rank that measured before."""
        self._spec = spec
        self._step_of_probes = step
        self._me: RankSpec = spec.ranks[rank]
        self._is_root = rank == 0
        self._tf = tf
        self._keras = keras
        self._own = [OwnSamples(one.num_private, one.num_public) for one in spec.ranks]
        self._teller = Reporter(spec, self._me)
        self._orders = Orders(self._teller.alive)
        sizes = {str(one.rank): one.batch_size for one in spec.ranks}
        self._position = Position(1, 0, 0, None, sizes)
        limits = {one.rank: one.max_batch_size or GROWTH_LIMIT * one.batch_size for one in spec.ranks}
        self._balancer = Balancer(limits)
        self._apply_s = 0.0
        self._digest = ""

    def run(self) -> None:
        """The whole training; raises WorkerError."""
        started = time.monotonic()
        self._load()
        self._warm_up()
        with contextlib.closing(Listener(self._spec.run_id, self._me.rank)) as door:
            num_samples = self._me.num_private + self._me.num_public
            self._teller.ready(num_samples, time.monotonic() - started)
            self._follow(door)

    def _follow(self, door: Listener) -> None:
        """Train with one group after another, until the run is over."""
        while True:
            group = self._next_group()
            ranks: Communicator | None = None
            try:
                ranks = self._join(group, door)
                if ranks is None:
                    continue
                self._orders.on_group = ranks.interrupt
                if self._orders.has_group:
                    raise LinkLostError
                if self._spec.is_verified:
                    self._digest = verify(self._spec, self._me, ranks, self._step, self._reader.empty_batch())
                    self._teller.traffic(ranks, group)
                    ranks.close()
                    self._finish("verified")
                    return
                self._synchronize(ranks, group)
                outcome, reason = self._train(ranks, group)
                self._teller.traffic(ranks, group)
                ranks.close()
            except LinkLostError:
                if ranks:
                    ranks.drop()
                self._teller.link_lost(group, self._position)
                continue
            if outcome == PAUSED:
                self._teller.paused(group)
                continue
            self._finish(reason)
            return

    def await_release(self) -> None:
        """Wait until nobody says anything to this rank any more, for who goes on with other things."""
        self._orders.await_release()
        self._orders.on_group = lambda: None  # nothing keeps the other ranks, and through them this one
        self._memory.close()

    def _next_group(self) -> FormGroup:
        try:
            return self._orders.next_group(ORPHAN_S)
        except queue.Empty:
            raise WorkerError(f"nobody has said anything for {ORPHAN_S:g} s: csdctl is gone") from None

    def _load(self) -> None:
        spec, me = self._spec, self._me
        self._reader = SyntheticReader(spec.made, me.rank) if spec.made else EpochReader(spec, me.rank)
        self._validation = PreparedSamples(spec.validation) if spec.validation and self._is_root else None
        self._step = self._step_of_probes or self._make_step()
        self._step.micro_batch_size = me.micro_batch_size
        self._teller.metric_names = self._step.metric_names
        # After the vector: whether somebody wants to stop, and every rank's compute time.
        self._memory = SharedVectors(self._step.size + 1 + len(spec.ranks))
        self._keeping = Checkpointer(spec, me, self._step) if self._is_root else None
        if self._keeping and self._keeping.position:
            self._position = self._keeping.position

    def _make_step(self) -> Step:
        spec, me = self._spec, self._me
        return Step(
            load(Path(spec.architecture), Path(spec.weights), self._keras),
            spec.recipe,
            self._reader.empty_batch(),
            self._tf,
            self._keras,
            rank=me.rank,
            weight=me.weight,
            own_metrics=load_own_metrics(spec.recipe) if self._validation is not None else None,
            noise=spec.noise,
        )

    def _warm_up(self) -> None:
        """Trace the graphs and reach full speed before the clock runs; the weights stay as they were."""
        images, labels = self._reader.first(self._me.batch_size)
        self._step.set_step(0, 0.0)
        is_private = self._step.has_noise and self._me.num_private
        copies = np.ones(len(images), np.int64) if is_private else None
        for _ in range(2):
            self._step.local(images, labels)
            if copies is not None:
                self._step.local(images, labels, private_copies=copies)
        if len(self._spec.ranks) == 1:
            self._step.rehearse_alone(images, labels)
        self._step.rehearse_apply()

    def _join(self, group: FormGroup, door: Listener) -> Communicator | None:
        """The other ranks of `group`; None when there was another order before they were there."""
        if len(group.ranks) == 1:
            return SoloCommunicator(self._memory.local)
        found = door.wait_for_link(group.generation, lambda: self._orders.has_group)
        if found is None:
            return None
        line, hello = found
        nodes = [self._spec.ranks[rank].node for rank in group.ranks]

        def on_waiting(missing: list[int]) -> None:
            # Only rank 0 of a star knows for whom. When they wait for rank 0, another one has to say so.
            if missing or hello["rank"] <= 1:
                self._teller.waiting_for([nodes[rank] for rank in missing])

        door.give_memory(line, self._memory.descriptor)
        ranks = LinkCommunicator(line, hello, self._memory, on_waiting)
        ranks.agree(group.collective)
        return ranks

    def _synchronize(self, ranks: Communicator, group: FormGroup) -> None:
        """All take over the state of the rank that has come farthest."""
        keys = ranks.gather([self._position.total_steps, self._position.epoch])
        farthest = max(keys)
        source = keys.index(farthest)
        behind = [rank for rank, key in enumerate(keys) if key != farthest]
        if ranks.rank == source and behind:
            packed = pack(self._step.state, self._position)
            for rank in behind:
                ranks.send(rank, packed, STATE)
        elif ranks.rank in behind:
            packed = np.frombuffer(ranks.receive(source), np.uint8)
            self._position = unpack(packed, self._step.state)
        self._regroup(group)
        self._balancer.forget()
        self._apply_s = 0.0
        self._teller.joined(group, self._position, self._leg, ranks, self._num_lost(group))

    @property
    def _leg(self) -> Segment:
        leg = self._position.leg
        assert leg is not None
        return leg

    def _regroup(self, group: FormGroup) -> None:
        """Let the members of `group` share what is left of the epoch."""
        position = self._position
        sizes = {rank: position.batch_sizes[str(rank)] for rank in group.ranks}
        leg = position.leg
        if leg is None:
            leg = begin_epoch(self._own, sizes)
        elif {share.rank for share in leg.shares} != set(group.ranks):
            leg = change_segment(leg, position.step, sizes)
        self._position = dataclasses.replace(position, leg=leg)
        self._reader.set_epoch(position.epoch)

    def _num_lost(self, group: FormGroup) -> int:
        """Private samples of ranks that are away."""
        return sum(one.num_private for rank, one in enumerate(self._own) if rank not in group.ranks)

    def _train(self, ranks: Communicator, group: FormGroup) -> tuple[str, str]:
        """Train until the end, or a pause between epochs; says which, and why."""
        recipe = self._spec.recipe
        while self._position.epoch <= recipe.epochs:
            reason = self._epoch(ranks)
            if reason:
                self._digest = self._compare(ranks)
                if reason == MAX_STEPS:
                    self._tell_epoch_end({}, group)
                if self._keeping:
                    self._keeping.checkpoint(self._position)
                return FINISHED, reason
            is_pausing = self._end_epoch(ranks, group)
            if self._position.progressed.is_stopping:
                return FINISHED, EARLY_STOPPING
            if is_pausing and self._position.epoch <= recipe.epochs:
                return PAUSED, ""
            self._regroup(group)
        return FINISHED, ""

    def _epoch(self, ranks: Communicator) -> str:
        """The rest of the epoch; returns why the run ends within it, ''."""
        self._whole, since_report = StepTotals(), StepTotals()
        while self._position.step < self._leg.stop_step:
            global_samples = self._leg.num_samples(self._position.step)
            samples, compute_s, wait_s, sums, is_stopping = self._one_step(ranks, global_samples)
            for tally in (self._whole, since_report):
                tally.add(samples, global_samples, compute_s, wait_s, sums)
            if time.monotonic() - since_report.started >= self._spec.progress_interval_s:
                self._teller.progress(self._position, since_report)
                since_report = StepTotals()
            if is_stopping:
                return STOPPED
            if self._spec.max_steps is not None and self._position.total_steps >= self._spec.max_steps:
                return MAX_STEPS
        return ""

    def _one_step(self, ranks: Communicator, global_samples: int) -> tuple[int, float, float, Sums, bool]:
        """One step: samples, compute and waiting seconds of this rank; sums of all; whether to stop."""
        position, leg, me = self._position, self._leg, self._me.rank
        begun = time.perf_counter()
        number = position.step - leg.start_step
        mine = next(share for share in leg.shares if share.rank == me).batch(number)
        reassigned = self._exchange_reassigned(ranks, leg, number, mine)
        received = time.perf_counter()
        images, labels = self._reader.read(mine, reassigned)
        self._step.set_step(position.total_steps, self._rate())
        copies = self._reader.private_copies(mine) if self._step.has_noise else None
        if ranks.size == 1:
            sums = self._step.alone(images, labels, private_copies=copies)
            self._check(sums, sums.loss)
            self._advance(sums, global_samples)
            return len(images), time.perf_counter() - received, 0.0, sums, self._orders.is_stopping
        vector, size = ranks.local, self._step.size
        self._step.local(images, labels, vector[:size], private_copies=copies)
        computed = time.perf_counter()
        vector[size:] = 0
        vector[size] = self._is_root and self._orders.is_stopping
        vector[size + 1 + me] = self._apply_s + computed - received
        total = ranks.sum(vector)
        summed = time.perf_counter()
        sums = self._step.read_sums(total[:size])
        self._check(sums, float(np.add.reduce(total[:size])))
        self._step.apply(total[:size])
        is_stopping, times_s = bool(total[size] > 0), total[size + 1 :].astype(float)
        self._advance(sums, global_samples)
        self._balance(leg, times_s)
        self._apply_s = time.perf_counter() - summed
        compute_s = computed - received + self._apply_s
        return len(images), compute_s, summed - computed + received - begun, sums, is_stopping

    def _exchange_reassigned(
        self, ranks: Communicator, leg: Segment, number: int, mine: Share
    ) -> bytes | bytearray | None:
        """Rank 0 sends the samples reassigned to other ranks in this step; they receive it."""
        if not self._is_root:
            return ranks.receive(0) if mine.reassigned else None
        for index, share in enumerate(leg.shares[1:], start=1):
            if share.reassigned and (pieces := share.batch(number).reassigned):
                ranks.send(index, self._reader.pack_reassigned(pieces), SAMPLES)
        return None

    def _rate(self) -> float:
        position, leg = self._position, self._leg
        epochs_done = position.epoch - 1 + (position.step + 0.5) / leg.stop_step  # in the middle of the step
        rate = learning_rate(self._spec.recipe, leg.global_batch, epochs_done)
        return rate * position.progressed.rate_factor

    def _advance(self, sums: Sums, global_samples: int) -> None:
        """The step is done: note it, and keep the state where it outlives this process."""
        position, tallied = self._position, self._position.tallied
        so_far = add_sums(Sums(tallied.loss, tallied.metrics, tallied.weight), sums)
        num_samples = tallied.samples + global_samples
        self._position = dataclasses.replace(
            position,
            step=position.step + 1,
            total_steps=position.total_steps + 1,
            tallied=EpochTotals(tallied.steps + 1, num_samples, so_far.loss, so_far.metrics, so_far.samples),
        )
        if self._keeping:
            self._keeping.after_step(self._position, has_others=len(self._leg.shares) > 1)

    def _balance(self, leg: Segment, times_s: Array) -> None:
        """Move batch sizes when a rank has become slower or faster; the same on every rank."""
        position = self._position
        if not self._spec.is_balanced or position.step >= leg.stop_step - 1:
            return
        sizes = {share.rank: share.batch_size for share in leg.shares}
        self._balancer.observe({rank: float(times_s[rank]) for rank in sizes})
        proposal = self._balancer.propose(sizes)
        if proposal is None:
            return
        if self._is_root:
            self._teller.rebalanced(position, *self._balancer.slowest, proposal)
        self._balancer.forget()
        self._position = dataclasses.replace(
            position,
            leg=change_segment(leg, position.step, proposal),
            batch_sizes={**position.batch_sizes, **{str(rank): size for rank, size in proposal.items()}},
        )

    def _check(self, sums: Sums, whole: float) -> None:
        """What would spoil the weights is noticed before it is applied; all ranks see the same sum."""
        if math.isfinite(sums.loss) and math.isfinite(whole):
            return
        position = self._position
        if self._keeping:
            self._keeping.save_last_good()
        what = f"the loss became {sums.loss}" if not math.isfinite(sums.loss) else "the gradient overflowed"
        raise WorkerError(f"{what} in epoch {position.epoch}, step {position.step + 1}", remedy=DIVERGED)

    def _end_epoch(self, ranks: Communicator, group: FormGroup) -> bool:
        """Compare, evaluate, decide, keep; returns whether to pause for a new group."""
        self._digest = self._compare(ranks)
        results: dict[str, Any] = {}
        decided: tuple[Any, bool, bool] | None = None
        if self._is_root:
            if self._validation is not None:
                results = evaluate(self._step, self._validation, self._me, self._spec.progress_interval_s)
            progressed, is_best = self._decide(results)
            decided = (dataclasses.asdict(progressed), is_best, self._orders.is_pausing)
        self._tell_epoch_end(results, group)
        progressed_dict, is_best, is_pausing = ranks.gather(decided)[0]
        position = self._position
        self._position = dataclasses.replace(
            position,
            epoch=position.epoch + 1,
            step=0,
            leg=None,
            tallied=EpochTotals(),
            progressed=from_dict(CallbackState, progressed_dict),
        )
        if self._keeping:
            self._keeping.checkpoint(self._position, is_best=is_best)
            self._keeping.keep(self._position)
            if is_best and self._validation is not None:
                self._keeping.save_model(BEST_MODEL)
        self._teller.traffic(ranks, group)
        # All wait for rank 0 here, so that it does not count as waiting in the next epoch.
        ranks.gather(None)
        return bool(is_pausing)

    def _decide(self, results: dict[str, Any]) -> tuple[CallbackState, bool]:
        of_epoch = self._of_epoch()
        found: dict[str, float | None] = {"loss": of_epoch["loss"], **of_epoch["metrics"]}
        found["validation_loss"] = results.get("validation_loss")
        found |= {f"validation_{name}": one for name, one in results.get("validation_metrics", {}).items()}
        return after_epoch(self._spec.recipe, self._position.progressed, self._position.epoch, found)

    def _of_epoch(self) -> dict[str, Any]:
        """Samples, loss and metrics of the epoch so far, of all ranks, also before a loss."""
        tallied = self._position.tallied
        sums = Sums(tallied.loss, tallied.metrics, tallied.weight)
        return overall(sums, tallied.samples, self._step.metric_names)

    def _tell_epoch_end(self, results: dict[str, Any], group: FormGroup) -> None:
        more: dict[str, Any] = {}
        if self._is_root:
            rate = float(np.asarray(self._step.optimizer.learning_rate.value))
            more = {**self._of_epoch(), "learning_rate": rate, "num_lost": self._num_lost(group), **results}
            more["stepped_samples"] = self._whole.global_samples
        self._teller.epoch_end(self._position.epoch, self._digest, self._whole, more)

    def _compare(self, ranks: Communicator) -> str:
        """All ranks must hold the same weights, to the bit."""
        if self._spec.made:  # in a trial they may come from probes, each with its own moving statistics
            return ""
        if not all(np.isfinite(weights).all() for weights in self._step.model.get_weights()):
            raise WorkerError(
                f"the weights are no longer finite after epoch {self._position.epoch}", remedy=DIVERGED
            )
        digest = hash_weights(self._step.model)
        digests = ranks.gather(digest)
        if len(set(digests)) > 1:
            nodes = [self._spec.ranks[share.rank].node for share in self._leg.shares]
            different = [node for node, one in zip(nodes, digests, strict=True) if one != digests[0]]
            raise WorkerError(
                f"after epoch {self._position.epoch} the weights of {', '.join(different)} "
                "differ from rank 0's",
                remedy="look for a failing memory or differing TensorFlow versions: `csdctl discover`",
            )
        return digest

    def _finish(self, reason: str) -> None:
        is_saving = not self._spec.is_verified and not self._spec.made
        model_path = self._keeping.save_model(LAST_MODEL) if self._keeping and is_saving else None
        self._teller.finished(self._position, self._digest, model_path, reason)
