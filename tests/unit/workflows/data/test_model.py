"""What is stored of a model that was built."""

from contextlib import closing
from pathlib import Path

from csdctl.fleet.model import HOST_NAME
from csdctl.job.model import load_job
from csdctl.runs.directory import ProjectDirectory
from csdctl.transport.local import LocalSession
from csdctl.workflows.data.model import serialize_model, store_worker

MODEL = """
import keras


def build():
    parts = [keras.Input((size,), name=name) for name, size in (("title", 9), ("body", 5), ("tags", 7))]
    model = keras.Model(parts, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))
    model.compile("sgd", "mse")
    return model
"""


def test_inputs_keep_the_order_in_which_data_is_given_to_fit(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "data.npz").touch()
    (tmp_path / "job.yaml").write_text(
        "model: model.py:build\ndata: {public: {path: data.npz}}\nrecipe: {epochs: 1}\n"
    )
    job, project = load_job(tmp_path / "job.yaml"), ProjectDirectory(tmp_path)
    worker = store_worker(project)
    with closing(LocalSession(HOST_NAME, tmp_path)) as host:
        for _ in ("built", "stored"):
            model = serialize_model(job, worker, host, project)
            assert list(model.info.inputs) == ["title", "body", "tags"]
