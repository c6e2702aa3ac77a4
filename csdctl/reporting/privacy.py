"""What left each machine, from the ledger; and what a reader of it must know besides."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from csdctl.runs.ledger import Entry
from csdctl.transport.meter import Kind

PROMISE = (
    "No private sample and no name of a private file was sent: a node's private data is read by the worker "
    "on that node alone, and no command of csdctl has a way to ask for it."
)
REMARKS: dict[str, str] = {
    Kind.GRADIENT: "computed from private samples too; from a gradient of few samples, parts of a sample can "
    "be reconstructed (larger batches and sums over more ranks make that harder, and do not exclude it)",
    Kind.MODEL: "weights and optimizer state; a trained model can remember single samples",
    Kind.LOG: "what the worker printed; it names no private file",
    Kind.CONTROL: "commands, answers and SSH's and MPI's own; among them the number of private samples of "
    "each node, their shape and type, the largest label, and loss and accuracy sums of each step",
    Kind.PUBLIC: "public by the job file's word",
    Kind.CODE: "csdctl's worker",
    Kind.FILES: "trees that the user deployed",
}
"""What may be learnt from each kind of bytes."""
BATCH_NORM = (
    "Moving statistics of batch normalisation travel with the gradient: means and variances of a node's "
    "activations."
)


@dataclass(frozen=True)
class Flow:
    """Bytes of one kind from one machine to another."""

    sender: str
    receiver: str
    kind: str
    num_bytes: int


def add_flows(entries: Iterable[Entry], run_id: str = "") -> list[Flow]:
    """All flows of run `run_id`, or of everything when it is ''; the largest first for each sender."""
    added: Counter[tuple[str, str, str]] = Counter()
    for entry in entries:
        if not run_id or entry.run == run_id:
            added[entry.sender, entry.receiver, entry.kind] += entry.num_bytes
    flows = [Flow(*key, count) for key, count in added.items()]
    return sorted(flows, key=lambda flow: (flow.sender, flow.receiver, -flow.num_bytes))
