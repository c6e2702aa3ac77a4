"""A model of a run that is lost, stopped, repeated and resumed at random, and the events that its ranks send.

It knows what was done: `steps` and `samples` of the model, and the seconds of each rank. Ranks send what
csdctl/worker/tasks/train.py sends. A killed rank does not report what it did since its latest report.
"""

from dataclasses import dataclass, field
from random import Random

from csdctl.worker.protocol.events import (
    STOPPED,
    EpochEnd,
    Event,
    Finished,
    Joined,
    NodeBack,
    NodeLost,
    Progress,
    Ready,
    Rebalanced,
)

NODES = ("host", "csd0", "csd1", "csd2")
EPOCH_SAMPLES = 300


@dataclass
class Done:
    """Since the latest report, or since the rank joined."""

    steps: int = 0
    samples: int = 0
    global_samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    wall_s: float = 0.0

    def add(self, samples: int, global_samples: int, compute_s: float, wait_s: float, other_s: float) -> None:
        self.steps += 1
        self.samples += samples
        self.global_samples += global_samples
        self.compute_s += compute_s
        self.wait_s += wait_s
        self.wall_s += compute_s + wait_s + other_s


@dataclass
class Rank:
    """A rank's process: what it has not reported, and what its next end of an epoch includes."""

    reported_every: int
    since_report: Done = field(default_factory=Done)
    since_joined: Done = field(default_factory=Done)


