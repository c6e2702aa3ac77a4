"""The bars and the output of `prepare`, with and without a terminal and as JSON."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from csdctl.shipping.store import StoredFile
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.prepare import (
    INTERVAL_S,
    PreparationScreen,
    PreparingView,
    prepare_document,
    render_prepared,
)
from csdctl.terminal.streams import Streams
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.workflows.data.files import SerializedModel
from csdctl.workflows.data.prepare import Prepared
from tests.unit.terminal.test_run_view import Clock

PUBLIC = DatasetInfo(
    "/data/public", 1000, (8, 8, 3), "uint8", (), 2, "f", {}, {"ant": 9, "bee": 1, "cat": 990}
)
PRIVATE = replace(
    PUBLIC,
    path="~/private",
    num_samples=5,
    num_skipped={"too_large": 2, "undecodable": 1200},
    class_counts={"ant": 5, "bee": 0, "cat": 0},
    unusable_classes=("cat",),
)
FILE = StoredFile("0" * 64 + ".json", Path("x"), 0)
MODEL = SerializedModel(ModelInfo("m", {"": (8, 8, 3)}, 7, 7), FILE, FILE)
PREPARED = Prepared(FILE, MODEL, PUBLIC, None, {"csd0": PRIVATE})


def test_skipped_samples_and_empty_classes_are_printed() -> None:
    console = PrintableConsole(file=StringIO(), width=100)
    render_prepared(console, PREPARED)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "csd0: 1,202 skipped (2 too large, 1,200 undecodable)",
        "csd0: no usable file in class cat",
        "csd0: no samples of class bee",
        "ready: 1,000 public samples on the host, 5 private samples on 1 nodes, model with 7 parameters",
    ]


def test_skipped_public_samples_are_named() -> None:
    console = PrintableConsole(file=StringIO(), width=100)
    skipped = {"num_skipped": {"undecodable": 3}, "skipped": ("ant/[a].png", "bee/b.png", "bee/c.png")}
    render_prepared(console, replace(PREPARED, public=replace(PUBLIC, **skipped), private={}))
    assert console.file.getvalue().splitlines()[0] == (  # type: ignore[attr-defined]
        "public: 3 skipped (3 undecodable): ant/[a].png, bee/b.png, bee/c.png; "
        "all in /data/public/skipped.txt"
    )


def test_document_has_only_counts_of_private_data() -> None:
    document = prepare_document(PREPARED)
    assert document["private"] == {
        "csd0": {
            "num_samples": 5,
            "num_skipped": {"too_large": 2, "undecodable": 1200},
            "class_counts": {"ant": 5, "bee": 0, "cat": 0},
            "unusable_classes": ("cat",),
        }
    }
    assert document["validation"] is None


def report(view: PreparingView, clock: Clock) -> None:
    """Report from two machines and from one that was not expected, the host at 50 samples/s."""
    for elapsed_s in range(11):
        clock.now = 100.0 + elapsed_s
        view.show("host", PrepareProgress(50 * elapsed_s, 1000))
        view.show("csd0", PrepareProgress(10 * elapsed_s, 0, 1_200))


@pytest.mark.parametrize("width", [80, 200])
def test_each_machine_has_a_bar_with_samples_time_left_and_skipped_ones(width: int) -> None:
    clock = Clock()
    console = PrintableConsole(file=StringIO(), force_terminal=True, width=width, height=24)
    view = PreparingView(console, what="computing features", expected=["host", "csd1"], clock=clock)
    report(view, clock)
    plain = PrintableConsole(file=StringIO(), width=width)
    with plain.capture() as captured:
        plain.print(view._live.get_renderable() if view._live else "")
    title, *rows = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert title == "computing features"
    host, csd1, csd0 = rows
    assert host.startswith("host ")
    assert "500 of 1,000 samples 0:00:10" in host
    assert "starting" in csd1
    assert "100 samples" in csd0
    assert csd0.endswith("1,200 skipped")


def test_lines_without_a_terminal_come_now_and_then() -> None:
    clock = Clock()
    console = PrintableConsole(file=StringIO(), width=80)
    with PreparingView(console, what="computing features", clock=clock) as view:
        report(view, clock)
    first, second = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first == f"computing features: host {50 * INTERVAL_S:,.0f} of 1,000 samples, csd0 40 samples"
    assert second == "computing features: host 500 of 1,000 samples, csd0 90 samples"


def test_quiet_has_no_view_and_no_lines() -> None:
    out = StringIO()
    streams = Streams(stdout=out, is_quiet=True)
    with PreparationScreen(streams).events.working("computing features", ["host", "csd0"]) as show:
        show("host", PrepareProgress(10, 100))
    assert out.getvalue() == ""
