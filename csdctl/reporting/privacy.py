"""Data that left each machine, what it may reveal, and the guarantee of noise on private samples.

The guarantee is ε at δ, for the worst sample of each node. A sample enters one noisy sum of its node each
time it is read. Every sum is a Gaussian mechanism. K of them on one sample equal one with 1/√k of the noise
(Dong, Roth, Su, 2022), also when each depends on the results of the earlier ones. ε comes from the accountant
dp-accounting, by the exact formula of Balle and Wang (2018).

Neighbouring data sets differ in one sample, replaced by any other, so the sum moves by at most twice the
clipping norm. The seed, which all ranks know, determines the samples of each step, so sampling gives no
amplification.
"""

import importlib.util
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from csdctl.errors import InputError
from csdctl.fleet.facts import NETWORK_FILE_SYSTEMS
from csdctl.fleet.model import SERVER_MARK
from csdctl.fleet.names import format_node_names, names_by_value
from csdctl.fleet.requirements import explain_extra
from csdctl.placement.equation1 import Placed
from csdctl.reporting.tally import members_of, newcomers_of
from csdctl.runs.directory import Manifest
from csdctl.runs.ledger import LedgerEntry
from csdctl.transport.meter import TrafficClass
from csdctl.worker.protocol.events import STOPPED, EpochEnd, Event, Finished, Joined, Progress
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec

PROMISE = (
    "No private sample and no name of a private file left its node in prepare, tune, train, predict and all "
    "other commands of csdctl's own: only the worker on a node reads its private data. Your own programs "
    "(`exec`, Fabric tasks, functions of the job) can read and send any file."
)
REMARKS: dict[str, str] = {
    TrafficClass.GRADIENT: "computed from private samples too, together with loss and metric sums; "
    "parts of a sample can be reconstructed from a gradient of few samples (larger batches and "
    "sums over more ranks make that harder, but do not exclude it)",
    TrafficClass.MODEL: "weights and optimizer state; a trained model can memorize single samples",
    TrafficClass.LOG: "what the worker printed; it names no private file",
    TrafficClass.CONTROL: "commands, answers, and the protocols of SSH and MPI; among them the number of "
    "private samples of each node and of each class there, why others were skipped, their shape and type, "
    "the largest label, a fingerprint of the prepared data, and how long each rank computes",
    TrafficClass.PUBLIC: "declared public in the job file",
    TrafficClass.CODE: "csdctl's worker",
    TrafficClass.ACTIVATIONS: "outputs of the model's layer at the cut, and labels, of each sample, private "
    "ones included (the job says `activations: may-leave`), and gradients of them; much of a sample can be "
    "reconstructed from them",
    TrafficClass.CLASSES: "asked for by `csdctl predict`: class and probability of each private sample, or "
    "the value of a regression; they reveal what a sample shows, as far as the model knows",
    TrafficClass.SCORES: "asked for by `csdctl predict --want scores`: all outputs for each private sample; "
    "they can reveal which samples the model was trained on",
    TrafficClass.EMBEDDINGS: "asked for by `csdctl predict --want embeddings`: the output of a layer for "
    "each private sample; a linear map may recover half of the variance of an image's pixels from it",
    TrafficClass.FEATURES: "what the model's frozen part computes from samples that the job declares public",
    TrafficClass.FILES: "trees that you deployed, your private files among them; software of `provision`",
    TrafficClass.TEST_SUMS: "constants that `doctor` and `tune` sum to check and measure the network",
}
"""Content of the bytes of each traffic class."""
NOISY_REMARKS: dict[str, str] = REMARKS | {
    TrafficClass.GRADIENT: "in this run, private samples contribute one sum of clipped gradients with noise "
    "per node and step; loss and metric sums cover only public samples. Runs without noise reveal as much as "
    "they would if this run had no noise",
    TrafficClass.MODEL: "weights and optimizer state, which in this run depend on private samples only "
    "through the noisy sums",
}
"""The same for a run with noise."""
BATCH_NORM = (
    "If the model has batch normalization, its moving statistics are sent with the gradient: means and "
    "variances of a node's activations."
)
SENSITIVITY = 2.0
"""How far one replaced sample moves a sum, in clipping norms."""


