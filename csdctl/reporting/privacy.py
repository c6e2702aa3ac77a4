"""What left each machine, from the ledger, and how to interpret it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from csdctl.errors import InputError
from csdctl.runs.ledger import LedgerEntry
from csdctl.transport.meter import TrafficClass

PROMISE = (
    "No private sample and no name of a private file was sent: a node's private data is read by the worker "
    "on that node alone, and no command of csdctl can request it."
)
REMARKS: dict[str, str] = {
    TrafficClass.GRADIENT: "computed from private samples too, together with loss and metric sums; "
    "parts of a sample can be reconstructed from a gradient of few samples (larger batches and "
    "sums over more ranks make that harder, but do not exclude it)",
    TrafficClass.MODEL: "weights and optimizer state; a trained model can memorize single samples",
    TrafficClass.LOG: "what the worker printed; it names no private file",
    TrafficClass.CONTROL: "commands, answers, and the protocols of SSH and MPI; among them the number of "
    "private samples of each node and of each class there, why others were left out, their shape and type, "
    "the largest label, a fingerprint of the prepared data, and how long each rank computes",
    TrafficClass.PUBLIC: "declared public in the job file",
    TrafficClass.CODE: "csdctl's worker",
    TrafficClass.ACTIVATIONS: "outputs of the model's layer at the cut, and labels, of each sample, private "
    "ones included (the job says `activations: may-leave`), and gradients of them; much of a sample can be "
    "reconstructed from them",
    TrafficClass.CLASSES: "asked for by `csdctl predict`: class and probability of each private sample, or "
    "the value of a regression; they say what a sample shows, as far as the model knows",
    TrafficClass.SCORES: "asked for by `csdctl predict --want scores`: all outputs for each private sample; "
    "samples that the model was trained on can be told from others by them",
    TrafficClass.EMBEDDINGS: "asked for by `csdctl predict --want embeddings`: the output of a layer for "
    "each private sample; a linear map may recover half of the variance of a picture's pixels from it",
    TrafficClass.FEATURES: "what the model's frozen part computes from samples that the job declares public",
    TrafficClass.FILES: "trees that the user deployed",
}
"""What may be learnt from the bytes of each traffic class."""
NOISY_GRADIENT = (
    "in this run, private samples contribute one sum of clipped gradients with noise per node and step; loss "
    "and metric sums cover public samples alone. Runs without noise reveal as much as they would if "
    "this run had no noise"
)
NOISY_MODEL = (
    "weights and optimizer state, which in this run depend on private samples through the noisy sums alone"
)
BATCH_NORM = (
    "If the model has batch normalisation, its moving statistics are sent with the gradient: means and "
    "variances of a node's activations."
)


def remarks_on(*, has_noise: bool) -> dict[str, str]:
    """Return what may be learnt from the bytes of each traffic class of a run."""
    return (
        {**REMARKS, TrafficClass.GRADIENT: NOISY_GRADIENT, TrafficClass.MODEL: NOISY_MODEL}
        if has_noise
        else REMARKS
    )


@dataclass(frozen=True)
class Flow:
    """Bytes of one traffic class from one machine to another."""

    sender: str
    receiver: str
    kind: str
    """The traffic class."""
    num_bytes: int


def add_flows(entries: Iterable[LedgerEntry], run_id: str = "") -> list[Flow]:
    """Return all flows of run `run_id`, or of all commands when it is ''; the largest first per sender.

    Raises InputError for an unknown traffic class.
    """
    added: Counter[tuple[str, str, str]] = Counter()
    for entry in entries:
        if entry.kind not in REMARKS:
            raise InputError(
                f"the ledger has an entry of traffic class {entry.kind!r}, expected {', '.join(REMARKS)}",
                remedy="remove that line of .csdctl/ledger.jsonl",
            )
        if not run_id or entry.run == run_id:
            added[entry.sender, entry.receiver, entry.kind] += entry.num_bytes
    flows = [Flow(*key, count) for key, count in added.items()]
    return sorted(flows, key=lambda flow: (flow.sender, flow.receiver, -flow.num_bytes))
