"""The oracle of weights: a run is trained anew, without faults, with the same members.

    python -m tests.soak.replay RUN PLACES.json

The event log says who took part in which steps. Each step is taken with these ranks: their vectors are added
as the hub adds them, nodes in order, then the host. Every hash of weights that the run has reported, at the
end of each epoch and of the run, must come out, bit by bit. PLACES.json has the working directory of each
rank by its number: their data lies there. Ranks whose model is split exchange its activations in queues.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array, hash_arrays
from csdctl.worker.data.schedule import Share, Span
from csdctl.worker.engine.layout import Sums
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.run_spec import RunSpec
from csdctl.worker.tasks.progress import Position, Reporter, RunProgress
from csdctl.worker.tasks.split import Split
from csdctl.worker.tasks.task import TaskContext
from csdctl.worker.tasks.train import Train

Key = tuple[int, int]
"""Steps of the run so far, and the epoch."""
Queues = Sequence[Any]
"""By rank, a queue of senders and what they send to it."""
SPAWN = multiprocessing.get_context("spawn")


class ReplayedRank:
    """One rank, in a process of its own: threads are those of the process in TensorFlow."""

    def __init__(self, spec: RunSpec, rank: int, place: Path, queues: Queues) -> None:
        self._connection, theirs = SPAWN.Pipe()
        arguments = theirs, spec, rank, place, queues
        self.process = SPAWN.Process(target=serve, args=arguments, daemon=True)
        self.process.start()

    def send(self, name: str, *arguments: Any) -> None:
        """Let the rank call one of its methods."""
        self._connection.send((name, arguments))

    def receive(self) -> Any:
        """Return what the rank's oldest call has returned."""
        return self._connection.recv()

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what a method of the rank returns."""
        self.send(name, *arguments)
        return self.receive()


class Links:
    """The part of a communicator that ranks with a split model use."""

    def __init__(self, rank: int, queues: Queues) -> None:
        self._rank, self._queues = rank, queues
        self._arrived: dict[int, list[bytes]] = defaultdict(list)

    def send(self, rank: int, content: Any, traffic_class: str) -> None:
        """Send bytes to a rank."""
        self._queues[rank].put((self._rank, bytes(content)))

    def receive(self, rank: int, max_bytes: int, traffic_class: str) -> bytes:
        """Return the next bytes from a rank."""
        while not self._arrived[rank]:
            sender, content = self._queues[self._rank].get()
            self._arrived[sender].append(content)
        return self._arrived[rank].pop(0)


class RankServer:
    """The part of `ReplayedRank` in its process."""

    def __init__(self, spec: RunSpec, rank: int, queues: Queues) -> None:
        self.progress, me = RunProgress(spec), spec.ranks[rank]
        orders: Any = SimpleNamespace(is_stopping=False)
        context = TaskContext(spec, me, self.progress, Reporter(me, lambda line: None), orders)
        self.task: Any = (Split if spec.split else Train)(context)
        self.task.load()
        self._links: Any = Links(rank, queues)
        self._epoch = 0

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self.task.reader.set_epoch(epoch)

    def pack(self, position: Position, spans: Sequence[Span]) -> bytes:
        """Return samples that were reassigned."""
        self._set_epoch(position.epoch)
        packed: bytes = self.task.reader.pack_reassigned(spans)
        return packed

    def local(self, position: Position, share: Share, packed: bytes | None) -> Array:
        """Return the vector of the rank in the next step."""
        self._set_epoch(position.epoch)
        step = self.task.step
        batch = self.task.reader.read(share, packed)
        copies = self.task.reader.private_copies(share) if step.has_noise else None
        self._set_step(position)
        if not self._is_split(position):
            vector: Array = step.local(*batch, private_copies=copies)
            return vector
        vector = np.zeros(self.task.summed.layout.step_size, np.float32)
        ranks = [share.rank for share in self.progress.segment.shares]
        self.task.exchange(self._links, batch, ranks, self.progress.step_samples, vector)
        return vector

    def _is_split(self, position: Position) -> bool:
        """Whether this step is taken in two parts. Rank 0 alone takes those of the whole model."""
        return bool(self.task.spec.split and position.segment and len(position.segment.shares) > 1)

    def _set_step(self, position: Position) -> None:
        self.progress.position = position
        self.task.step.set_step(position.total_steps, self.task._learning_rate())

    def apply(self, position: Position, total: Array) -> Sums:
        """Apply the sum of a step."""
        self._set_step(position)
        engine = self.task.summed if self._is_split(position) else self.task.step
        sums: Sums = engine.apply(total)
        return sums

    def values(self) -> list[Array]:
        """Return the state."""
        return [*self.task.step.values]

    def shared_values(self) -> list[Array]:
        """Return the part of the state that all ranks have."""
        return [*self.task.values]

    def take(self, values: list[Array]) -> None:
        """Take over a state."""
        self.task.step.values = values

    def hash(self) -> str:
        """Return the hash of the weights that all ranks have."""
        return hash_arrays(self.task.summed.weights)


def serve(connection: Any, spec: RunSpec, rank: int, place: Path, queues: Queues) -> None:
    """Answer calls until the other end is closed."""
    os.chdir(place)
    server = RankServer(spec, rank, queues)
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = connection.recv()
            connection.send(getattr(server, name)(*arguments))


@dataclass
class Guess:
    """The ranks that may have been lost in the last step before the start that is event `number`."""

    number: int
    members: tuple[int, ...]
    candidates: list[tuple[int, ...]]


class Replay:
    """A run, trained anew. `num_compared`: the hashes that have come out."""

    def __init__(self, spec: RunSpec, places: Mapping[int, Path], scratch: Path) -> None:
        """`places`: the working directory of each rank. `scratch`: an empty directory."""
        without_state: Any = {"output_directory": str(scratch), "step_file": "", "num_checkpoints": 0}
        alone = replace(spec, is_balanced=False, **without_state)
        self.progress = RunProgress(alone)
        self.num_compared = self.num_steps = 0
        self._queues = [SPAWN.Queue() for _ in alone.ranks]  # kept: they end with this process
        self.ranks = [ReplayedRank(alone, me.rank, places[me.rank], self._queues) for me in alone.ranks]
        self._is_split = spec.split is not None
        self._needed: set[Key] = set()
        """States from which a rank 0 starts again."""
        self._saved: dict[Key, tuple[list[Array], list[Array], Position]] = {}
        """The state of rank 0, the part of it that all ranks have, and the position."""
        self._guess: Guess | None = None
        """A loss that was not logged, until a hash shows that it came out."""
        self.members: tuple[int, ...] = ()

    def follow(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Train as the `events` of rank 0 say. Raises AssertionError where a hash does not come out."""
        for steps, epoch in [key_of(event) for event in events if event.get("is_start")]:
            self._needed |= {(steps, epoch), (steps - 1, epoch)}
        number = 0
        while number < len(events):
            try:
                self._take(events[number], number)
            except AssertionError:
                if not self._guess or not self._guess.candidates:
                    raise
                number = self._guess.number
            else:
                number += 1

    def _take(self, event: Mapping[str, Any], number: int) -> None:
        kind = event["event"]
        if kind == "Joined":
            self._join(event, number)
        elif kind == "Rebalanced":
            self._advance((event["epoch"], event["step"]))
            sizes = {int(rank): size for rank, size in event["batch_sizes"].items()}
            if sizes != {share.rank: share.batch_size for share in self.progress.segment.shares}:
                self.progress.change_batch_sizes(sizes)
                self._save()
        elif kind == "EpochEnd":
            self._advance((event["epoch"], self._last_step(event["epoch"])))
            self._compare(event)
        elif kind == "Finished":
            while self.progress.position.total_steps < event["steps"]:
                self._go_on()
            self._compare(event)

    def _join(self, event: Mapping[str, Any], number: int) -> None:
        sizes = {int(rank): size for rank, size in event["batch_sizes"].items()}
        target, key = (event["epoch"], event["step"]), key_of(event)
        before: tuple[int, ...] = self.members
        uncounted: tuple[int, ...] = ()
        if not event["is_start"]:
            uncounted = self._advance(target, event if before else None)
        elif before:
            if key not in self._saved:
                self._advance(target)
            is_known = self._saved[key][2].totals.samples == event["epoch_samples"]
            if is_known and not (self._guess and self._guess.number == number):
                self._restore(key)
            else:
                self._repeat_last_step(event, number)
        self.members = tuple(sorted(sizes))
        self.progress.plan_batch_sizes(sizes)
        self.progress.regroup(self.members, () if event["is_start"] else uncounted)
        self._save()
        num_steps = self.progress.segment.stop_step
        shown = self.progress.position.totals.samples, self.progress.num_lost(), num_steps
        told = tuple(event[name] for name in ("epoch_samples", "num_lost", "steps_per_epoch"))
        assert shown == told, f"{event}: came out as {shown}"

    def _restore(self, key: Key) -> None:
        values, shared, self.progress.position = self._saved[key]
        for rank in self.ranks:
            rank.call("take", shared if rank is not self.ranks[0] else values)

    def _repeat_last_step(self, event: Mapping[str, Any], number: int) -> None:
        """Take the last step before a start without a rank that was lost in it.

        The links of the nodes end with csdctl, and nobody writes down which ended first.
        """
        if self._guess and self._guess.number == number:
            self.members = self._guess.members
        steps, epoch = key_of(event)
        self._restore((steps - 1, epoch))
        if self.progress.position.segment is None:
            self.progress.regroup(self.members)
        if not self._guess or self._guess.number != number:
            self._guess = Guess(number, self.members, self._list_uncounted(event))
        uncounted = self._guess.candidates.pop(0)
        self._step(uncounted)
        self.progress.regroup(tuple(rank for rank in self.members if rank not in uncounted), uncounted)

    def _advance(self, target: tuple[int, int], joined: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """Take steps up to a step of an epoch. Return the ranks that the last one did not count.

        `joined`: the event that tells how many samples the epoch then has. Before its first step, an epoch
        is not divided among ranks yet.
        """
        uncounted: tuple[int, ...] = ()
        while (at := (self.progress.position.epoch, self.progress.position.step)) != target:
            assert at < target, f"at {at} already, expected {target}"
            uncounted = ()
            if at[0] < target[0] and at[1] == self.progress.segment.stop_step:
                self._end_epoch(is_next_begun=(at[0] + 1, 0) != target)
                continue
            if joined and (at[0], at[1] + 1) == target:
                uncounted = self._find_uncounted(joined)
            self._step(uncounted)
        return uncounted

    def _find_uncounted(self, joined: Mapping[str, Any]) -> tuple[int, ...]:
        return self._list_uncounted(joined)[0]

    def _list_uncounted(self, joined: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """List who may not have counted in the next step, likely ones first: from the number of samples."""
        samples = dict(zip(self.members, self.progress.step_samples, strict=True))
        missing = self.progress.position.totals.samples + sum(samples.values()) - joined["epoch_samples"]
        lost = [rank for rank, _ in joined["lost"] if rank in self.members]
        others = [rank for rank in self.members if rank and rank not in lost]
        candidates = sorted(
            (
                chosen
                for count in range(len(self.members))
                for chosen in itertools.combinations([*lost, *others], count)
                if sum(samples[rank] for rank in chosen) == missing
            ),
            key=lambda chosen: (sum(rank not in lost for rank in chosen), len(chosen)),
        )
        assert candidates, f"{joined}: {missing} samples of {samples} are not counted"
        return candidates

    def _last_step(self, epoch: int) -> int:
        """Return the number of steps of an epoch with the present members."""
        while self.progress.position.epoch < epoch:
            self._go_on()
        return self.progress.segment.stop_step

    def _go_on(self) -> None:
        """Take a step with all members, or end the epoch after its last one."""
        if self.progress.position.step == self.progress.segment.stop_step:
            self._end_epoch()
        else:
            self._step()

    def _step(self, uncounted: Sequence[int] = ()) -> None:
        progress, root = self.progress, self.ranks[0]
        position = progress.position
        samples = dict(zip(self.members, progress.step_samples, strict=True))
        # The order in which the hub adds.
        counted = sorted(set(self.members) - {*uncounted}, key=lambda rank: rank or len(self.ranks))
        # Rank 0 has computed the head of split models for a rank whose vector does not count.
        computing = self.members if self._is_split else counted
        for rank in sorted(computing, reverse=True):
            share = progress.share_of(rank)
            packed = root.call("pack", position, share.reassigned) if rank and share.reassigned else None
            self.ranks[rank].send("local", position, share, packed)
        vectors = {rank: self.ranks[rank].receive() for rank in computing}
        total = vectors[counted[0]].copy()
        for rank in counted[1:]:
            total += vectors[rank]
        # Alone, rank 0 takes the steps of the whole model, of which the others have only a part.
        is_alone = self._is_split and len(self.members) == 1
        applying = [root] if is_alone else self.ranks
        for replayed in applying:
            replayed.send("apply", position, total)
        sums, *_ = [replayed.receive() for replayed in applying]
        if is_alone:
            shared = root.call("shared_values")
            for replayed in self.ranks[1:]:
                replayed.call("take", shared)
        progress.end_step(sums, sum(count for rank, count in samples.items() if rank not in uncounted))
        self.num_steps += 1
        self._save()

    def _end_epoch(self, *, is_next_begun: bool = True) -> None:
        self.progress.end_epoch(self.progress.position.callbacks)
        self._save()
        if is_next_begun:
            self.progress.regroup(self.members)

    def _save(self) -> None:
        position = self.progress.position
        if (key := (position.total_steps, position.epoch)) in self._needed:
            root = self.ranks[0]
            self._saved[key] = root.call("values"), root.call("shared_values"), position

    def _compare(self, event: Mapping[str, Any]) -> None:
        hashes = {rank.call("hash") for rank in self.ranks}
        at = f"{event['event']} at epoch {self.progress.position.epoch}"
        assert hashes == {event["weights_hash"]}, f"{at}: other weights"
        self._guess = None
        self.num_compared += 1


def key_of(joined: Mapping[str, Any]) -> Key:
    """Return the key of the state that the ranks have at a `Joined` event."""
    return joined["total_steps"], joined["epoch"]


def events_of_rank_0(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of rank 0 that tell who trained what."""
    for line in path.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["rank"] == 0 and event["event"] in ("Joined", "Rebalanced", "EpochEnd", "Finished"):
            yield event


def replay(run: Path, places: Mapping[int, Path]) -> Replay:
    """Train the run anew; return what came out. Raises AssertionError for other weights."""
    spec = from_json(RunSpec, (run / "spec.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        trained = Replay(spec, places, Path(scratch))
        trained.follow([*events_of_rank_0(run / "events.jsonl")])
    return trained


if __name__ == "__main__":
    # A rank reads the files of its own machine.
    of_rank = {int(rank): Path(path) for rank, path in json.loads(Path(sys.argv[2]).read_text()).items()}
    done = replay(Path(os.path.abspath(sys.argv[1])), of_rank)
    print(json.dumps({"hashes": done.num_compared, "steps": done.num_steps}))
