"""Every screen of csdctl, with hostile text wherever it shows a string of others."""

import dataclasses
import io
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from csdctl.cli.app import run_command
from csdctl.emulation.fleet import NodeStatus
from csdctl.errors import NodeError
from csdctl.fleet.checks import Check, Status
from csdctl.fleet.facts import Drive
from csdctl.fleet.model import Fleet, Node
from csdctl.launch.leftovers import Leftovers
from csdctl.reporting.privacy import Flow
from csdctl.reporting.results import RunResults
from csdctl.reporting.series import RunSeries
from csdctl.shipping.deliver import Delivery, DeliveryProgress
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.fleet import ExaminationView, TrustScreen, render_cleaned, render_fleet, render_nodes
from csdctl.terminal.nodes import CountView, TransferView
from csdctl.terminal.prepare import PreparingView, render_prepared
from csdctl.terminal.report import render_report, show_privacy
from csdctl.terminal.run_view import TrainingView
from csdctl.terminal.streams import Streams
from csdctl.terminal.train import TrainingScreen
from csdctl.terminal.tune import render_plan, show_forecast, show_verified
from csdctl.transport.many import Outcome
from csdctl.transport.meter import TrafficClass
from csdctl.transport.session import Deadline
from csdctl.tuning.measurements import ProbeOutcome
from csdctl.tuning.plan import Plan, RankPlan, StrategyPlan
from csdctl.worker.protocol.datasets import PrepareProgress
from csdctl.worker.protocol.events import Joined, NodeBack, NodeLost, Rebalanced, Verified, WaitingFor
from csdctl.workflows.discovery.discover import DiscoverResult, ShownKey
from csdctl.workflows.forecast.forecast import ForecastRequest, forecast
from csdctl.workflows.preflight.examination import Examination
from csdctl.workflows.reporting.report import PrivacyReport
from csdctl.workflows.train.verify import Verification
from csdctl.workflows.tune.rounds import describe_probes
from csdctl.workflows.workspace.event_stream import FilesSent
from tests.attacks.hostile_text import HOSTILE, MARKUP
from tests.unit.perfmodel.published import Network, basis_of
from tests.unit.runs.manifests import started_of
from tests.unit.terminal.test_console import foreign
from tests.unit.terminal.test_discover import CSD, result_of
from tests.unit.terminal.test_prepare import PREPARED
from tests.unit.terminal.test_render import EVENTS, SPEC, SUMMARY

FAILED: Outcome[Any] = Outcome(HOSTILE, error=NodeError(HOSTILE, node=HOSTILE, remedy=HOSTILE))
FLEET = Fleet((Node(HOSTILE, HOSTILE, user=HOSTILE),), path=Path(HOSTILE), network=HOSTILE)


