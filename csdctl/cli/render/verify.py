"""The result of `verify`, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from csdctl.cli.console import PrintableConsole
from csdctl.errors import RunError
from csdctl.worker.protocol.events import Verified

TOLERANCE = 1e-5
"""Float32 has seven digits; the order of summation over millions of terms loses one or two of them."""


def render_verified(
    console: PrintableConsole, verified: Verified, nodes: Sequence[str], *, emulated: bool
) -> None:
    """Print how much the gradient and weights differ, and from which reference."""
    table = Table.grid(padding=(0, 2))
    sizes = ", ".join(f"{node} {size}" for node, size in zip(nodes, verified.batch_sizes, strict=True))
    fleet = " (emulated fleet)" if emulated else ""
    table.add_row("samples", f"{verified.global_batch}: {sizes}{fleet}")
    table.add_row(
        "gradient",
        f"differs by {verified.by_parts:.1e} from one process that computes the ranks' batches in turn",
    )
    if verified.as_one_batch is None:
        table.add_row(
            "", "not compared with one batch of all samples: batch norm or dropout depends on the batch"
        )
    else:
        table.add_row(
            "", f"differs by {verified.as_one_batch:.1e} from one process with one batch of all samples"
        )
    table.add_row("weights", f"bit-identical on all ranks ({verified.weights_hash[:16]}…)")
    table.add_row("collective", verified.collective)
    console.print(table)


def verify_document(verified: Verified, nodes: Sequence[str], *, emulated: bool) -> dict[str, Any]:
    """Return the `csdctl.verify/1` document."""
    found = {name: value for name, value in asdict(verified).items() if name not in ("rank", "node")}
    batch_sizes = dict(zip(nodes, verified.batch_sizes, strict=True))
    return {"schema": "csdctl.verify/1", "emulated": emulated, **found, "batch_sizes": batch_sizes}


def judge_verified(verified: Verified) -> None:
    """Raise RunError when the gradients differ by more than rounding errors."""
    worst = max(verified.by_parts, verified.as_one_batch or 0.0)
    if not worst <= TOLERANCE:
        raise RunError(
            f"the ranks' gradient differs from that of one process by {worst:.1e}, more than {TOLERANCE:g}",
            remedy="compare TensorFlow versions and processors with `csdctl discover`; "
            "try another number of threads in the plan",
        )
