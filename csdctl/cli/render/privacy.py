"""The ledger as a table, and what it means."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from csdctl.cli.render.numbers import show_bytes
from csdctl.reporting.privacy import BATCH_NORM, PROMISE, REMARKS, Flow

SCHEMA = "csdctl.privacy/1"


def render_privacy(console: Console, of_run: Sequence[Flow], of_all: Sequence[Flow], run_id: str) -> None:
    """What left each machine in one run and in all commands, and what may be learnt from it."""
    table = Table(
        title=f"sent: run {run_id}, and all commands so far", title_justify="left", title_style="bold"
    )
    for column in ("from", "to", "what"):
        table.add_column(column)
    for column in ("this run", "all"):
        table.add_column(column, justify="right")
    in_run = {(flow.sender, flow.receiver, flow.kind): flow.num_bytes for flow in of_run}
    for flow in of_all:
        key = (flow.sender, flow.receiver, flow.kind)
        table.add_row(*key, show_bytes(in_run.get(key, 0)), show_bytes(flow.num_bytes))
    console.print(table)
    console.print(PROMISE, markup=False)
    console.print("What may still be learnt from what was sent:", markup=False)
    for kind in dict.fromkeys(flow.kind for flow in of_all):
        console.print(f"- {kind}: {REMARKS[kind]}", markup=False)
    console.print(BATCH_NORM, markup=False)


def privacy_document(of_run: Sequence[Flow], of_all: Sequence[Flow], run_id: str) -> dict[str, object]:
    """The `csdctl.privacy/1` document."""
    return {
        "schema": SCHEMA,
        "run": run_id,
        "sent_in_run": [asdict(flow) for flow in of_run],
        "sent_in_all_commands": [asdict(flow) for flow in of_all],
        "promise": PROMISE,
        "remarks": {str(kind): text for kind, text in REMARKS.items()},
    }
