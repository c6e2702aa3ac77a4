"""The notebook of the docs in a real kernel, cell by cell, and what its reader gets to see."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupyter_client
import nbclient
import nbformat
import pytest

from tests.emulated.running import csdctl
from tests.patience import scaled

pytestmark = [pytest.mark.emulated, pytest.mark.thorough]
NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "notebook.ipynb"
ENDLESS = """
import csdctl, numpy as np, keras
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="softmax")])
model.compile("sgd", "sparse_categorical_crossentropy")
x = np.random.default_rng(0).random((600, 8), np.float32)
job = csdctl.Job.from_model(model, (x, x[:, :3].argmax(axis=1)), epochs=100_000)
"""
INTERRUPTED = """
def tell(event):
    if event["event"] in ("Progress", "EpochEnd"):  # of a short epoch there is only its end
        print("it trains", flush=True)

csdctl.train(job, batch_size=32, callbacks=[tell])
"""


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A kernel that neither reads nor writes the settings of the user."""
    directory = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(directory / name))
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def outputs_of(notebook: Any, code: str) -> list[Any]:
    """Return the outputs of the cell with `code`."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and code in cell.source]
    return list(cell.outputs)


def text_of(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_notebook_trains_as_fit_does_and_shows_every_epoch(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=None,
        startup_timeout=round(scaled(60)),
        iopub_timeout=round(scaled(60)),  # for the last outputs of a cell
        kernel_name="python3",
        coalesce_streams=True,  # as a notebook does: lines that follow each other are one output
        resources={"metadata": {"path": str(tmp_path)}},
    )
    try:
        client.execute()
    finally:
        csdctl(tmp_path, "emulate", "down")
    text = text_of(outputs_of(notebook, "by_fit"))
    accuracies = re.search(r"accuracy: csdctl ([\d.]+), model.fit ([\d.]+)", text)
    assert accuracies, text
    by_csdctl, by_fit = map(float, accuracies.groups())
    assert min(by_csdctl, by_fit) > 0.9
    assert abs(by_csdctl - by_fit) < 0.06
    lines = text_of(outputs_of(notebook, "run.history.items()")).splitlines()[:4]
    assert sorted(line.split()[0] for line in lines) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert [len(line.split()) for line in lines] == [5] * 4
    outputs = [*outputs_of(notebook, "csdctl.tune("), *outputs_of(notebook, "run = csdctl.train(")]
    assert {(output.output_type, output.get("name")) for output in outputs} == {("stream", "stdout")}
    text = text_of(outputs)
    assert re.findall(r"^epoch (\d)/4: ", text, re.MULTILINE) == ["1", "2", "3", "4"]
    assert "\x1b[?" not in text  # moves no cursor
    assert re.search(r"^completed: .* samples/s", text, re.MULTILINE)
    assert outputs_of(notebook, "report.state")[0].data["text/plain"] == "('completed', True)"


def test_interrupted_cell_stops_the_run_in_order(tmp_path: Path) -> None:
    done = csdctl(tmp_path, "emulate", "up", "--nodes", "1", "--cpu", "0.5")
    assert done.returncode == 0, done.stderr
    manager, client = jupyter_client.manager.start_new_kernel(startup_timeout=scaled(60), cwd=str(tmp_path))
    said: list[str] = []

    def interrupt_once(message: Any) -> None:
        said.append(str(message["content"].get("text", "")))
        if "it trains" in said[-1] and not manager.has_been_interrupted:
            manager.has_been_interrupted = True
            manager.interrupt_kernel()

    manager.has_been_interrupted = False
    try:
        client.execute_interactive(ENDLESS, timeout=None, output_hook=lambda _: None)
        reply = client.execute_interactive(INTERRUPTED, timeout=None, output_hook=interrupt_once)
        assert reply["content"]["ename"] == "RunStopped", "".join(said)
        assert "stopped; the state of the last completed step is kept" in "".join(said)
        state = client.execute_interactive(
            "run = csdctl.load_run()",
            user_expressions={"found": "run.report().state, type(run.model()).__name__"},
            timeout=None,
        )
        answer = state["content"]["user_expressions"]["found"]
        assert answer.get("data", answer) == {"text/plain": "('stopped', 'Sequential')"}
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        csdctl(tmp_path, "emulate", "down")
