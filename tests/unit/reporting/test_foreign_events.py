"""Any events that may be stored for a run: they are added up and shown, and nothing is a defect."""

import io
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from csdctl.reporting.privacy import plan_privacy
from csdctl.reporting.results import RunResults, summarize
from csdctl.reporting.series import SeriesBuilder
from csdctl.terminal.report import render_report, report_document
from csdctl.terminal.streams import format_json
from csdctl.worker.protocol.events import Event, check_event, event_from_line, event_to_line
from csdctl.worker.protocol.json_codec import ProtocolError
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec, Runtime
from tests.foreign_events import events

NODES = ("host", "csd0", "csd1")
NOISE = {"l2_norm_clip": 1.0, "noise_multiplier": 8.0, "delta": 1e-5}
MANIFEST: dict[str, Any] = {
    "plan": {"method": "stannis", "ranks": [{"node": node, "batch_size": 8} for node in NODES]},
    "placed": [
        {"name": node, "num_private": 8, "public_start": 0, "public_stop": 0, "num_repeated": 0}
        for node in NODES
    ],
    "noise": NOISE,
}
RANKS = tuple(RankSpec(rank, node, 8, Runtime(), None, None, 8, 0) for rank, node in enumerate(NODES))
SPEC = RunSpec("run", "", "", Recipe(), RANKS, None, None, "", noise=Noise(**NOISE))


def of_the_run(found: Iterable[Event]) -> list[Event]:
    """Return those of the events that are of the run, each with a rank and a node of it."""
    valid = []
    for foreign in found:
        rank = foreign.rank % len(NODES)
        event = replace(foreign, rank=rank, node=NODES[rank])
        assert event_from_line(event_to_line(event)) is not None, "what was checked is written and read again"
        try:
            check_event(event, NODES)
        except ProtocolError:
            continue
        valid.append(event)
    return valid


@given(st.lists(events(), max_size=8).map(of_the_run))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_stored_events_are_added_up_and_shown(found: list[Event]) -> None:
    summary = summarize("run", MANIFEST, found)
    console = Console(file=io.StringIO(), width=200)
    builder = SeriesBuilder(NODES)
    for number, event in enumerate(found):
        builder.add(1e9 + number, event)
    render_report(console, RunResults(summary, builder.build(), MANIFEST))
    format_json(report_document(summary, "path"))
    planned = plan_privacy(SPEC, found)
    assert planned is not None
    assert all(node.num_releases >= 1 for node in planned.nodes)