class History:
    """Draws a history. `events` have their times of arrival."""

    def __init__(self, random: Random, epochs: int = 4) -> None:
        self.random, self.epochs, self._breaks = random, epochs, 12
        self.events: list[tuple[float, Event]] = []
        self.time_s = 1000.0
        self.sizes = {rank: random.randint(3, 20) for rank in range(len(NODES))}
        self.members = list(range(len(NODES)))
        self.epoch = 1
        self.step = self.total_steps = self.epoch_samples = self.samples_before = 0
        self.checkpoints = [(1, 0, 0, 0, 0)]
        self.sessions = 1
        self._start(self.members)
        self._begin()
        while self.epoch <= epochs:
            self._take_step()
            if self._breaks > 0 and random.random() < 0.25:
                self._breaks -= 1
                breaks = self._lose_node, self._return_node, self._lose_host, self._rebalance, self._stop
                random.choice([*breaks, self._vanish])()
            if self.epoch_samples >= EPOCH_SAMPLES:
                self._end_epoch()
        for rank in self.members:
            self._send(Finished(rank, NODES[rank], epochs, self.total_steps, "hash", 1 << 20))

    @property
    def samples(self) -> int:
        """Samples that the model has learnt from."""
        return self.samples_before + self.epoch_samples

    def _send(self, event: Event) -> None:
        self.time_s += self.random.uniform(0.0, 0.01)
        self.events.append((self.time_s, event))

    def _start(self, ranks: list[int]) -> None:
        self.ranks = {rank: Rank(self.random.randint(1, 6)) for rank in range(len(NODES))}
        for rank in ranks:
            self._send(Ready(rank, NODES[rank], 100))

    def _join(self, newcomers: list[int], *lost: int, is_start: bool = False) -> None:
        """Rank 0 says who takes part. Newcomers have reported nothing since."""
        for rank in newcomers:
            self.ranks[rank].since_report, self.ranks[rank].since_joined = Done(), Done()
        sizes = {str(rank): self.sizes[rank] for rank in self.members}
        why = tuple((rank, "no answer") for rank in lost)
        position = self.epoch, self.step, 99, self.total_steps
        self._send(Joined(0, NODES[0], *position, sizes, is_start, why, 0, self.epoch_samples))

    def _begin(self) -> None:
        self.time_s += self.random.uniform(1.0, 9.0)
        self._join(self.members, is_start=True)

    def _take_step(self, without: int | None = None) -> None:
        """All members take a step, which one of them may not count: it is lost in it."""
        step_s = self.random.uniform(0.05, 0.5)
        self.time_s += step_s
        count = min(sum(self.sizes[rank] for rank in self.members), EPOCH_SAMPLES - self.epoch_samples)
        for rank in self.members:
            if rank == without:
                continue
            compute_s = step_s * self.random.uniform(0.3, 0.9)
            amounts = self.sizes[rank], count if rank == 0 else 0, compute_s, step_s - compute_s, 0.001
            done = self.ranks[rank]
            done.since_report.add(*amounts)
            done.since_joined.add(*amounts)
        if without != 0:
            self.step, self.total_steps = self.step + 1, self.total_steps + 1
            self.epoch_samples += count
        for rank in self.members:
            if self.ranks[rank].since_report.steps >= self.ranks[rank].reported_every and rank != without:
                self._report(rank)

    def _report(self, rank: int) -> None:
        done = self.ranks[rank].since_report
        if done.steps:
            self._send(Progress(rank, NODES[rank], self.epoch, self.step, **self._rounded(done)))
        self.ranks[rank].since_report = Done()

    def _rounded(self, done: Done) -> dict[str, float]:
        times = {name: round(getattr(done, name), 6) for name in ("compute_s", "wait_s", "wall_s")}
        times |= {"input_s": 0.0, "others_s": round(done.wait_s / 2, 6), "cpu_s": times["compute_s"]}
        counts = {name: getattr(done, name) for name in ("steps", "samples", "global_samples")}
        return counts | times

    def _lose_node(self) -> None:
        """A node is lost, in a step or between two: with its process, or its link alone."""
        nodes = self.members[1:]
        if not nodes:
            return
        lost = self.random.choice(nodes)
        if self.random.random() < 0.5 and self.epoch_samples < EPOCH_SAMPLES:
            self._take_step(without=lost)
        self._drop_node(lost)

    def _drop_node(self, lost: int) -> None:
        """The others go on without a node. csdctl may know of it before rank 0 does, or after."""
        if self.random.random() < 0.5:  # its process lives
            self._report(lost)
        self.members = [rank for rank in self.members if rank != lost]
        said = [lambda: self._join([], lost), lambda: self._send(NodeLost(lost, NODES[lost], "no answer"))]
        for say in self.random.sample(said, 2):
            say()

    def _return_node(self) -> None:
        """A lost node takes part again, in the middle of an epoch or at its beginning."""
        absent = [rank for rank in range(len(NODES)) if rank not in self.members]
        if not absent:
            return
        back = self.random.choice(absent)
        self.members = sorted([*self.members, back])
        self._join([back])
        self._send(NodeBack(back, NODES[back]))

    def _lose_host(self) -> None:
        """The host's rank is killed: after a step that the others have counted, or between two.

        It begins alone, and the others join it.
        """
        if self.random.random() < 0.5 and self.epoch_samples < EPOCH_SAMPLES:
            self._take_step(without=0)
        nodes = self.members[1:]
        for rank in nodes:
            self._report(rank)
        self.ranks[0] = Rank(self.random.randint(1, 6))
        self._send(NodeLost(0, NODES[0], "killed"))
        self._send(Ready(0, NODES[0], 100))
        self.members = [0]
        self._begin()
        self._send(NodeBack(0, NODES[0]))
        while nodes:
            if self.random.random() < 0.3 and self.epoch_samples < EPOCH_SAMPLES:
                self._take_step()
            joining = self.random.sample(nodes, self.random.randint(1, len(nodes)))
            nodes = [rank for rank in nodes if rank not in joining]
            self.members = sorted([*self.members, *joining])
            self._join(joining)

    def _rebalance(self) -> None:
        self.sizes = {rank: max(1, size + self.random.randint(-2, 2)) for rank, size in self.sizes.items()}
        sizes = {str(rank): self.sizes[rank] for rank in self.members}
        self._send(Rebalanced(0, NODES[0], self.epoch, self.step, "csd0", 1.5, sizes))

    def _stop(self) -> None:
        """The user stops the run, and resumes it with all nodes."""
        for rank in self.members:
            self._report(rank)
            position = self.epoch - 1, self.total_steps, "hash", 1 << 20, None, STOPPED
            self._send(Finished(rank, NODES[rank], *position))
        self._resume()

    def _vanish(self) -> None:
        """The host fails: nothing is reported, and the run goes on from its latest checkpoint."""
        if len(self.checkpoints) > 1 and self.random.random() < 0.5:
            self.checkpoints.pop()
        position = self.checkpoints[-1]
        self.epoch, self.step, self.total_steps, self.epoch_samples, self.samples_before = position
        self._resume()

    def _resume(self) -> None:
        self.time_s += 100.0
        self.sessions += 1
        self.members = list(range(len(NODES)))
        self._start(self.members)
        self._begin()

    def _end_epoch(self) -> None:
        self.time_s += 0.3
        lost_there = self.random.choice([0, 1, None, None, None, None])
        for rank in self.random.sample(self.members, len(self.members)):
            done = self.ranks[rank]
            done.since_joined.wall_s += 0.3  # evaluation
            fields = self._rounded(done.since_joined)
            stepped = fields.pop("global_samples")
            overall = {"global_samples": self.epoch_samples, "stepped_samples": stepped, "loss": 1.0}
            of_host = overall if rank == 0 else {}
            self._send(EpochEnd(rank, NODES[rank], self.epoch, weights_hash="hash", **fields, **of_host))
            done.since_report, done.since_joined = Done(), Done()
        if lost_there == 0:  # the end of the epoch is repeated, without steps
            self._lose_host()
            self._end_epoch()
            return
        self.samples_before += self.epoch_samples
        self.epoch, self.step, self.epoch_samples = self.epoch + 1, 0, 0
        self.checkpoints.append((self.epoch, 0, self.total_steps, 0, self.samples_before))
        if self.epoch > self.epochs:
            return
        if lost_there in self.members:
            self._drop_node(1)
        elif self.random.random() < 0.5:
            self._return_node()
