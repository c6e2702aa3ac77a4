"""The ledger as a table, and what it means; what noise promises, in plain words."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from csdctl.cli.render.numbers import format_bytes
from csdctl.reporting.differential_privacy import INSTALL, NodePrivacy, Privacy
from csdctl.reporting.privacy import BATCH_NORM, PROMISE, remarks_on
from csdctl.workflows.reporting.report import PrivacyReport

SCHEMA = "csdctl.privacy/1"
MAX_NAMED = 8
MEANING = (
    "Whoever sees all that a node sent while this run trained, the host included, and knows all other "
    "samples, can tell a sample there from any other in its place only as well as ε and δ allow. Not "
    "covered: how many samples there are, of each class too, the fingerprint that `prepare` tells, and "
    "computing times. Further runs on the same samples add to it."
)


def render_privacy(console: Console, found: PrivacyReport) -> None:
    """What left each machine in one run and in all commands, and what may be learnt from it."""
    table = Table(
        title=f"sent: run {found.run_id}, and all commands so far", title_justify="left", title_style="bold"
    )
    for column in ("from", "to", "what"):
        table.add_column(column)
    for column in ("this run", "all"):
        table.add_column(column, justify="right")
    in_run = {(flow.sender, flow.receiver, flow.kind): flow.num_bytes for flow in found.of_run}
    for flow in found.of_all:
        key = (flow.sender, flow.receiver, flow.kind)
        table.add_row(*key, format_bytes(in_run.get(key, 0)), format_bytes(flow.num_bytes))
    console.print(table)
    console.print(PROMISE, markup=False)
    console.print("What may still be learnt from what was sent:", markup=False)
    remarks = remarks_on(has_noise=found.privacy is not None)
    for kind in dict.fromkeys(flow.kind for flow in found.of_all):
        console.print(f"- {kind}: {remarks[kind]}", markup=False)
    if found.privacy is None:
        console.print(BATCH_NORM, markup=False)
        return
    for line in format_epsilon(found.privacy):
        console.print(line, markup=False)
    console.print(MEANING, markup=False)


def format_epsilon(privacy: Privacy) -> list[str]:
    """A line for all nodes whose samples were in equally many noisy sums."""
    alike: defaultdict[tuple[int, float | None], list[NodePrivacy]] = defaultdict(list)
    for node in privacy.nodes:
        alike[node.num_releases, node.epsilon].append(node)
    noise = f"noise multiplier {privacy.noise_multiplier:g}, clipped at {privacy.l2_norm_clip:g}"
    lines = []
    for (num_releases, epsilon), nodes in alike.items():
        told = f"not known: {INSTALL}" if epsilon is None else f"{epsilon:.3g} at δ = {privacy.delta:g}"
        lines.append(
            f"private samples of {_named(nodes)}: ε = {told}, "
            f"each in at most {num_releases:,} noisy sums ({noise})"
        )
    return lines


def _named(nodes: Sequence[NodePrivacy]) -> str:
    more = f" and {len(nodes) - MAX_NAMED} more nodes" if len(nodes) > MAX_NAMED else ""
    return ", ".join(node.node for node in nodes[:MAX_NAMED]) + more


def privacy_document(found: PrivacyReport) -> dict[str, object]:
    """The `csdctl.privacy/1` document."""
    remarks = remarks_on(has_noise=found.privacy is not None)
    return {
        "schema": SCHEMA,
        "run": found.run_id,
        "sent_in_run": [asdict(flow) for flow in found.of_run],
        "sent_in_all_commands": [asdict(flow) for flow in found.of_all],
        "promise": PROMISE,
        "remarks": {str(kind): text for kind, text in remarks.items()},
        "privacy": asdict(found.privacy) if found.privacy else None,
    }
