"""The choice of the strategy, compared with trials of every strategy that was compared.

    make bench ARGS="-k strategy_choice"

For each setting, `tune` chooses a strategy; then each one that it compared (of splits the two best) is
planned for and trained. Prints the seconds of the whole training as forecast and as measured, and whether
they lie in the range of the forecast. A limited link is the loopback interface of a network namespace, which
all machines share.
"""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.running import csdctl, emulated_fleet, limited_link
from examples.sample_data import fetch_fashion_mnist
from examples.transfer_learning import efficientnet_lite0

NUM_PUBLIC, NUM_FEW, NUM_PRIVATE, NUM_VALIDATION = 1200, 64, 300, 200
NUM_SPLITS = 2
JOB = """\
model: {model}
data:
  public: {{path: {public}}}
  private: {{path: ~/{private}, activations: may-leave}}
  validation: {{path: {validation}}}
  input_range: null
recipe:
  {{epochs: {epochs}, optimizer: sgd, momentum: 0.9, learning_rate: 0.01, metrics: [accuracy]}}
"""
CNN = """\
import keras
from keras import layers


def build():
    inputs = x = keras.Input((28, 28, 1))
    x = layers.Rescaling(1 / 255)(x)
    for width in (32, 64, 128):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    x = layers.Dense(256, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))
"""


@dataclass(frozen=True)
class Setting:
    name: str
    num_nodes: int
    cpu: float
    model: str
    is_private: bool
    """True if all but a few samples are private."""
    epochs: int = 2
    link_mbit_s: int = 0
    """Limit for all traffic together; 0: not limited."""


