"""Which graphs are compiled again, what machines get of them, and what is said where there is none."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from csdctl.fleet.model import HOST_NAME, Fleet
from csdctl.job.model import Data, HostData, Job
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.ledger import Ledger
from csdctl.shipping.store import StoredFile, store_bytes
from csdctl.transport.local import LocalSession
from csdctl.worker.protocol.datasets import DatasetInfo
from csdctl.worker.protocol.model_info import Compiled, CompileRequests, FeatureInfo, ModelInfo
from csdctl.worker.protocol.recipe import Recipe
from csdctl.workflows.data.compile import FILES, ModelCompiler, as_prefix, files_of
from csdctl.workflows.data.files import SerializedModel
from csdctl.workflows.workspace.workspace import Workspace

DATA = DatasetInfo("data", 40, (12, 12, 3), "uint8", (), 3, "f", images_sha256="a" * 64)
RECIPE = Recipe(learning_rate=0.1)


class Compiling:
    """Stands for the worker: writes files, or says why not."""

    def __init__(self, root: Path, session: LocalSession) -> None:
        project = ProjectDirectory(root)
        fleet, ledger = Fleet(()), Ledger(project.ledger, "train")
        self.space = Workspace(project, fleet, {}, {HOST_NAME: session}, ledger)
        self.job = Job("model.py:build", Data(HostData(root)), RECIPE)
        self.requests: list[str] = []
        self.said: list[str] = []
        self.reason = ""
        names = ("model", "weights", "prefix", "prefix weights", "head", "head weights")
        self.files = [self.store(name) for name in names]
        self.worker = self.store("worker")

    def store(self, name: str) -> StoredFile:
        return store_bytes(name.encode(), ".json", self.space.project.root)

    def call(self, work: CompileRequests, response: type[Compiled]) -> Compiled:
        for request in work.requests:
            size = "×".join(map(str, request.data.sample_shape))
            self.requests.append(f"{'forward' if request.is_forward else 'step'} {size}")
            for name in FILES if not self.reason else ():
                Path(request.output, name).write_text(f"{request.architecture} {name}")
        return Compiled((self.reason,) * len(work.requests))

    def model(self, recipe: Recipe = RECIPE) -> SerializedModel:
        features = FeatureInfo("base", (8,), (0, 1))
        info = ModelInfo("model.py:build", {"": (12, 12, 3)}, 10, 4, recipe=recipe, features=features)
        return SerializedModel(info, *self.files[:2], parts=tuple(self.files[2:]))

    def prepare(self, recipe: Recipe = RECIPE, data: DatasetInfo = DATA) -> tuple[SerializedModel, list[str]]:
        """Return the compiled model, and what was compiled."""
        before = len(self.requests)
        model = self.compiler(self.model(recipe), data).step()
        return model, self.requests[before:]

    def compiler(self, model: SerializedModel, data: DatasetInfo = DATA) -> ModelCompiler:
        return ModelCompiler(self.job, model, data, self.worker, self.space, self.said.append)

    def divide(self, model: SerializedModel, precision: str) -> tuple[SerializedModel, SerializedModel]:
        return self.compiler(model).parts(precision)


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    with closing(LocalSession(HOST_NAME, tmp_path)) as session:
        found = Compiling(tmp_path, session)
        monkeypatch.setattr("csdctl.workflows.data.compile.start_compiling", lambda *_: found)
        yield found


ALL = ["step 12×12×3", "forward 12×12×3", "step 8"]


def test_only_what_has_changed_is_compiled_again(compiling: Compiling) -> None:
    model, compiled = compiling.prepare()
    assert compiled == ALL
    prefix, head = compiling.divide(model, "float32")
    other_data = replace(DATA, images_sha256="b" * 64, num_samples=50, fingerprint="g")
    assert compiling.prepare(data=other_data) == (model, [])
    assert len(compiling.requests) == len(ALL)
    _, compiled = compiling.prepare(replace(RECIPE, learning_rate=0.2))
    assert compiled == ALL[::2]  # the frozen part does not depend on the recipe
    assert compiling.divide(model, "float16")[0] == prefix
    assert compiling.requests[-1] == "step 8"
    assert compiling.prepare(data=replace(DATA, sample_shape=(16, 16, 3)))[1][0] == "step 16×16×3"
    assert prefix.compiled != head.compiled != model.compiled


def test_damaged_graph_is_compiled_again(compiling: Compiling) -> None:
    model, _ = compiling.prepare()
    for graph in compiling.space.project.models.glob("step-*/graph.pb"):
        graph.write_text("damaged")
    assert compiling.prepare() == (model, ALL)


def test_machines_get_the_graph_alone(compiling: Compiling) -> None:
    code = compiling.store("code")
    model = replace(compiling.model(), code=code, code_roots=(Path("own.py"),))
    found = compiling.compiler(model).forward("")
    assert compiling.requests == ALL[1:2]
    assert files_of(found) == [*found.compiled]
    assert [file.path for file in found.compiled] == [*as_prefix(found).files]
    assert as_prefix(found).code is None
    # Views are made by the job's code.
    assert files_of(found, has_views=True) == [*found.compiled, code]
    assert as_prefix(found, has_views=True).code == model.user_code


def test_model_without_a_graph_is_sent_whole_and_the_reason_is_said(compiling: Compiling) -> None:
    compiling.reason = "py_func calls Python (PyFunc)"
    found = compiling.compiler(compiling.model()).forward("")
    assert compiling.said[-1] == f"the model runs with Python's TensorFlow: {compiling.reason}"
    assert files_of(found) == compiling.files[:2]
    assert as_prefix(found).compiled is None
    compiling.prepare()
    whats = ("the step", "the frozen part", "the step of the head")
    assert compiling.said[-3:] == [
        f"{one} runs with Python's TensorFlow: {compiling.reason}" for one in whats
    ]
