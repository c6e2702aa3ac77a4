"""Features by LiteRT are those of Keras but for rounding; where LiteRT is missing, that is said."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.compute.forward import convert, feature_pass
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.features import ConvertSpec
from csdctl.worker.protocol.run_spec import Prefix
from tests.unit.worker.compute.built_models import keras
from tests.unit.worker.ingest.prepared_data import store, store_prefix


def prefix_in(directory: Path) -> Prefix:
    layers = keras().layers
    keras().utils.set_random_seed(1)
    model = keras().Sequential(
        [
            keras().Input((12, 12, 3)),
            layers.Conv2D(8, 3, strides=2, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(6.0),
            layers.DepthwiseConv2D(3),
            layers.GlobalAveragePooling2D(),
        ]
    )
    return store_prefix(directory, model)


@pytest.mark.parametrize("input_range", [(0.0, 1.0), (-1.0, 3.0), None])
def test_features_are_those_of_keras(tmp_path: Path, input_range: tuple[float, float] | None) -> None:
    prefix = dataclasses.replace(prefix_in(tmp_path), input_range=input_range)
    output = tmp_path / "prefix.tflite"
    convert(ConvertSpec(prefix, str(output)))
    lite = dataclasses.replace(prefix, lite=store(output))
    samples = np.random.default_rng(0).integers(0, 256, (70, 12, 12, 3)).astype(np.uint8)
    expected, found = (feature_pass(one, 1).run(samples) for one in (prefix, lite))
    assert found.shape == expected.shape == (70, 8)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5


def test_machine_without_litert_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ai_edge_litert", "ai_edge_litert.interpreter"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "model.tflite").write_bytes(b"any")
    lite = store(tmp_path / "model.tflite")
    with pytest.raises(WorkerError, match="has no LiteRT") as error:
        feature_pass(Prefix("", "", None, lite=lite), 1)
    assert "ai-edge-litert" in error.value.remedy
