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
    LinkLost,
    NodeBack,
    NodeLost,
    Paused,
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
    """Draws a history; `events` are with their times of arrival."""

    def __init__(self, random: Random, epochs: int = 4) -> None:
        self.random, self.epochs, self._breaks = random, epochs, 12
        self.events: list[tuple[float, Event]] = []
        self.time_s = 1000.0
        self.sizes = {rank: random.randint(3, 20) for rank in range(len(NODES))}
        self.members = list(range(len(NODES)))
        self.generation = self.epoch = 1
        self.step = self.total_steps = self.epoch_samples = self.samples_before = 0
        self.checkpoints = [(1, 0, 0, 0, 0)]
        self.sessions = 1
        self._start(self.members)
        self._join()
        while self.epoch <= epochs:
            self._take_step()
            if self._breaks > 0 and random.random() < 0.25:
                self._breaks -= 1
                random.choice([self._lose_node, self._lose_host, self._rebalance, self._stop, self._vanish])()
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

    def _join(self) -> None:
        sizes = {str(rank): self.sizes[rank] for rank in self.members}
        for rank in self.random.sample(self.members, len(self.members)):
            self.ranks[rank].since_report, self.ranks[rank].since_joined = Done(), Done()
            position = self.generation, self.epoch, self.step, 99, self.total_steps
            self._send(Joined(rank, NODES[rank], *position, sizes, "star", 0.01, 0, self.epoch_samples))

    def _rejoin(self) -> None:
        self.time_s += self.random.uniform(1.0, 9.0)
        self.generation += 1
        self._join()

    def _take_step(self, without: int | None = None) -> None:
        """All members take a step; one of them may be lost before it can count it."""
        step_s = self.random.uniform(0.05, 0.5)
        self.time_s += step_s
        count = min(sum(self.sizes[rank] for rank in self.members), EPOCH_SAMPLES - self.epoch_samples)
        for rank in self.members:
            if rank == without:
                continue
            compute_s = step_s * self.random.uniform(0.3, 0.9)
            own = self.sizes[rank], count if rank == 0 else 0, compute_s, step_s - compute_s, 0.001
            done = self.ranks[rank]
            done.since_report.add(*own)
            done.since_joined.add(*own)
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

    def _lose_link(self, lost: int | None) -> None:
        """All members but `lost` report what they did, and that they lost the link."""
        for rank in self.members:
            if rank != lost:
                self._report(rank)
                self._send(LinkLost(rank, NODES[rank], self.generation, self.epoch, self.step))

    def _lose_node(self) -> None:
        nodes = self.members[1:]
        if not nodes:
            return
        lost = self.random.choice(nodes)
        self._lose_link(lost)
        self._send(NodeLost(lost, NODES[lost], "no answer"))
        self.members = [rank for rank in self.members if rank != lost]
        if self.random.random() < 0.7:
            self._rejoin()
            self._send(NodeBack(lost, NODES[lost]))
        else:
            self.members = sorted([*self.members, lost])
            self._rejoin()

    def _lose_host(self) -> None:
        """The host's rank is killed: after a step that the others have counted, or between two."""
        if self.random.random() < 0.5 and self.epoch_samples < EPOCH_SAMPLES:
            self._take_step(without=0)
        self._lose_link(0)
        self.ranks[0] = Rank(self.random.randint(1, 6))
        self._send(Ready(0, NODES[0], 100))
        self._rejoin()

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
        self._rejoin()

    def _end_epoch(self) -> None:
        self.time_s += 0.3
        is_lost_there = self.random.random() < 0.2
        for rank in self.members:
            done = self.ranks[rank]
            done.since_joined.wall_s += 0.3  # evaluation
            fields = self._rounded(done.since_joined)
            stepped = fields.pop("global_samples")
            overall = {"global_samples": self.epoch_samples, "stepped_samples": stepped, "loss": 1.0}
            own = overall if rank == 0 else {}
            self._send(EpochEnd(rank, NODES[rank], self.epoch, weights_hash="hash", **fields, **own))
            done.since_report, done.since_joined = Done(), Done()
        if is_lost_there:  # the end of the epoch is repeated, without steps
            self._lose_link(None)
            self._rejoin()
            self._end_epoch()
            return
        self.samples_before += self.epoch_samples
        self.epoch, self.step, self.epoch_samples = self.epoch + 1, 0, 0
        self.checkpoints.append((self.epoch, 0, self.total_steps, 0, self.samples_before))
        if len(self.members) < len(NODES) and self.epoch <= self.epochs:  # a lost node is back
            for rank in self.members:
                self._send(Paused(rank, NODES[rank], self.generation))
            self.members = list(range(len(NODES)))
            self._rejoin()
