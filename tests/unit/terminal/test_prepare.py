"""The output of `prepare`, with and without a terminal and as JSON."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

from csdctl.shipping.store import StoredFile
from csdctl.terminal.console import PrintableConsole
from csdctl.terminal.prepare import prepare_document, render_prepared
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.model_info import ModelInfo
from csdctl.workflows.data.files import SerializedModel
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
