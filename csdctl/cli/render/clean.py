"""What `clean` found on each machine, as a line of text and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict

from csdctl.cli.console import PrintableConsole
from csdctl.launch.leftovers import Leftovers
from csdctl.reporting.numbers import format_bytes
from csdctl.transport.many import Outcome, errors_of
from csdctl.workflows.workspace.partial_failure import failed_document

SCHEMA = "csdctl.clean/1"


def render_cleaned(console: PrintableConsole, outcome: Outcome[Leftovers], *, is_dry: bool) -> None:
    """Print one line for a machine, unless it failed."""
    if outcome.error:
        return
    found = outcome.get()
    parts = []
    if found.num_processes:
        runs = f" of run {', '.join(found.runs)}" if found.runs else ""
        parts.append(f"{found.num_processes} processes{runs} {'are still running' if is_dry else 'ended'}")
    if found.paths:
        verb = "could be removed" if is_dry else "removed"
        parts.append(f"{len(found.paths)} paths ({format_bytes(found.num_bytes)}) {verb}")
    if found.num_unused:
        parts.append(f"{found.num_unused} unused files removed")
    if not parts:
        parts.append("nothing left")
    stored = {"features": found.features_bytes, "predictions": found.predictions_bytes}
    sizes = [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in stored.items() if num_bytes]
    if sizes:
        parts.append(f"stored: {', '.join(sizes)} (--computed removes them)")
    line = "; ".join(parts)
    console.print(f"{outcome.name}: {line}", soft_wrap=True)


def clean_document(outcomes: Mapping[str, Outcome[Leftovers]], *, is_dry: bool) -> dict[str, object]:
    """Return the `csdctl.clean/1` document."""
    return {
        "schema": SCHEMA,
        "is_dry_run": is_dry,
        "machines": {
            name: asdict(outcome.value) for name, outcome in outcomes.items() if outcome.value is not None
        },
        "failed": failed_document(errors_of(outcomes)),
    }
