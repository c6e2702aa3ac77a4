"""The output of `deploy` and `exec`, with and without a terminal and as JSON."""

from io import StringIO
from pathlib import Path

from csdctl.errors import RemoteCommandError, UnreachableError
from csdctl.fleet.model import Fleet, Node
from csdctl.shipping.deliver import Delivery, DeliveryProgress
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.nodes import TransferView, exec_document, render_answers
from csdctl.terminal.streams import Streams
from csdctl.transport.many import Outcome
from csdctl.workflows.exec.run_command import ExecResult, build_answer

GOOD = Outcome("csd0", value=Delivery(1234, 3 << 20, 5))
BAD: Outcome[Delivery] = Outcome("csd1", error=RemoteCommandError("no room", node="csd1", remedy="make some"))


def test_without_a_terminal_there_is_one_plain_line_for_each_node() -> None:
    console = PrintableConsole(file=StringIO(), width=100)
    for is_dry_run in (False, True):
        with TransferView(console, 2, is_dry_run=is_dry_run) as view:
            for sent in (0, 1 << 20, 3 << 20):
                view.advance(DeliveryProgress("csd0", sent, 3 << 20))
            view.finish(GOOD)
            view.finish(BAD)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "csd0: 1,234 files sent (3.0 MiB), 5 already there",
        "csd1: failed",
        "csd0: 1,234 files would be sent (3.0 MiB), 5 already there",
        "csd1: failed",
    ]


def result_of(stdout: bytes = b"ok\n") -> ExecResult:
    names = [f"csd{number}" for number in range(10)]
    outcomes = {name: Outcome(name, build_answer(0, stdout, b"", duration_s=0.5)) for name in names[:8]}
    outcomes["csd8"] = Outcome("csd8", build_answer(2, b"", b"df: /x: \x1b[31mgone\n", duration_s=0.5))
    error = UnreachableError("10.0.0.9 port 22 does not respond", node="csd9", remedy="check it")
    outcomes["csd9"] = Outcome("csd9", error=error)
    fleet = Fleet(tuple(Node(name, "10.0.0.1") for name in names), path=Path("fleet.yaml"))
    return ExecResult(fleet, outcomes)


def shown(result: ExecResult) -> tuple[str, str]:
    streams = Streams(StringIO(), StringIO(), is_verbose=False, is_debugging=False)
    render_answers(streams, result)
    return streams.stdout.getvalue(), streams.stderr.getvalue()  # type: ignore[attr-defined]


def test_equal_answers_are_one_row_and_errors_are_apart() -> None:
    output, errors = shown(result_of())
    assert "csd[0-7] (8)\n  ok\n" in output
    assert "csd8: exit code 2\n" in output
    assert "problem: csd9: 10.0.0.9 port 22 does not respond" in output
    assert "csd8, standard error\n  df: /x: " in errors
    assert "\x1b" not in errors


def test_document_has_rows_machines_and_what_to_retry() -> None:
    document = exec_document(result_of(), ["df", "-h"])
    assert document["schema"] == "csdctl.exec/1"
    assert document["command"] == ["df", "-h"]
    assert [row["machines"] for row in document["rows"]] == [["csd[0-7]"], ["csd8"]]  # type: ignore[attr-defined]
    by_name = {machine["name"]: machine for machine in document["machines"]}  # type: ignore[attr-defined]
    assert by_name["csd8"] == {"name": "csd8", "exit_code": 2, "row": 1, "duration_s": 0.5}
    assert by_name["csd9"]["exit_code"] is None
    assert list(document["failed"]) == ["csd8", "csd9"]  # type: ignore[call-overload]
