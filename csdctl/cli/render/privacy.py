"""The ledger as a table with what it reveals, and the guarantee of differential privacy as text."""

from collections import defaultdict
from dataclasses import asdict

from rich.table import Table

from csdctl.cli.console import PrintableConsole
from csdctl.cli.streams import Streams
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_bytes
from csdctl.reporting.privacy import BATCH_NORM, INSTALL, PROMISE, NodePrivacy, Privacy, remarks_on
from csdctl.workflows.reporting.report import PrivacyReport

SCHEMA = "csdctl.privacy/1"
MEANING = (
    "Anyone who sees everything a node sent during this run, as the host does, and knows all other samples "
    "can distinguish a sample on that node from any replacement only as well as ε and δ allow. Not "
    "covered: the number of samples, in total and of each class, the fingerprint that `prepare` reports, and "
    "computing times. Further runs on the same samples add to the privacy loss."
)


def show_privacy(streams: Streams, found: PrivacyReport) -> None:
    """Print what left each machine."""
    if streams.is_json:
        streams.result(privacy_document(found))
    else:
        render_privacy(streams.console, found)


def render_privacy(console: PrintableConsole, found: PrivacyReport) -> None:
    """Print what left each machine, in one run and in all commands, and what it may reveal."""
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
    console.print(PROMISE)
    console.print("What the sent data may still reveal:")
    remarks = remarks_on(has_noise=found.privacy is not None)
    for traffic_class in dict.fromkeys(flow.kind for flow in found.of_all):
        remark = remarks.get(traffic_class, "not known to this csdctl")
        console.print(f"- {traffic_class}: {remark}")
    if found.privacy is None:
        console.print(BATCH_NORM)
        return
    for line in format_epsilon(found.privacy):
        console.print(line)
    console.print(MEANING)


def format_epsilon(privacy: Privacy) -> list[str]:
    """Return one line for each group of nodes with the same ε and the same number of noisy sums."""
    groups: defaultdict[tuple[int, float | None], list[NodePrivacy]] = defaultdict(list)
    for node in privacy.nodes:
        groups[node.num_releases, node.epsilon].append(node)
    noise = f"noise multiplier {privacy.noise_multiplier:g}, clipped at {privacy.l2_norm_clip:g}"
    lines = []
    for (num_releases, epsilon), nodes in groups.items():
        shown = f"unknown: {INSTALL}" if epsilon is None else f"{epsilon:.3g} at δ = {privacy.delta:g}"
        lines.append(
            f"private samples of {format_node_names(node.node for node in nodes)}: ε = {shown}, "
            f"each in at most {num_releases:,} noisy sums ({noise})"
        )
    return lines


def privacy_document(found: PrivacyReport) -> dict[str, object]:
    """Return the `csdctl.privacy/1` document."""
    remarks = remarks_on(has_noise=found.privacy is not None)
    return {
        "schema": SCHEMA,
        "run": found.run_id,
        "sent_in_run": [asdict(flow) for flow in found.of_run],
        "sent_in_all_commands": [asdict(flow) for flow in found.of_all],
        "promise": PROMISE,
        "remarks": {str(traffic_class): text for traffic_class, text in remarks.items()},
        "privacy": asdict(found.privacy) if found.privacy else None,
    }