@dataclass(frozen=True)
class Flow:
    """Bytes of one traffic class from one machine to another."""

    sender: str
    receiver: str
    kind: str
    num_bytes: int
    is_between_servers: bool = False


def add_flows(entries: Iterable[LedgerEntry], run_id: str = "") -> list[Flow]:
    """Return all flows of run `run_id`, or of all commands when it is ''. The largest first per sender."""
    added: Counter[tuple[str, str, str]] = Counter()
    for entry in entries:
        if not run_id or entry.run == run_id:
            added[entry.sender, entry.receiver, entry.kind] += entry.num_bytes
    machines = {machine for sender, receiver, _ in added for machine in (sender, receiver)}
    # Where there are several servers, each node is named after its own; links connect it with nobody else.
    nodes = {machine for machine in machines if SERVER_MARK in machine}
    flows = [
        Flow(*key, count, is_between_servers=bool(nodes) and not nodes & {*key[:2]})
        for key, count in added.items()
    ]
    return sorted(flows, key=lambda flow: (flow.sender, flow.receiver, -flow.num_bytes))


def list_readers(manifest: Manifest) -> dict[str, str]:
    """Return, by node, who else can read where its private samples were prepared, as far as facts show it."""
    readers = {}
    for shard in manifest.placed:
        facts = manifest.fleet.get("facts", {}).get(shard.name, {})
        users, kind = ", ".join(facts.get("home_shared_with", ())), facts.get("file_system")
        if shard.num_private and (users or kind in NETWORK_FILE_SYSTEMS):
            readers[shard.name] = f"on {kind}" + (f", in a home shared with {users}" if users else "")
    return readers


@dataclass(frozen=True)
class NodePrivacy:
    """The guarantee for the private samples of one node."""

    node: str
    num_private: int
    """Different samples."""
    num_releases: int
    """The largest number of noisy sums that one sample contributed to."""
    epsilon: float | None
    """None when the accountant is not installed."""


@dataclass(frozen=True)
class Privacy:
    """The guarantees of one run. `nodes` are those with private samples."""

    l2_norm_clip: float
    noise_multiplier: float
    delta: float
    nodes: tuple[NodePrivacy, ...]


def has_accountant() -> bool:
    """Return whether dp-accounting is installed."""
    return importlib.util.find_spec("dp_accounting") is not None


def check_accountant() -> None:
    """Raise InputError when dp-accounting is not installed."""
    if not has_accountant():
        problem = "data.private.noise needs the accountant dp-accounting, which is not installed"
        raise InputError(problem, remedy=explain_extra("privacy"))


def compute_epsilon(noise: Noise, num_releases: int) -> float:
    """Return ε at `noise.delta` for a sample that contributed to `num_releases` noisy sums."""
    if not num_releases:
        return 0.0
    from dp_accounting import get_epsilon_gaussian  # heavy, and optional

    deviation = noise.noise_multiplier / SENSITIVITY / math.sqrt(num_releases)
    return float(get_epsilon_gaussian(deviation, noise.delta))


def plan_privacy(spec: RunSpec, events: Iterable[Event]) -> Privacy | None:
    """Return the guarantee at the end of a run that has sent `events` so far. None without noise."""
    if spec.noise is None:
        return None
    counter = count_passes(events, len(spec.ranks))
    # At least one, whatever the stored events say.
    passes = [max(1, count + max(0, spec.recipe.epochs - counter.num_ended)) for count in counter.finish()]
    return _build_privacy(spec.noise, [rank.node for rank in spec.ranks], spec.ranks, passes)


def measure_privacy(manifest: Manifest, passes: "PassCounter") -> Privacy | None:
    """Return the guarantee of a run so far, whose events `passes` has counted. None without noise."""
    if manifest.noise is None:
        return None
    return _build_privacy(manifest.noise, manifest.nodes, manifest.placed, passes.finish())


