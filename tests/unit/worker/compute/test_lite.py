"""Features by LiteRT are those of Keras but for rounding; where LiteRT is missing, that is said."""

import dataclasses
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.compute import forward, objective
from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.forward import ForwardPass, LitePass, as_features, convert
from csdctl.worker.compute.model import save_weights
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.run_spec import Prefix
from tests.unit.worker.compute.built_models import keras


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
    (directory / "prefix.json").write_text(model.to_json())
    save_weights(directory / "prefix.npz", model.get_weights())
    stored = [_store(directory / name) for name in ("prefix.json", "prefix.npz")]
    return Prefix(*stored, (0.0, 1.0))


def _store(path: Path) -> str:
    """Rename a file as the store does: by its content."""
    target = path.with_name(hashlib.sha256(path.read_bytes()).hexdigest() + path.suffix)
    path.rename(target)
    return str(target)


@pytest.mark.parametrize("input_range", [(0.0, 1.0), (-1.0, 3.0)])
def test_bytes_are_scaled_to_the_range_by_either_engine(input_range: tuple[float, float]) -> None:
    tf, _ = load_backend()
    low, high = input_range
    samples = np.array([0, 51, 255], np.uint8)
    expected = [low, low + 0.2 * (high - low), high]
    assert forward.scale(samples, input_range, np.float32).tolist() == pytest.approx(expected)
    found = objective.scale(tf.constant(samples), input_range, "float32", tf)
    assert found.numpy().tolist() == pytest.approx(expected)
    for unscaled, given in ((samples, None), (samples.astype(np.float32), input_range)):
        assert forward.scale(unscaled, given, np.float32).tolist() == [0, 51, 255]
        assert objective.scale(tf.constant(unscaled), given, "float32", tf).numpy().tolist() == [0, 51, 255]


def test_features_are_those_of_keras(tmp_path: Path) -> None:
    import tensorflow as tf

    prefix = prefix_in(tmp_path)
    output = tmp_path / "prefix.tflite"
    assert convert(prefix, output, tf, keras()) == output.stat().st_size
    lite = dataclasses.replace(prefix, lite=_store(output))
    samples = np.random.default_rng(0).integers(0, 256, (70, 12, 12, 3)).astype(np.uint8)
    expected = ForwardPass(prefix, as_features(prefix), tf, keras()).run(samples)
    found = LitePass(lite, as_features(lite), 1).run(samples)
    assert found.shape == expected.shape == (70, 8)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5


@pytest.fixture
def no_litert() -> Iterator[None]:
    """Let imports of LiteRT fail, as where it is missing."""
    names = ("ai_edge_litert", "ai_edge_litert.interpreter")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    yield
    for name in names:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("no_litert")
def test_machine_without_litert_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(b"any")
    lite = _store(tmp_path / "model.tflite")
    with pytest.raises(WorkerError, match="has no LiteRT") as error:
        LitePass(Prefix("", "", None, lite=lite), as_features(Prefix("", "", None)), 1)
    assert "ai-edge-litert" in error.value.remedy