def hostile(value: Any) -> Any:
    """Return `value` with HOSTILE in place of every string in it, apart from rank numbers and enums."""
    if isinstance(value, str) and not isinstance(value, Enum) and not value.isdigit():
        return HOSTILE
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return replace(value, **{name: hostile(getattr(value, name)) for name in fields})
    if isinstance(value, dict):
        return {hostile(key): hostile(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(hostile, value))
    return value


def show_training(console: PrintableConsole) -> None:
    more = [
        Joined(0, "host", 1, 6, 12, 6, {"0": 60}, False, ((1, "x"),), 100),
        Rebalanced(0, "host", 1, 7, "csd0", 1.84, {"0": 65, "1": 5}),
        WaitingFor(0, "host", ("csd0",)),
        NodeLost(1, "csd0", "killed", "see its log"),
        NodeBack(1, "csd0"),
    ]
    with TrainingView(console, started_of(hostile(SPEC), 10, emulated=True)) as view:
        for event in [*EVENTS, *more]:
            view.show(hostile(event))


def show_examination(console: PrintableConsole) -> None:
    examination = Examination(FLEET, Deadline(60.0))
    with ExaminationView(console, FLEET, is_verbose=True) as view:
        for status in Status:
            view.show(Check(HOSTILE, HOSTILE, status, HOSTILE, HOSTILE, HOSTILE))
    view.finish(examination)


def show_discovery(console: PrintableConsole) -> None:
    machine = replace(CSD, cpu_model=MARKUP, notes=(HOSTILE,), drives=(Drive("/dev/x", MARKUP, MARKUP),))
    lost = replace(CSD, name="csd1", problem=HOSTILE)
    with CountView(console, "probing", 2) as view:
        view.take(machine)
        view.take(lost)
    result = result_of(machine, lost, failed={"csd1": NodeError(HOSTILE, remedy=HOSTILE)})
    hostile_result = DiscoverResult(result.fleet, result.facts, result.failed, (HOSTILE,), Path(HOSTILE))
    render_fleet(console, hostile_result, verbose=True)


def show_deploy(console: PrintableConsole) -> None:
    with TransferView(console, 2) as view:
        view.advance(DeliveryProgress(HOSTILE, 1, 2))
        view.finish(FAILED)
        view.finish(Outcome(HOSTILE, value=Delivery(1, 1, 1)))


def show_prepare(console: PrintableConsole) -> None:
    with PreparingView(console, what=HOSTILE) as view:
        for done in (1, 2):
            view.show(HOSTILE, PrepareProgress(done, 2, 1))
    prepared = replace(PREPARED, public=hostile(PREPARED.public), private=hostile(PREPARED.private))
    render_prepared(console, prepared)


def show_plan(console: PrintableConsole) -> None:
    rank = RankPlan(node="host", batch_size=8, threads=1)
    plan = Plan(job="job", job_fingerprint="f", method="stannis", ranks=[rank])
    ranks = [replace(rank, node=HOSTILE)]
    changes = {"job": HOSTILE, "method": HOSTILE, "left_out": [HOSTILE], "ranks": ranks}
    figures = {"strategy": "split", "cut": HOSTILE, "first_run_s_range": (1.0, 2.0)}
    strategies = [StrategyPlan(first_run_s=seconds, **figures) for seconds in (1.0, 2.0)]
    changes |= {
        "strategy": "split",
        "cut": HOSTILE,
        "strategies": [*strategies, StrategyPlan(strategy="features", why_not=HOSTILE)],
    }
    render_plan(console, plan.model_copy(update=changes), HOSTILE)
    console.print(describe_probes({HOSTILE: ProbeOutcome(32, 0.25), f"{HOSTILE}2": ProbeOutcome(64, None)}))


def streams_of(console: PrintableConsole) -> Streams:
    streams = Streams(stdout=console.file, stderr=io.StringIO())
    streams.__dict__["console"] = console
    return streams


def show_sent_bytes(console: PrintableConsole) -> None:
    kinds = TrafficClass.LOG, TrafficClass.ACTIVATIONS
    flows = [Flow(HOSTILE, HOSTILE, kind, 7) for kind in kinds]
    show_privacy(streams_of(console), PrivacyReport(HOSTILE, flows, flows, None, {HOSTILE: HOSTILE}))


def show_keys(console: PrintableConsole) -> None:
    key = ShownKey(FLEET.nodes[0], HOSTILE, b"key", "new")
    screen = TrustScreen(streams_of(console), FLEET, is_dry_run=True)
    screen.show({HOSTILE: Outcome(HOSTILE, value=key), "csd1": FAILED}, [key], [HOSTILE])


def show_verification(console: PrintableConsole) -> None:
    sums = HOSTILE, 1e-7, 1e-7, f"{HOSTILE}2"
    verified = Verified(0, HOSTILE, (8, 8), *sums, (1e-7,) * 2, 1e-7, 0.1, HOSTILE)
    verification = Verification((HOSTILE, f"{HOSTILE}2"), verified)
    show_verified(streams_of(console), verification, emulated=False)


SCREENS: list[Callable[[PrintableConsole], None]] = [
    show_training,
    show_examination,
    show_discovery,
    show_deploy,
    show_prepare,
    show_plan,
    show_sent_bytes,
    show_keys,
    show_verification,
    lambda console: render_report(console, RunResults(hostile(SUMMARY), RunSeries((HOSTILE,)), {})),
    lambda console: show_forecast(
        streams_of(console), hostile(forecast(basis_of(Network.MOBILENETV2), ForecastRequest([4])))
    ),
    lambda console: render_cleaned(
        console, Outcome(HOSTILE, value=Leftovers(1, (HOSTILE,), (HOSTILE,), 1)), is_dry=True
    ),
    lambda console: render_nodes(console, [NodeStatus(HOSTILE, 1, 1, True, 1, 0.5, 1, 1, HOSTILE)]),
]


@pytest.mark.parametrize("is_terminal", [False, True], ids=["plain", "terminal"])
@pytest.mark.parametrize("show", SCREENS)
def test_text_of_others_is_shown_as_text(show: Callable[[PrintableConsole], None], is_terminal: bool) -> None:
    file = io.StringIO()
    show(PrintableConsole(file=file, width=2000, force_terminal=is_terminal, color_system="standard"))
    assert foreign(file.getvalue()) == set()
    assert "[/bold][link=file:///etc/passwd]here[/link][bold]:smile:" in file.getvalue()


def test_messages_of_training_are_shown_as_text() -> None:
    streams = Streams(stdout=io.StringIO(), stderr=io.StringIO())
    screen = TrainingScreen(streams)
    screen.show(FilesSent(HOSTILE, Delivery(1, 1, 0)))
    screen.say(HOSTILE)
    assert foreign(streams.stdout.getvalue()) == set()  # type: ignore[attr-defined]


def test_error_is_shown_as_text(tmp_path: Path) -> None:
    stderr = io.StringIO()
    path = tmp_path / f"{MARKUP.replace('/', '')}\x1b]52;.yaml"
    path.write_text("nodes: ['\\x1b[2J']\n")
    assert run_command(["inventory", "--fleet", str(path)], Streams(stderr=stderr, is_debugging=True)) == 2
    assert foreign(stderr.getvalue()) == set()
    assert r"\x1b]52;.yaml" in stderr.getvalue()