def _build_privacy(
    noise: Noise, names: Sequence[str], shards: Sequence[RankSpec | Placed], passes: Sequence[int]
) -> Privacy:
    nodes = []
    for node, shard, count in zip(names, shards, passes, strict=True):
        if different := shard.num_private - shard.num_repeated:
            num_releases = count * math.ceil(shard.num_private / different)
            epsilon = compute_epsilon(noise, num_releases) if has_accountant() else None
            nodes.append(NodePrivacy(node, different, num_releases, epsilon))
    return Privacy(noise.l2_norm_clip, noise.noise_multiplier, noise.delta, tuple(nodes))


def describe_privacy(privacy: Privacy) -> list[str]:
    """Return one line for each group of nodes with the same ε and the same number of noisy sums."""
    groups = names_by_value((node.node, (node.num_releases, node.epsilon)) for node in privacy.nodes)
    noise = f"noise multiplier {privacy.noise_multiplier:g}, clipped at {privacy.l2_norm_clip:g}"
    unknown = "unknown (dp-accounting is not installed)"
    lines = []
    for (num_releases, epsilon), nodes in groups.items():
        guarantee = unknown if epsilon is None else f"{epsilon:.3g} at δ = {privacy.delta:g}"
        lines.append(
            f"private samples of {format_node_names(nodes)}: ε = {guarantee}, "
            f"each in at most {num_releases:,} noisy sums ({noise})"
        )
    return lines


def count_passes(events: Iterable[Event], num_ranks: int) -> "PassCounter":
    """Return the counter after all `events` of a run."""
    counter = PassCounter(num_ranks)
    for event in events:
        counter.add(event)
    return counter


@dataclass
class PassCounter:
    """Counts, from the events of a run in order, how often each rank began to read its samples, at most.

    The bound follows rank 0: all ranks that take part are in the same epoch. An epoch counts again for all
    when rank 0 begins again: they may read samples since a checkpoint twice. It counts again for a rank that
    comes back, which reads the step in which it was lost twice. Where the events break off, what may have
    followed counts.
    """

    num_ranks: int
    passes: list[int] = field(default_factory=list)
    members: frozenset[int] = frozenset()
    num_ended: int = 0
    """Epochs that have ended."""
    epoch: int = 0
    """The latest epoch that counts."""
    is_between: bool = False
    """An epoch has ended, and the next may have begun."""
    is_open: bool = False
    """The ranks may have continued after the last event."""

    def __post_init__(self) -> None:
        self.passes = self.passes or [0] * self.num_ranks
        self.members = self.members or frozenset(range(self.num_ranks))

    def add(self, event: Event) -> None:
        """Count one event."""
        if event.rank != 0:
            return
        if isinstance(event, Joined):
            self._join(event)
        elif isinstance(event, EpochEnd):
            self._count_begun()
            self.epoch, self.is_between = event.epoch, True
            self.num_ended = max(self.num_ended, event.epoch)
        elif isinstance(event, Progress) or (isinstance(event, Finished) and event.reason == STOPPED):
            self.epoch += self.is_between
            self._count_begun()
            self.is_open = isinstance(event, Progress)
        elif isinstance(event, Finished):
            self.is_between = self.is_open = False

    def finish(self) -> list[int]:
        """Return the counts by rank. Call it once, after the last event."""
        self._count_begun()
        return self.passes

    def _join(self, event: Joined) -> None:
        if not event.is_start:
            if event.step:  # of the epoch, which those have begun who are lost now, too
                self._count_begun()
            if not self.is_between:  # else they are counted with the epoch
                self._count_passes(newcomers_of(event, self.members))
                self.epoch, self.is_open = event.epoch, True
            self.members = members_of(event)
            return
        # csdctl was ended while the ranks continued, or the events of another server are not here
        unreported = (event.epoch - self.epoch) * bool(self.is_open or (event.total_steps and not self.epoch))
        self._count_passes(self.members, max(unreported, 1 if self.is_between else 0))
        self.members = members_of(event)
        self.epoch, self.is_between, self.is_open = event.epoch, False, True
        self._count_passes(self.members)

    def _count_begun(self) -> None:
        if self.is_between:
            self._count_passes(self.members)
        self.is_between = False

    def _count_passes(self, ranks: Iterable[int], count: int = 1) -> None:
        for rank in ranks:
            self.passes[rank] += count
