"""The output of `prepare`, with and without a terminal and as JSON."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

from csdctl.shipping.store import StoredFile
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.prepare import PreparingView, prepare_document, render_prepared
from csdctl.worker.protocol.datasets import DatasetInfo, PrepareProgress
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.workflows.data.model import SerializedModel
from csdctl.workflows.data.prepare import Prepared

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
FILE = StoredFile("0" * 64, ".json", Path("x"))
MODEL = SerializedModel(ModelInfo("m", (8, 8, 3), (3,), 7, 7, "softmax"), FILE, FILE)
PREPARED = Prepared(FILE, MODEL, PUBLIC, None, {"csd0": PRIVATE})


def show(*, is_terminal: bool, elapsed_s: float = 0.0) -> str:
    console = PrintableConsole(file=StringIO(), force_terminal=is_terminal, width=100)
    times = iter(range(1000))
    with PreparingView(console, clock=lambda: elapsed_s * next(times)) as view:
        for done in (0, 500, 1000):
            view.show("public", PrepareProgress(done, 1000, done // 500))
        view.show("csd0", PrepareProgress(256, 0, 0))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_without_a_terminal_progress_is_a_plain_line_now_and_then() -> None:
    lines = show(is_terminal=False, elapsed_s=6.0).splitlines()
    assert any(line.startswith("500 of 1,000 samples") for line in lines)
    assert show(is_terminal=False) == ""


def test_skipped_samples_and_empty_classes_are_printed() -> None:
    console = PrintableConsole(file=StringIO(), width=100)
    render_prepared(console, PREPARED)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "csd0: 1,202 left out (2 too large, 1,200 undecodable)",
        "csd0: no usable file in class cat",
        "csd0: no samples of class bee",
        "ready: 1,000 public samples on the host, 5 private samples on 1 nodes, model with 7 parameters",
    ]


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
