"""The model of a run whose class has no get_config: only its weights were saved."""

import json
from pathlib import Path

import numpy as np
import pytest

import csdctl
from csdctl.errors import InputError
from csdctl.worker.compute.model import build, save_model
from csdctl.worker.protocol.model_info import BuildRequest, BuildSpec
from csdctl.worker.protocol.recipe import Recipe

TEXT = """
import keras


class Tower(keras.Model):
    def __init__(self, layers):
        super().__init__()
        self.all = layers

    def call(self, inputs):
        for layer in self.all:
            inputs = layer(inputs)
        return inputs


def build(width):
    model = Tower([keras.layers.Dense(width), keras.layers.Dense(3)])
    model.compile(optimizer="sgd", loss="mean_squared_error")
    return model
"""


def test_it_is_built_by_the_function_and_gets_the_weights_or_what_is_missing_is_said(tmp_path: Path) -> None:
    # A run as training leaves it in a project.
    code = tmp_path / "tower_of_layers.py"
    code.write_text(TEXT)
    architecture = tmp_path / ".csdctl" / "objects"
    files = tmp_path / ".csdctl" / "runs" / "20261122-100000-000000"
    architecture.mkdir(parents=True)
    files.mkdir(parents=True)
    shapes = {"": ("float32", (5,))}
    spec = BuildSpec(f"{code}:build", {"width": 4}, Recipe(), str(tmp_path), (str(code),), shapes)
    build(BuildRequest(spec, str(architecture)))
    (files / "spec.json").write_text(json.dumps({"architecture": ".csdctl/objects/architecture.json"}))
    model = __import__("tower_of_layers").build(4)
    model(np.zeros((1, 5), np.float32))
    model.set_weights([np.full(weight.shape, 0.5) for weight in model.get_weights()])
    for name in ("model.keras", "best.keras"):
        assert save_model(model, files / name).name == name.replace(".keras", ".weights.h5")
    run = csdctl.load_run(directory=tmp_path)
    values = np.ones((2, 5), np.float32)
    for best in (False, True):
        again = run.model(best=best)
        assert type(again) is type(model)
        assert np.array_equal(again(values), model(values))
        assert again.loss == "mean_squared_error"
    (tmp_path / ".csdctl" / "objects" / "architecture.json").unlink()
    missing = "cannot be built again.*No such file"
    with pytest.raises(InputError, match=missing) as caught:
        run.model()
    assert "model.load_weights(" in caught.value.remedy
    assert "model.weights.h5" in caught.value.remedy
    (files / "model.keras").write_bytes(b"")
    with pytest.raises(InputError, match=r"→ pass its own classes: run\.model\("):
        run.model()
