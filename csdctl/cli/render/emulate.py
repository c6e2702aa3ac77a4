"""An emulated fleet, as a table and as JSON."""

import os
from collections.abc import Iterable
from dataclasses import asdict

from rich.table import Table

from csdctl.cli.console import PrintableConsole
from csdctl.cli.streams import Streams
from csdctl.emulation.fleet import NodeStatus, StoppedFleet
from csdctl.reporting.numbers import format_bytes
from csdctl.workflows.maintenance.emulate import EmulatedFleet

SCHEMA = "csdctl.emulate/1"


def show_started(streams: Streams, fleet: EmulatedFleet) -> None:
    """Print what `emulate up` started."""
    if streams.is_json:
        streams.result(
            emulate_document(
                fleet.nodes,
                fleet=str(fleet.fleet_path),
                was_up=fleet.was_up,
                owner_pid=fleet.owner_pid,
            )
        )
        return
    render_nodes(streams.console, fleet.nodes)
    streams.say(f"Emulated fleet {'was already up' if fleet.was_up else 'is up'}: {fleet.fleet_path}")
    if fleet.owner_pid not in (None, os.getpid()):  # the demo need not speak of itself
        streams.say(f"It ends when process {fleet.owner_pid} ends.")


def show_status(streams: Streams, nodes: Iterable[NodeStatus]) -> None:
    """Print the state of the emulated nodes."""
    if streams.is_json:
        streams.result(emulate_document(nodes))
    else:
        render_nodes(streams.console, nodes)


def show_stopped(streams: Streams, stopped: StoppedFleet) -> None:
    """Print what `emulate down` ended and what it left."""
    kept = stopped.kept_fleet_path
    if streams.is_json:
        kept_fleet = str(kept) if kept else None
        streams.result(emulate_document(num_processes=stopped.num_processes, kept_fleet=kept_fleet))
        return
    streams.say(f"Emulated fleet is down: {stopped.num_processes} processes ended")
    if kept:
        streams.say(f"{kept} was edited since and is kept")


def render_nodes(console: PrintableConsole, nodes: Iterable[NodeStatus]) -> None:
    """Print a table with one row for each node."""
    table = Table("node", "port", "state", "processes", "CPU limit", "memory", title="emulated")
    for node in nodes:
        memory = f"{format_bytes(node.memory_bytes)} of {format_bytes(node.memory_limit_bytes)}"
        state = "running" if node.is_running else "ended"
        limit = f"{node.cpu_limit:g} cores ({node.cpu_mechanism})"
        table.add_row(node.name, str(node.port), state, str(node.num_processes), limit, memory)
    console.print(table)


def emulate_document(nodes: Iterable[NodeStatus] = (), **more: object) -> dict[str, object]:
    """Return the `csdctl.emulate/1` document."""
    return {"schema": SCHEMA, "emulated": True, **more, "nodes": [asdict(node) for node in nodes]}