LITE, FROZEN, SMALL = "efficientnet_lite0.py:build_trained", "efficientnet_lite0.py:build", "cnn.py:build"
SETTINGS = [
    Setting("lite0, private, 4 nodes at 22%", 4, 0.22, LITE, is_private=True),
    Setting("lite0, 4 nodes at 22%", 4, 0.22, LITE, is_private=False, epochs=1),
    Setting("frozen lite0, 4 nodes at 22%", 4, 0.22, FROZEN, is_private=False, epochs=10),
    Setting("frozen lite0, one epoch, 4 nodes at 22%", 4, 0.22, FROZEN, is_private=False, epochs=1),
    Setting("CNN, private, 4 nodes at 22%", 4, 0.22, SMALL, is_private=True, epochs=10),
    Setting("CNN, 4 nodes at 22%", 4, 0.22, SMALL, is_private=False, epochs=10),
    Setting("CNN, private, 2 nodes at 45%, 20 Mbit/s", 2, 0.45, SMALL, is_private=True, link_mbit_s=20),
    Setting("frozen lite0, private, 2 nodes at 45%", 2, 0.45, FROZEN, is_private=True, epochs=10),
    Setting("CNN, private, 2 nodes at 45%", 2, 0.45, SMALL, is_private=True, epochs=10),
    Setting("CNN, private, 2 nodes at 15%, 100 Mbit/s", 2, 0.15, SMALL, is_private=True, link_mbit_s=100),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and pictures at 96×96 and at 28×28."""
    directory = tmp_path_factory.mktemp("choice")
    shutil.copy(efficientnet_lite0.__file__, directory)
    efficientnet_lite0.fetch_weights(directory)
    (directory / "cnn.py").write_text(CNN)
    fashion = fetch_fashion_mnist(directory / "fashion")
    start = 0
    for name, size in (
        ("public", NUM_PUBLIC),
        ("few", NUM_FEW),
        ("validation", NUM_VALIDATION),
        *((f"private{number}", NUM_PRIVATE) for number in range(4)),
    ):
        part = slice(start, start + size)
        start += size
        small, labels = fashion.train_images[part], fashion.train_labels[part].astype(np.int32)
        large = small[..., 0].repeat(3, axis=1).repeat(3, axis=2)
        padded = np.pad(large, [(0, 0), (6, 6), (6, 6)])
        np.savez(directory / f"{name}-96.npz", x=np.repeat(padded[..., None], 3, axis=3), y=labels)
        np.savez(directory / f"{name}-28.npz", x=small, y=labels)
    return directory


@pytest.fixture
def project(files: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Setting]]:
    setting: Setting = request.param
    for name in ("efficientnet_lite0.py", "weights.npz", "cnn.py"):
        shutil.copy(files / name, tmp_path)
    size = "28" if setting.model == SMALL else "96"
    names = {"public": f"{'few' if setting.is_private else 'public'}-{size}.npz"}
    names |= {"private": "private.npz", "validation": f"validation-{size}.npz"}
    for name in (names["public"], names["validation"]):
        shutil.copy(files / name, tmp_path)
    (tmp_path / "job.yaml").write_text(JOB.format(model=setting.model, epochs=setting.epochs, **names))
    with (
        limited_link(setting.link_mbit_s),
        emulated_fleet(tmp_path, setting.num_nodes, setting.cpu, host_threads=1),
    ):
        for number in range(setting.num_nodes):
            home = tmp_path / ".csdctl" / "emulated" / "nodes" / f"csd{number}" / "home"
            shutil.copy(files / f"private{number}-{size}.npz", home / "private.npz")
        csdctl(tmp_path, "prepare")
        yield tmp_path, setting


def tune(project: Path, *arguments: str) -> dict[str, Any]:
    *_, plan = csdctl(project, "tune", *arguments)
    found: dict[str, Any] = plan
    return found


def train(project: Path, strategy: dict[str, Any]) -> float:
    """Plan for a strategy and train it to its end; return the seconds of the whole command."""
    cut = ("--cut", strategy["cut"]) if strategy["strategy"] == "split" else ()
    tune(project, "--strategy", strategy["strategy"], *cut)
    shutil.rmtree(project / ".csdctl" / "features", ignore_errors=True)
    for features in project.glob(".csdctl/emulated/nodes/*/home/.csdctl/machines/*/.csdctl/features"):
        shutil.rmtree(features)
    began = time.monotonic()
    csdctl(project, "train", "--skip-doctor", "--no-rebalance")
    return time.monotonic() - began


def is_chosen(strategy: dict[str, Any], plan: dict[str, Any]) -> bool:
    return bool(
        strategy["strategy"] == plan["strategy"]
        and (strategy["strategy"] != "split" or strategy["cut"] == plan["cut"])
    )


@pytest.mark.parametrize("project", SETTINGS, indirect=True, ids=[setting.name for setting in SETTINGS])
def test_strategy_choice(project: tuple[Path, Setting]) -> None:
    directory, setting = project
    plan = tune(directory)
    compared = [strategy for strategy in plan["strategies"] if strategy["first_run_s"] is not None]
    splits = sorted(
        (strategy for strategy in compared if strategy["strategy"] == "split"),
        key=lambda strategy: strategy["first_run_s"],
    )
    if not compared:
        print(f"\n{setting.name}: nothing to compare with data-parallel: {plan['strategies']}")
        return
    measured = []
    for strategy in [
        *(strategy for strategy in compared if strategy["strategy"] != "split"),
        *splits[:NUM_SPLITS],
    ]:
        measured.append((train(directory, strategy), strategy))
        mark = "  chosen" if is_chosen(strategy, plan) else ""
        name = f"{strategy['strategy']} {strategy['cut']}".strip()
        low, high = strategy["first_run_s_range"]
        where = "in its range" if low <= measured[-1][0] <= high else "OUTSIDE"
        forecast = f"forecast {strategy['first_run_s']:.0f} s ({low:.0f} to {high:.0f})"
        print(f"\n    {name}: {forecast}, took {measured[-1][0]:.0f} s, {where}{mark}", flush=True)
    best_s = min(seconds for seconds, _ in measured)
    ((chosen_s, chosen),) = [
        (seconds, strategy) for seconds, strategy in measured if is_chosen(strategy, plan)
    ]
    print(f"{setting.name}: the chosen strategy took {chosen_s / best_s - 1:.1%} more time than the best")
    print(f"    and {chosen_s / chosen['first_run_s'] - 1:+.1%} more than its forecast")
