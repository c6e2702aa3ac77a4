"""The output of `deploy`, with and without a terminal and as JSON."""

import json
from io import StringIO

from csdctl.cli.invocation import outcomes_document
from csdctl.errors import RemoteCommandError
from csdctl.shipping.deliver import Delivery, DeliveryProgress
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.deploy import MAX_BARS, DeployView, render_deliveries
from csdctl.terminal.streams import format_json
from csdctl.transport.many import Outcome

GOOD = Outcome("csd0", value=Delivery(1234, 3 << 20, 5))
BAD: Outcome[Delivery] = Outcome("csd1", error=RemoteCommandError("no room", node="csd1", remedy="make some"))


def show(*, is_terminal: bool, dry_run: bool = False) -> str:
    console = PrintableConsole(file=StringIO(), force_terminal=is_terminal, width=100)
    with DeployView(console, num_nodes=2, dry_run=dry_run) as view:
        for sent in (0, 1 << 20, 3 << 20):
            view.advance(DeliveryProgress("csd0", sent, 3 << 20))
        for number in range(2 * MAX_BARS):
            view.advance(DeliveryProgress(f"other{number}", 1, 2))
        view.finish(GOOD)
        view.finish(BAD)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_without_a_terminal_there_is_one_plain_line_for_each_node() -> None:
    assert show(is_terminal=False).splitlines() == [
        "csd0: 1,234 files sent (3.0 MiB), 5 already there",
        "csd1: failed",
    ]
    assert "1,234 files would be sent" in show(is_terminal=False, dry_run=True)


def test_on_a_terminal_there_is_a_bar_and_no_line() -> None:
    shown = show(is_terminal=True)
    assert "2 of 2 nodes" in shown
    assert "files sent" not in shown


def test_table_has_a_row_for_each_node_and_marks_failures() -> None:
    console = PrintableConsole(file=StringIO(), width=100)
    render_deliveries(console, {"csd0": GOOD, "csd1": BAD}, dry_run=False)
    rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any("csd0" in row and "1,234" in row and "3.0 MiB" in row for row in rows)
    assert any("csd1" in row and "failed" in row for row in rows)


def test_document_has_deliveries_and_failures() -> None:
    document = outcomes_document("csdctl.deploy/1", {"csd0": GOOD, "csd1": BAD}, is_dry=True)
    assert json.loads(format_json(document)) == {
        "schema": "csdctl.deploy/1",
        "is_dry_run": True,
        "machines": {"csd0": {"num_sent": 1234, "bytes_sent": 3 << 20, "num_present": 5}},
        "failed": {"csd1": {"message": "no room", "remedy": "make some"}},
    }
