"""Models for tests of the worker, built in the test process, which loads TensorFlow once."""

from pathlib import Path
from typing import Any

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.compute.model import save_weights


def keras() -> Any:
    return load_backend()[1]


def carry(model: Any, directory: Path) -> tuple[str, str]:
    """Write `model` as it is transferred to nodes; return the paths of architecture and weights."""
    architecture, weights = directory / "architecture.json", directory / "weights.npz"
    architecture.write_text(model.to_json())
    save_weights(weights, model.get_weights())
    return str(architecture), str(weights)
