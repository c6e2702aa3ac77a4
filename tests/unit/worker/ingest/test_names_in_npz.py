"""Arrays of an .npz under other names than csdctl looks for."""

from pathlib import Path

import numpy as np
import pytest

from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import PrepareSpec


@pytest.mark.parametrize(
    ("is_private", "found"), [(False, "; it has x_train, y_train$"), (True, r"labels\)$")]
)
def test_they_are_listed_unless_private(tmp_path: Path, is_private: bool, found: str) -> None:
    file = tmp_path / "mnist.npz"
    np.savez(file, x_train=np.zeros((6, 4)), y_train=np.arange(6))
    with pytest.raises(WorkerError, match=f"has no arrays x and y .*{found}") as caught:
        prepare(PrepareSpec(str(file), str(tmp_path / "store"), is_private=is_private))
    assert "FILE.py:NAME" in caught.value.remedy
