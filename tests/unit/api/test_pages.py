"""What pages of the docs show of the interface: callbacks that follow a run, and the notebook."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import csdctl
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.protocol.events import EpochEnd, Event, Ready, event_document

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "follow-a-run.md"
TUTORIALS = Path(__file__).parents[3] / "docs" / "tutorials"
NOTEBOOK: dict[str, Any] = json.loads((TUTORIALS / "notebook.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
END = EpochEnd(
    0, "host", 2, 10, 80, 1.0, 0.1, 1.1, "hash", loss=0.5, validation_loss=0.25, validation_accuracy=0.96
)


def callback(name: str) -> Callable[[dict[str, Any]], object]:
    """Return the callback `name` of the page."""
    [block] = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if f"def {name}(" in block
    ]
    names: dict[str, Callable[[dict[str, Any]], object]] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names[name]


def document(event: Event) -> dict[str, Any]:
    return {"run": "20261122-100000", "time": 1790.0, **event_document(event)}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_epochs_in_tensorboard(directory: Path) -> None:
    load_backend()  # before the callback imports TensorFlow
    callback("to_board")(document(END))
    reader = EventAccumulator(str(directory / "board" / "20261122-100000"))
    reader.Reload()
    values = {
        tag: make_ndarray(event.tensor_proto)
        for tag in reader.Tags()["tensors"]
        for event in reader.Tensors(tag)
    }
    assert values == {"loss": 0.5, "validation_loss": 0.25, "validation_accuracy": pytest.approx(0.96)}


def test_run_is_stopped_when_it_is_good_enough() -> None:
    when_good_enough = callback("when_good_enough")
    assert when_good_enough(document(END)) is csdctl.STOP
    assert when_good_enough(document(Ready(0, "host", 100))) is None
    assert when_good_enough(document(EpochEnd(0, "host", 1, 10, 80, 1.0, 0.1, 1.1, "hash"))) is None


def test_notebook_has_no_outputs() -> None:
    assert CODE
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


def test_page_has_all_cells_under_one_title() -> None:
    hook = runpy.run_path(str(TUTORIALS / "notebook_page.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials/notebook.md"))
    text = str(hook("# A notebook\n", page=page, config=None, files=None))
    assert all("".join(cell["source"]) in text for cell in CODE)
    assert [line for line in text.splitlines() if line.startswith("# ")] == ["# A notebook"]
