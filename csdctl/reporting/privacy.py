"""What left each machine, from the ledger; and what a reader of it must know besides."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from csdctl.runs.ledger import LedgerEntry
from csdctl.transport.meter import TrafficClass

PROMISE = (
    "No private sample and no name of a private file was sent: a node's private data is read by the worker "
    "on that node alone, and no command of csdctl has a way to ask for it."
)
REMARKS: dict[str, str] = {
    TrafficClass.GRADIENT: "computed from private samples too, with loss and metric sums beside it; "
    "from a gradient of few samples, parts of a sample can be reconstructed (larger batches and "
    "sums over more ranks make that harder, and do not exclude it)",
    TrafficClass.MODEL: "weights and optimizer state; a trained model can remember single samples",
    TrafficClass.LOG: "what the worker printed; it names no private file",
    TrafficClass.CONTROL: "commands, answers and SSH's and MPI's own; among them the number of private "
    "samples of each node and of each class there, why others were left out, their shape and type, the largest "
    "label, a fingerprint of the prepared data, and how long each rank computes",
    TrafficClass.PUBLIC: "public by the job file's word",
    TrafficClass.CODE: "csdctl's worker",
    TrafficClass.FILES: "trees that the user deployed",
}
"""What may be learnt from each kind of bytes."""
NOISY_GRADIENT = (
    "in this run, what comes of a node's private samples is one sum of clipped gradients with noise a step; "
    "loss and metric sums are of public samples alone. Runs without noise tell as much as if there were none "
    "in this one"
)
NOISY_MODEL = "weights and optimizer state, which in this run know private samples by the noisy sums alone"
BATCH_NORM = (
    "Moving statistics of batch normalisation, where the model has it, travel with the gradient: means and "
    "variances of a node's activations."
)


def remarks_on(*, has_noise: bool) -> dict[str, str]:
    """What may be learnt from each kind of bytes of a run."""
    return (
        {**REMARKS, TrafficClass.GRADIENT: NOISY_GRADIENT, TrafficClass.MODEL: NOISY_MODEL}
        if has_noise
        else REMARKS
    )


@dataclass(frozen=True)
class Flow:
    """Bytes of one kind from one machine to another."""

    sender: str
    receiver: str
    kind: str
    num_bytes: int


def add_flows(entries: Iterable[LedgerEntry], run_id: str = "") -> list[Flow]:
    """All flows of run `run_id`, or of everything when it is ''; the largest first for each sender."""
    added: Counter[tuple[str, str, str]] = Counter()
    for entry in entries:
        if not run_id or entry.run == run_id:
            added[entry.sender, entry.receiver, entry.kind] += entry.num_bytes
    flows = [Flow(*key, count) for key, count in added.items()]
    return sorted(flows, key=lambda flow: (flow.sender, flow.receiver, -flow.num_bytes))
