"""An emulated fleet: a table for people, a document for programs."""

from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from csdctl.cli.render.numbers import format_bytes
from csdctl.emulation.fleet import NodeStatus

SCHEMA = "csdctl.emulate/1"


def render_nodes(console: Console, nodes: Iterable[NodeStatus]) -> None:
    """One row for each node."""
    table = Table("node", "port", "state", "processes", "CPU limit", "memory", title="emulated")
    for node in nodes:
        memory = f"{format_bytes(node.memory_bytes)} of {format_bytes(node.memory_limit_bytes)}"
        state = "running" if node.is_running else "ended"
        limit = f"{node.cpu_limit:g} cores ({node.cpu_mechanism})"
        table.add_row(node.name, str(node.port), state, str(node.num_processes), limit, memory)
    console.print(table)


def emulate_document(nodes: Iterable[NodeStatus] = (), **more: object) -> dict[str, object]:
    """What `emulate` answers with --json."""
    return {"schema": SCHEMA, "emulated": True, **more, "nodes": [asdict(node) for node in nodes]}
